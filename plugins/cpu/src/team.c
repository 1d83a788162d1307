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
    /* Each on a cache line of its own: threads hammer one while others write the next. */
    _Alignas(64) atomic_uint_least64_t next; /* the phase, and its first item that nobody has: 32 bits each */
    _Alignas(64) atomic_int done;            /* items of the phase */
    _Alignas(64) atomic_int inside;          /* threads in this run, beside the first */
    _Alignas(64) atomic_int stop;
};

typedef struct {
    Team *team;
    int number;
} Seat;

static _Thread_local unsigned phase; /* this thread's, in the run that it is in */
static _Thread_local int taken;      /* items of it */

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

int team_take(Team *t, int grain, int items) {
    uint_least64_t next = atomic_load_explicit(&t->next, memory_order_acquire);
    do {
        if ((unsigned)(next >> 32) != phase || (int)(uint32_t)next >= items) return items;
    } while (!atomic_compare_exchange_weak_explicit(&t->next, &next, next + (unsigned)grain, memory_order_acq_rel,
                                                    memory_order_acquire));
    int first = (int)(uint32_t)next, left = items - first;
    taken += grain < left ? grain : left;
    return first;
}

void team_meet(Team *t, int items) {
    if (!items) return;
    int mine = taken;
    unsigned current = phase++;
    taken = 0;
    if (mine && atomic_fetch_add(&t->done, mine) + mine == items) {
        atomic_store(&t->done, 0);
        atomic_store(&t->next, (uint_least64_t)(current + 1) << 32);
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
        t->work(t->context, seat.number);
        atomic_fetch_sub(&t->inside, 1);
        change(t, &t->left);
    }
}

void team_run(Team *t, Work work, void *context) {
    t->work = work;
    t->context = context;
    t->first = phase = atomic_load(&t->phase.value);
    taken = 0;
    atomic_store(&t->done, 0);
    atomic_store(&t->next, (uint_least64_t)phase << 32);
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
    *t = (Team){.size = threads, .started = 1, .thread = calloc((size_t)threads, sizeof *t->thread), .inside = CLOSED};
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
