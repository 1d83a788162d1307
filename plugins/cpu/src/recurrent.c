/* Recurrent layers over the sequences of a step: sequences, heads and columns are shared out among the threads. */
#include "engine.h"

typedef struct {
    Engine *engine;
    const Delta *delta;
    const Conv *conv;
    const States *states;
} Job;

static void delta_work(void *context, int thread) {
    (void)thread;
    Job *job = context;
    const Delta *d = job->delta;
    int tiles = (d->value_dim + LANES - 1) / LANES, items = job->states->spans * d->value_heads * tiles;
    for (Items taken; team_take(job->engine->team, 1, items, &taken);) {
        int i = taken.first, span = i / (d->value_heads * tiles), head = i / tiles % d->value_heads;
        int64_t at = (int64_t)head * d->key_dim * d->value_dim;
        const float *before = job->states->before[span];
        job->engine->kernels->delta(d, before ? before + at : NULL, job->states->after[span] + at, head,
                                    i % tiles * LANES, job->states->row[span],
                                    job->states->row[span + 1] - job->states->row[span]);
    }
    team_meet(job->engine->team, items);
}

static void conv_work(void *context, int thread) {
    (void)thread;
    Job *job = context;
    int tiles = (job->conv->channels + LANES - 1) / LANES, items = job->states->spans * tiles;
    for (Items taken; team_take(job->engine->team, 8, items, &taken);) {
        for (int i = taken.first; i < taken.end; i++) {
            int span = i / tiles, row = job->states->row[span];
            job->engine->kernels->conv(job->conv, job->states->before[span], job->states->after[span],
                                       i % tiles * LANES, row, job->states->row[span + 1] - row);
        }
    }
    team_meet(job->engine->team, items);
}

int strata_delta(Engine *e, const States *states, const Delta *d) {
    if (d->key_dim > MOST_KEY_DIM) return 1;
    Job job = {e, d, NULL, states};
    team_run(e->team, delta_work, &job);
    return 0;
}

int strata_conv(Engine *e, const States *states, const Conv *c) {
    Job job = {e, NULL, c, states};
    team_run(e->team, conv_work, &job);
    return 0;
}
