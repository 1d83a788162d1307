/* Phases of a step: what all threads of a team do together between two meetings. Every thread calls them in the same
 * order with the same arguments. A phase ends with a meeting, so that its results can be used by the next. */
#ifndef PHASES_H
#define PHASES_H

#include "engine.h"

/* What attention needs beside its inputs. In `split` mode every block of positions is a task of its own, and a second
 * phase merges them: for steps with too few rows to keep the threads busy otherwise. */
typedef struct {
    const Step *step;
    const Attention *attention;
    const float *q, *k, *v; /* first row of each */
    int64_t q_stride, k_stride, v_stride;
    float *out; /* (rows, heads * value_dim) */
    int split;
    int64_t scratch;   /* floats of one thread's part of BUFFER_THREADS */
    int64_t partials;  /* in split mode, how many partial results there are at most: */
    Partial *partial;  /* one for each block and query, */
    float *values;     /* and where they keep their values */
} Attending;

/* Rows of x, normalised with `weight` if that is not NULL, become `in`: the input of a product with `m`. */
void phase_input(Engine *e, const Matrix *m, const float *x, const float *weight, float eps, Input *in);
/* out = in @ m.T, or out += that; rows of out are `stride` floats apart. */
void phase_product(Engine *e, const Matrix *m, const Input *in, float *out, int64_t stride, int add);
/* Cosines and sines of all rows, times the rotation's magnitude: (rows, rotated). */
void phase_turns(Engine *e, const Step *step, const Rotation *rotation, float *turns);
/* Rotates q and k (unless turns is NULL) and writes k and v to their pages. */
void phase_write(Engine *e, const Attending *a, const Rotation *rotation, const float *turns);
void phase_attend(Engine *e, const Attending *a, int thread);
/* gate (rows of `width`, then as many of up, `2 * width` apart) becomes activation(gate) * up. */
void phase_gated(Engine *e, float *gate_up, int rows, int width, int activation, float *out);

int input_bytes(Engine *e, const Matrix *m, int rows); /* 0: no memory */
/* Fills in what follows `out`, for the attention and the step given. */
void attending_plan(Engine *e, Attending *a);
int attending_bytes(Engine *e, const Attending *a); /* 0: no memory; the plan is to be made again afterwards */

static inline int whole(int n, int by) { return (n + by - 1) / by; }

#endif
