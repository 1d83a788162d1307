/* What the Python side of strata_cpu sees, and what the parts of the library share.
 *
 * Structures that cross to Python are declared again in strata_cpu/library.py: change both, and ABI_VERSION. All sizes
 * are in elements unless a name says bytes. Rows of activations are float32, one after the other.
 */
#ifndef STRATA_H
#define STRATA_H

#include <stddef.h>
#include <stdint.h>

#define ABI_VERSION 4

#if defined(_WIN32)
#define API __declspec(dllexport)
#else
#define API __attribute__((visibility("default")))
#endif

/* ---- weights ------------------------------------------------------------------------------------------------- */

enum { LANES = 16 };  /* rows of a weight panel, and lanes of the vectors that the kernels are written in */
enum { BLOCK = 32 };  /* elements of a quantised block */

/* How a panel is stored. A panel is 16 rows of a matrix; it is a run of blocks of 16 rows x 32 columns, each with its
 * scales first (16 float16 numbers, one a row) and its codes after them. Codes are unsigned; a weight is
 * scale * (code - zero), or scale * code + offset. The codes of a block form eight vectors of 64 bytes: vector i holds
 * columns 4i .. 4i + 3 of row 0, then of row 1, and so on. Vectors i and i + 4 share 64 bytes, as low and high
 * halves. */
enum Kind {
    KIND_Q4,        /* scale[16], nibbles[4][64]; zero 8 */
    KIND_Q4_OFFSET, /* scale[16], offset[16], nibbles[4][64] */
    KIND_Q5,        /* scale[16], nibbles[4][64], fifth bits[64] (bit i of a byte: vector i); zero 16 */
    KIND_Q5_OFFSET, /* scale[16], offset[16], nibbles[4][64], fifth bits[64] */
    KIND_Q6,        /* scale[2][16] (columns 0-15, 16-31), nibbles[4][64], upper two bits[2][64]; zero 32 */
    KIND_Q8,        /* scale[16], codes[8][64]; zero 128 */
    KIND_F16,       /* not in blocks: columns one after the other, 16 numbers each */
    KIND_BF16,
    KIND_F32,
    KINDS
};

/* Types of tensors that `strata_pack` reads, as they are in GGUF files. */
enum Stored { STORED_Q4_0, STORED_Q4_1, STORED_Q5_0, STORED_Q5_1, STORED_Q8_0, STORED_Q4_K, STORED_Q5_K, STORED_Q6_K,
              STORED_F16, STORED_BF16, STORED_F32 };

typedef struct {
    int32_t kind;
    int32_t rows;      /* out_features of this part */
    int32_t width;     /* in_features */
    int32_t panels;    /* rows / 16, rounded up; the rows that are too many are zero */
    int64_t stride;    /* bytes of a panel */
    uint8_t *data;
    const float *bias; /* (rows,), or NULL */
} Part;

/* Several parts stacked; outputs follow each other in the order of the parts. */
typedef struct {
    int32_t parts;
    int32_t rows;
    int32_t width;
    int32_t panels;
    const Part *part;
} Matrix;

/* ---- a step --------------------------------------------------------------------------------------------------- */

enum KvType { KV_F32, KV_F16, KV_BF16, KV_INT8 };

/* Pages of one layout: page p is at chunks[p / chunk_pages] + (p % chunk_pages) * page_bytes. */
typedef struct {
    int32_t kv_type;
    int32_t page_tokens;
    int32_t chunk_pages;
    int64_t page_bytes;
    uint8_t *const *chunks;
} Store;

typedef struct {
    int32_t start; /* position of the first row */
    int32_t rows;
    const int32_t *const *tables; /* one page table per layout */
} Span;

typedef struct {
    int32_t rows;
    int32_t spans;
    int32_t outputs;
    const Span *span;
    const int32_t *position; /* (rows,) */
    const int32_t *output;   /* (outputs,) rows */
    const Store *const *store; /* one per layout */
} Step;

typedef struct {
    int32_t rotated;
    int32_t interleaved;
    float magnitude;
    const float *frequency; /* (rotated / 2,) */
} Rotation;

/* Where one layer's K/V are in a page (bytes), and how they are attended. window 0: all; softcap 0: none. Sinks are
 * scores that take part in a head's softmax, neither scaled nor capped, and have no value. */
