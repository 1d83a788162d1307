#define _GNU_SOURCE
#include "team.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#if defined(__x86_64__) || defined(__i386__)
#define relax() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define relax() __asm__ volatile("yield")
#else
#define relax() ((void)0)
#endif

/* How often a waiting thread looks before it sleeps: some 30 microseconds on current x86, above what the phases of a
 * step differ by. Threads that never sleep take the time of whatever else runs here, and then wait for each other's
 * time slices. */
enum { LOOKS = 400 };

struct Team {
    int size, started, stop;
    Work work;
    void *context;
    pthread_t *thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    /* Each on a cache line of its own: threads hammer one while others write the next. */
    _Alignas(64) atomic_uint generation; /* how often all have met */
    _Alignas(64) atomic_int arrived;
    _Alignas(64) atomic_int next;
    _Alignas(64) atomic_int sleepers;
};

typedef struct {
    Team *team;
    int number;
} Seat;

void team_meet(Team *t) {
    unsigned generation = atomic_load(&t->generation);
    if (atomic_fetch_add(&t->arrived, 1) + 1 == t->size) {
        atomic_store(&t->arrived, 0);
        atomic_store(&t->next, 0);
        /* Either a thread on its way to sleep sees the new generation, or it is counted here: both are sequentially
         * consistent. */
        atomic_store(&t->generation, generation + 1);
        if (atomic_load(&t->sleepers)) {
            pthread_mutex_lock(&t->lock);
            pthread_cond_broadcast(&t->changed);
            pthread_mutex_unlock(&t->lock);
        }
        return;
    }
    for (int look = 0; look < LOOKS; look++) {
        if (atomic_load_explicit(&t->generation, memory_order_acquire) != generation) return;
        relax();
    }
    pthread_mutex_lock(&t->lock);
    atomic_fetch_add(&t->sleepers, 1);
    while (atomic_load(&t->generation) == generation) pthread_cond_wait(&t->changed, &t->lock);
    atomic_fetch_sub(&t->sleepers, 1);
    pthread_mutex_unlock(&t->lock);
}

int team_take(Team *t, int grain) { return atomic_fetch_add_explicit(&t->next, grain, memory_order_relaxed); }

int team_size(const Team *t) { return t->size; }

static void *member(void *argument) {
    Seat seat = *(Seat *)argument;
    Team *t = seat.team;
    free(argument);
    for (;;) {
        team_meet(t); /* until there is work */
        if (t->stop) return NULL;
        t->work(t->context, seat.number);
        team_meet(t);
    }
}

void team_run(Team *t, Work work, void *context) {
    t->work = work;
    t->context = context;
    team_meet(t);
    work(context, 0);
    team_meet(t);
}

Team *team_new(int threads) {
    Team *t = aligned_alloc(64, (sizeof *t + 63) / 64 * 64);
    if (!t) return NULL;
    *t = (Team){.size = threads, .started = 1, .thread = calloc((size_t)threads, sizeof *t->thread)};
    pthread_mutex_init(&t->lock, NULL);
    pthread_cond_init(&t->changed, NULL);
    for (; t->thread && t->started < threads; t->started++) {
        Seat *seat = malloc(sizeof *seat);
        if (!seat) break;
        *seat = (Seat){t, t->started};
        if (pthread_create(&t->thread[t->started], NULL, member, seat)) {
            free(seat);
            break;
        }
    }
    if (t->thread && t->started == threads) return t;
    team_free(t);
    return NULL;
}

void team_free(Team *t) {
    t->stop = 1;
    atomic_fetch_add(&t->arrived, t->size - t->started); /* in place of those that never started */
    team_meet(t);
    for (int i = 1; i < t->started; i++) pthread_join(t->thread[i], NULL);
    pthread_mutex_destroy(&t->lock);
    pthread_cond_destroy(&t->changed);
    free(t->thread);
    free(t);
}
