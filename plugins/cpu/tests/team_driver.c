/* Runs phases of several shapes on a team and checks what they leave: built with a thread sanitizer, which sees whether
 * what one phase writes is really handed over to the next. Exits with 1 after the first wrong number. */
#include <stdio.h>
#include <stdlib.h>

#include "team.h"

enum { ITEMS = 61, RUNS = 300, PHASES = 7 };

typedef struct {
    Team *team;
    int seen[2][ITEMS]; /* plain memory: how many phases have been by; each phase reads one half and writes the other */
    int last[ITEMS];
} Board;

static void work(void *context, int thread) {
    Board *b = context;
    (void)thread;
    for (int phase = 0; phase < PHASES; phase++) {
        int items = phase % 3 == 1 ? 1 : ITEMS; /* also such with less to do than threads */
        for (Items i; team_take(b->team, phase % 4 + 1, items, &i);) {
            if (phase % 3 == 1) { /* the one item moves all */
                for (int j = 0; j < ITEMS; j++) b->seen[(phase + 1) % 2][j] = b->seen[phase % 2][(j + 1) % ITEMS] + 1;
            }
            for (int j = i.first; phase % 3 != 1 && j < i.end; j++) {
                b->seen[(phase + 1) % 2][j] = b->seen[phase % 2][(j + 7) % ITEMS] + 1;
            }
        }
        team_meet(b->team, items);
    }
    for (Items i; team_take(b->team, 2, ITEMS, &i);) { /* and a last phase that nobody meets after */
        for (int j = i.first; j < i.end; j++) b->last[j] += b->seen[PHASES % 2][ITEMS - 1 - j];
    }
}

int main(void) {
    static const int sizes[] = {1, 2, 3, 9, 16};
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        Board board = {.team = team_new(sizes[s])};
        if (!board.team) return 1;
        for (int run = 0; run < RUNS; run++) {
            for (int j = 0; j < ITEMS; j++) board.seen[0][j] = board.last[j] = run;
            team_run(board.team, work, &board);
            for (int j = 0; j < ITEMS; j++) if (board.last[j] != 2 * run + PHASES) return 1;
        }
        team_free(board.team);
        printf("%d threads\n", sizes[s]);
    }
    return 0;
}