typedef struct {
    int32_t layout;
    int32_t heads;
    int32_t kv_heads;
    int32_t head_dim;
    int32_t value_dim;
    int32_t window;
    float scale;
    float softcap;
    int64_t k, v, k_scale, v_scale;
    const float *sinks; /* (heads,), or NULL */
} Attention;

enum Activation { ACTIVATION_SILU, ACTIVATION_GELU_TANH };

typedef struct {
    const float *attention_norm; /* (width,) */
    const Matrix *qkv;
    const float *q_norm, *k_norm; /* (head_dim,) of every head before its rotation, or NULL */
    const Rotation *rotation;
    Attention attention;
    const Matrix *output;
    const float *ffn_norm;
    const Matrix *gate_up;
    const Matrix *down;
    float eps;
    int32_t activation;
} Layer;

typedef struct {
    int32_t layers;
    const Layer *layer;
    const float *norm;
    float eps;
    const Matrix *output;
} Decoder;

/* ---- recurrent layers ----------------------------------------------------------------------------------------- */

/* Where the sequences of a step keep a layer's state: read before their first row (NULL: zeros), written after their
 * last to another page. */
typedef struct {
    int32_t spans;
    const int32_t *row;         /* (spans + 1,) first row of each, and the number of rows */
    const float *const *before; /* (spans,) */
    float *const *after;        /* (spans,) */
} States;

enum { MOST_KEY_DIM = 512 };

/* A gated delta rule layer. A state is (value_heads, key_dim, value_dim). */
typedef struct {
    int32_t key_heads, value_heads, key_dim, value_dim;
    const float *q, *k;          /* (rows, key_heads * key_dim) */
    const float *v;              /* (rows, value_heads * value_dim) */
    const float *factor, *beta;  /* (rows, value_heads) */
    float *out;                  /* (rows, value_heads * value_dim) */
} Delta;

/* A causal depthwise convolution. A state is ((kernel - 1) * dilation, channels). */
typedef struct {
    int32_t channels, kernel, dilation;
    const float *x;      /* (rows, channels) */
    const float *weight; /* (kernel, channels) */
    float *out;          /* (rows, channels) */
} Conv;

/* ---- calls ---------------------------------------------------------------------------------------------------- */

typedef struct Engine Engine; /* threads, scratch memory and the kernels of one instruction set */

API int strata_abi(void);
/* Name of the i-th instruction set that this library has kernels for and this machine can run, best first; NULL after
 * the last. */
API const char *strata_isa(int i);
/* isa: a name from strata_isa, or NULL for the best. NULL: no memory, no such instruction set, no threads. */
API Engine *strata_open(int threads, const char *isa);
API void strata_close(Engine *e);
API const char *strata_engine_isa(const Engine *e);

API int64_t strata_panel_bytes(int stored, int width);
API int strata_kind(int stored);
/* Memory for weights: zeroed, 64-byte aligned, on large pages where the system gives them. NULL: none left. */
API void *strata_allocate(int64_t bytes);
API void strata_release(void *memory, int64_t bytes);
API void strata_pack(Engine *e, int stored, const uint8_t *tensor, Part *part);
API void strata_rows(const Matrix *m, const int32_t *row, int count, float scale, float *out);

/* The functions below return 0, or 1 when memory for intermediate results is not there. */
API int strata_linear(Engine *e, const Matrix *m, const float *x, int rows, float *out, int add);
API int strata_norm(Engine *e, const float *x, const float *weight, float eps, int groups, int width, float *out);
API int strata_rope(Engine *e, const Step *step, const Rotation *rotation, float *x, int heads, int head_dim);
API int strata_gated(Engine *e, float *gate, const float *up, int64_t count, int activation);
API int strata_attention(Engine *e, const Step *step, const Attention *a, const float *q, const float *k,
                         const float *v, float *out);
/* Ids of the k highest of n scores, best first, the lower id first among equals. 1 <= k <= n < 2^31. 1 also where scores
 * are NaN. */
API int strata_top(Engine *e, const float *x, int64_t n, int64_t k, int64_t *ids);
/* 1 also for a key_dim above MOST_KEY_DIM. */
API int strata_delta(Engine *e, const States *states, const Delta *d);
API int strata_conv(Engine *e, const States *states, const Conv *c);
/* x (rows, width), overwritten; logits (outputs, vocabulary). */
API int strata_decode(Engine *e, const Step *step, const Decoder *d, float *x, float *logits);

#endif
