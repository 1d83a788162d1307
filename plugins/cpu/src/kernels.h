/* The kernels of one instruction set. kernels.c is compiled once for each; dispatch.c chooses. */
#ifndef KERNELS_H
#define KERNELS_H

#include <string.h>

#include "strata.h"

/* 32 activations as integers of 16 bits: x = d * q, |q| <= MOST. Sixteen bits, because eight (one scale in 32) cost
 * what the model's own quantisation costs: on SmolLM2-135M they turn logits by 0.999 in cosine, sixteen are as good as
 * float32. Where words are multiplied, in each four columns the second and the third have changed places, so that two
 * neighbours of q meet the two codes that a word mask takes out of four bytes. Where bytes are multiplied, q holds 32
 * high and then 32 low bytes, both signed: q = 256 * high + low. */
enum { MOST = 32639 }; /* 127 * 256 + 127 */
typedef struct {
    int16_t q[BLOCK];
    float d;
    float sum;       /* d * (half[0] + half[1]) */
    int32_t half[2]; /* sums of columns 0-15 and 16-31 */
} QBlock;

/* The input of a product: rows as they are (for float weights), and in blocks (for quantised weights). */
typedef struct {
    int32_t rows;
    int32_t width;
    const float *x;  /* (rows, width) */
    const QBlock *q; /* (rows, width / 32) */
} Input;

enum { KV_BLOCK = 256 }; /* positions attended at a time */
enum { TILE_ROWS = 32 }; /* most rows of a span that one attention task takes */

/* One attention task: rows [first, first + rows) of a span, all query heads of one K/V head. */
typedef struct {
    const Attention *attention;
    const Store *store;
    const int32_t *table;
    int32_t head;      /* K/V head */
    int32_t position;  /* of the first row */
    int32_t rows;
    const float *q;    /* the first row's first head of this K/V head */
    int64_t q_stride;  /* floats from row to row */
} AttentionTask;

/* Result of attending some positions, not yet divided by the sum of weights: one for each row and head. */
typedef struct {
    float max; /* largest score; -inf: nothing was attended */
    float sum;
    float *value; /* (value_dim rounded up to 16,) */
} Partial;

typedef struct {
    const char *name;
    void (*quantise)(const float *x, int64_t blocks, QBlock *out);
    void (*norm)(const float *x, const float *weight, float eps, int width, float *out);
    void (*gated)(float *gate, const float *up, int64_t count, int activation);
    /* turns: (rotated / 2) cosines, then as many sines. */
    void (*rope)(float *x, int heads, int head_dim, const float *turns, int rotated, int interleaved);
    /* Panels [first, first + count) of a part; out points to the part's first column. */
    void (*product)(const Part *part, int first, int count, const Input *input, float *out, int64_t stride, int add);
    /* k (head_dim), v (value_dim) of one position and K/V head, into their page. */
    void (*write)(const Attention *a, const Store *store, uint8_t *page, int at, int head, const float *k,
                  const float *v);
    /* Attends positions [block * KV_BLOCK, ...) and writes rows * group partial results. */
    void (*attend)(const AttentionTask *task, int block, float *scratch, Partial *partial);
    /* total = total merged with next, which lies behind it in the sequence. */
    void (*merge)(Partial *total, const Partial *next, int value_dim);
    int64_t (*attend_scratch)(const Attention *a, int rows); /* floats */
    void (*delta)(const Delta *d, const float *before, float *after, int head, int first, int row, int rows);
    void (*conv)(const Conv *c, const float *before, float *after, int first, int row, int rows);
    int64_t (*peaks)(const float *x, int64_t n, float *out);
    int64_t (*reaching)(const float *x, int64_t n, const float *high, float least, uint64_t *keys);
} Kernels;

extern const Kernels kernels_portable, kernels_avx2, kernels_avx512, kernels_avx512vnni, kernels_amx, kernels_neon,
                     kernels_neondot;

/* A score, in the upper half, and its id: the smaller the number, the higher the score. Zeros of both signs are equal. */
static inline uint64_t ranking_key(float score, int64_t id) {
    uint32_t bits;
    score += 0.f; /* -0 becomes 0 */
    memcpy(&bits, &score, sizeof bits);
    bits ^= bits >> 31 ? 0 : INT32_MAX;
    return (uint64_t)bits << 32 | (uint64_t)id;
}

static inline float ranking_score(uint64_t key) {
    uint32_t bits = (uint32_t)(key >> 32);
    float score;
    bits ^= bits >> 31 ? 0 : INT32_MAX;
    memcpy(&score, &bits, sizeof score);
    return score;
}

static inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

#endif
