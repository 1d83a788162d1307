/* A fixed set of threads that work on one thing together. The thread that calls team_run is number 0 of them.
 *
 * Work is a sequence of phases, the same for all threads. A phase has a number of items; threads take them until none
 * is left, and the phase is over when all items are done - not when all threads have come by. A thread that the system
 * has set aside is therefore only waited for if it holds an item; otherwise it finds the phases that it missed over.
 *
 *     for (Items i; team_take(team, 1, items, &i);) ...
 *     team_meet(team, items);
 *
 * Items are shared out as runs of neighbours. A thread takes from its own run first, from the front, and then from those
 * of others: so it reads on where it has read, and what it will begin with is known before the phase is.
 *
 * What a phase reads may already be written anew when a thread comes late: nothing is to be read before an item is
 * taken, but what stays the same for the whole of team_run.
 */
#ifndef TEAM_H
#define TEAM_H

typedef struct Team Team;
typedef struct {
    int first, end;
} Items;
typedef void (*Work)(void *context, int thread);

Team *team_new(int threads); /* NULL: the threads are not to be had */
void team_free(Team *t);
int team_size(const Team *t);
/* Run work(context, 0), and work(context, 1 .. size - 1) on the threads that come in time; returns when all that began
 * have ended. */
void team_run(Team *t, Work work, void *context);
/* Up to `grain` items of this phase, one at least, that nobody else has. 0: there are none. */
int team_take(Team *t, int grain, int items, Items *taken);
/* The item that this thread begins a phase of so many with, if nobody is faster. */
int team_first(const Team *t, int items);
/* This thread takes no more. Returns when all items are done; what was done is visible to all after. */
void team_meet(Team *t, int items);

#endif
