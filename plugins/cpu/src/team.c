#define _GNU_SOURCE
#include "team.h"

#include <limits.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__x86_64__) || defined(__i386__)
#define relax() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define relax() __asm__ volatile("yield")
#else
#define relax() ((void)0)
#endif

/* How often a waiting thread looks before it sleeps: some 30 microseconds on current x86, above what the shares of a
 * phase differ by. Threads that never sleep take the time of whatever else runs here, and then wait for each other's
 * time slices. */
enum { LOOKS = 400 };

/* Runs of items: one for each thread, up to so many. Whoever finds its own empty looks through all. */
enum { MOST_RUNS = 8 };

enum { CLOSED = 1 << 30 }; /* in `inside`: nobody may enter this run any more */

/* A number that others wait for, and how many of them sleep. */
typedef struct {
    _Alignas(64) atomic_uint value;
    atomic_int sleepers;
} Signal;

struct Team {
    int size, started;
    Work work;
    void *context;
    unsigned first; /* phase that the run began with */
    pthread_t *thread;
    pthread_mutex_t lock; /* where there is no futex */
    pthread_cond_t changed;
    Signal run;   /* counts runs */
    Signal phase; /* counts phases */
    Signal left;  /* counts threads that have left a run */
    int runs; /* that items are shared out in */
    /* Each on a cache line of its own: threads hammer one while others write the next. */
    _Alignas(64) atomic_int done;   /* items of the phase */
    _Alignas(64) atomic_int inside; /* threads in this run, beside the first */
    _Alignas(64) atomic_int stop;
    struct {
        _Alignas(64) atomic_uint_least64_t next; /* the phase, and its first item that nobody has: 32 bits each */
    } run_of[MOST_RUNS];
};

typedef struct {
    Team *team;
    int number;
} Seat;

static _Thread_local unsigned phase; /* this thread's, in the run that it is in */
static _Thread_local int taken;      /* items of it */
static _Thread_local int own;        /* the run of items to take from first */

static void wait_while(Team *t, Signal *s, unsigned value) {
    for (int look = 0; look < LOOKS; look++) {
        if (atomic_load_explicit(&s->value, memory_order_acquire) != value) return;
        relax();
    }
    /* Either a thread on its way to sleep sees the new value, or it is counted here: both in one order for all. */
    atomic_fetch_add(&s->sleepers, 1);
#if defined(__linux__)
    (void)t;
    while (atomic_load(&s->value) == value) syscall(SYS_futex, &s->value, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
    pthread_mutex_lock(&t->lock);
    while (atomic_load(&s->value) == value) pthread_cond_wait(&t->changed, &t->lock);
    pthread_mutex_unlock(&t->lock);
#endif
    atomic_fetch_sub(&s->sleepers, 1);
}

static void change(Team *t, Signal *s) {
    atomic_fetch_add(&s->value, 1);
    if (!atomic_load(&s->sleepers)) return;
#if defined(__linux__)
    (void)t;
    syscall(SYS_futex, &s->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#else
    pthread_mutex_lock(&t->lock);
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
#endif
}

static int run_begin(const Team *t, int run, int items) { return (int)((int64_t)items * run / t->runs); }

int team_first(const Team *t, int items) { return run_begin(t, own, items); }

/* -1: the phase is over; 0: nothing is left of this run. */
static int take_from(Team *t, int run, int grain, int items, Items *found) {
    int begin = run_begin(t, run, items), left = run_begin(t, run + 1, items) - begin;
    uint_least64_t next = atomic_load_explicit(&t->run_of[run].next, memory_order_acquire);
    do {
        if ((unsigned)(next >> 32) != phase) return -1;
        if ((int)(uint32_t)next >= left) return 0;
    } while (!atomic_compare_exchange_weak_explicit(&t->run_of[run].next, &next, next + (unsigned)grain,
                                                    memory_order_acq_rel, memory_order_acquire));
    int first = (int)(uint32_t)next, count = grain < left - first ? grain : left - first;
    *found = (Items){begin + first, begin + first + count};
    taken += count;
    return 1;
}

int team_take(Team *t, int grain, int items, Items *found) {
    for (int i = 0; i < t->runs; i++) {
        int got = take_from(t, (own + i) % t->runs, grain, items, found);
        if (got) return got > 0;
    }
    return 0;
}

/* Every item is free. Whoever comes late sees that another phase has begun, in whichever run it looks. */
static void offer(Team *t, unsigned of) {
    for (int i = 0; i < t->runs; i++) atomic_store(&t->run_of[i].next, (uint_least64_t)of << 32);
}

void team_meet(Team *t, int items) {
    if (!items) return;
    int mine = taken;
    unsigned current = phase++;
    taken = 0;
    if (mine && atomic_fetch_add(&t->done, mine) + mine == items) {
        atomic_store(&t->done, 0);
        offer(t, current + 1);
        change(t, &t->phase);
        return;
    }
    wait_while(t, &t->phase, current);
}

int team_size(const Team *t) { return t->size; }

/* Whether this thread may take part in the run that is going on. */
static int enter(Team *t) {
    int inside = atomic_load(&t->inside);
    do {
        if (inside & CLOSED) return 0;
    } while (!atomic_compare_exchange_weak(&t->inside, &inside, inside + 1));
    return 1;
}

static void *member(void *argument) {
    Seat seat = *(Seat *)argument;
    Team *t = seat.team;
    free(argument);
    for (unsigned run = 0;;) {
        wait_while(t, &t->run, run);
        run = atomic_load(&t->run.value);
        if (atomic_load(&t->stop)) return NULL;
        if (!enter(t)) continue;
        phase = t->first;
        taken = 0;
        own = (int)((int64_t)seat.number * t->runs / t->size);
        t->work(t->context, seat.number);
        atomic_fetch_sub(&t->inside, 1);
        change(t, &t->left);
    }
}

void team_run(Team *t, Work work, void *context) {
    t->work = work;
    t->context = context;
    t->first = phase = atomic_load(&t->phase.value);
    taken = own = 0;
    atomic_store(&t->done, 0);
    offer(t, phase);
    atomic_store(&t->inside, 0);
    change(t, &t->run);
    work(context, 0);
    atomic_fetch_or(&t->inside, CLOSED);
    for (;;) {
        unsigned left = atomic_load(&t->left.value);
        if (atomic_load(&t->inside) == CLOSED) return;
        wait_while(t, &t->left, left);
    }
}

Team *team_new(int threads) {
    Team *t = aligned_alloc(64, (sizeof *t + 63) / 64 * 64);
    if (!t) return NULL;
    *t = (Team){.size = threads, .started = 1, .thread = calloc((size_t)threads, sizeof *t->thread), .inside = CLOSED,
                .runs = threads < MOST_RUNS ? threads : MOST_RUNS};
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
    atomic_store(&t->stop, 1);
    change(t, &t->run);
    for (int i = 1; i < t->started; i++) pthread_join(t->thread[i], NULL);
    pthread_mutex_destroy(&t->lock);
    pthread_cond_destroy(&t->changed);
    free(t->thread);
    free(t);
}
