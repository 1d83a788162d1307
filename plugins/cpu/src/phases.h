/* Phases of a step: what all threads of a team do together between two meetings (some have a meeting within). Every
 * thread calls them in the same order with the same arguments. A phase ends with a meeting, so that its results can be
 * used by the next. */
#ifndef PHASES_H
#define PHASES_H

#include <stdatomic.h>

#include "engine.h"

/* What attention needs beside its inputs. In `split` mode every block of positions is a task of its own, and the thread
 * that ends the last of a head merges them: for steps with too few rows to keep the threads busy otherwise. In `fused`
 * mode, for spans of one row, tasks also rotate and write what they need. */
typedef struct {
    const Step *step;
    const Attention *attention;
    const float *q, *k, *v; /* first row of each */
    int64_t q_stride, k_stride, v_stride;
    const float *q_norm, *k_norm; /* of heads, before they are rotated; NULL: none */
    float eps;
    float *out; /* (rows, heads * value_dim) */
    int split, fused;
    int tasks;         /* of the attention itself */
    int64_t scratch;   /* floats of one thread's part of BUFFER_THREADS */
    int64_t partials;  /* in split mode, how many partial results there are at most: */
    Partial *partial;  /* one for each block and query, */
    float *values;     /* and where they keep their values; */
    atomic_int *ended; /* and how many blocks of each tile and head have ended; zero between phases */
} Attending;

/* Rows that go into a product: normalised with `weight` if that is not NULL. */
typedef struct {
    const float *x; /* (rows, matrix width) */
    const float *weight;
    float eps;
    int rows;
} Source;

/* What the phase after the next meeting multiplies with, so that its first weights can be on their way; NULL: nothing. */
typedef const Matrix *Next;

/* out = source @ m.T, or out += that; rows of out are `stride` floats apart. */
void phase_product(Engine *e, int thread, const Matrix *m, Source source, float *out, int64_t stride, int add,
                   Next next);
/* out (rows, width) = activation(source @ gate.T) * (source @ up.T), where m is gate and up, `width` rows each. `both`
 * (rows, 2 * width) is overwritten. */
void phase_gated_product(Engine *e, int thread, const Matrix *m, Source source, int activation, float *both,
                         float *out, Next next);
/* Cosines and sines of all rows, times the rotation's magnitude: (rows, rotated). */
void phase_turns(Engine *e, const Step *step, const Rotation *rotation, float *turns);
/* Norms heads, rotates q and k (unless turns is NULL), writes k and v to their pages, and attends. */
void phase_attention(Engine *e, int thread, const Attending *a, const Rotation *rotation, const float *turns,
                     Next next);
/* Asks for what this thread will read first of a matrix that comes next, if the rows are few: many are multiplied for so
 * long that it makes no difference. */
void fetch_ahead(const Engine *e, Next next, int rows);

int input_bytes(Engine *e, const Matrix *m, int rows); /* 0: no memory */
/* Fills in what follows `out`, for the attention and the step given. */
void attending_plan(Engine *e, Attending *a);
int attending_bytes(Engine *e, const Attending *a); /* 0: no memory; the plan is to be made again afterwards */

static inline int whole(int n, int by) { return (n + by - 1) / by; }

#endif
