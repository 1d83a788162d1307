/* Products of rows with weight panels.
 *
 * What is added in which order depends only on the row and the matrix, never on how many rows there are or which of
 * them share a tile: a row gives the same bits alone and in a batch. Quantised: exact integer sums of a block, then
 * one or two float32 fused multiply-adds per block, block after block. Float weights: four sums (columns 0, 4, 8 ...,
 * columns 1, 5, 9 ... and so on), added pairwise at the end.
 */

/* Bytes ahead at which weights are asked for: about what memory delivers in its latency. */
enum { AHEAD = 6144 };

enum { HALVES = LANES * 2, CODES = 64 }; /* bytes of 16 half floats; bytes of a vector of codes */

INLINE int kind_offset(int kind) { return kind == KIND_Q4_OFFSET || kind == KIND_Q5_OFFSET; }
INLINE int kind_zero(int kind) {
    return kind == KIND_Q4 ? 8 : kind == KIND_Q5 ? 16 : kind == KIND_Q6 ? 32 : kind == KIND_Q8 ? 128 : 0;
}
INLINE int kind_head(int kind) { return kind_offset(kind) || kind == KIND_Q6 ? 2 * HALVES : HALVES; }
INLINE int kind_bytes(int kind) {
    int high = kind == KIND_Q5 || kind == KIND_Q5_OFFSET ? CODES : kind == KIND_Q6 ? 2 * CODES : 0;
    return kind_head(kind) + (kind == KIND_Q8 ? 8 : 4) * CODES + high;
}
/* What a block's codes are multiplied with. */
typedef struct {
    vf scale;
    vf other; /* the offset; KIND_Q6: the scale of the second half */
} Scales;

INLINE Scales load_scales(int kind, const uint8_t *w) {
    vf scale = vf_load_half((const uint16_t *)w);
    int two = kind_offset(kind) || kind == KIND_Q6;
    return (Scales){scale, two ? vf_load_half((const uint16_t *)(w + HALVES)) : scale};
}

/* A row's sums, and one block more: `first` and (for KIND_Q6) `second` are what block_sums found. */
INLINE vf add_block(int kind, vf sums, vi first, vi second, const Scales *s, const QBlock *q) {
    vf d = vf_set(q->d);
    int zero = kind_zero(kind);
    int32_t half = q->half[0], whole = half + q->half[1];
    if (zero) first = vi_sub(first, vi_set(zero * (kind == KIND_Q6 ? half : whole)));
    sums = vf_fma(vf_from_vi(first), vf_mul(s->scale, d), sums);
    if (kind_offset(kind)) sums = vf_fma(s->other, vf_set(q->sum), sums);
    if (kind == KIND_Q6) {
        second = vi_sub(second, vi_set(zero * q->half[1]));
        sums = vf_fma(vf_from_vi(second), vf_mul(s->other, d), sums);
    }
    return sums;
}

INLINE vf load_valid(const float *x, int n) { return n == LANES ? vf_load(x) : vf_load_some(x, n); }

static __attribute__((noinline)) void put_tile(const Part *part, int panel, int rows, const vf *sums, float *out,
                                               int64_t stride, int add) {
    int column = panel * LANES, valid = part->rows - column;
    if (valid > LANES) valid = LANES;
    for (int r = 0; r < rows; r++) {
        float *to = out + r * stride + column;
        vf value = sums[r];
        if (part->bias) value = vf_add(value, load_valid(part->bias + column, valid));
        if (add) value = vf_add(load_valid(to, valid), value);
        if (valid == LANES) vf_store(to, value);
        else vf_store_some(to, value, valid);
    }
}

#if defined(STRATA_BYTES)
#include "product_bytes.h"
#else
/* Codes of eight bits. */
INLINE void block_sums_q8(int rows, const uint8_t *codes, const QBlock *x, int64_t stride, vi *first) {
    for (int r = 0; r < rows; r++) first[r] = vi_set(0);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        vw both = vw_load(codes + i * CODES), even = vw_take(both, 0, 255), odd = vw_take(both, 8, 255);
        for (int r = 0; r < rows; r++) {
            const int16_t *q = x[r * stride].q + 4 * i;
            first[r] = vi_dot(vi_dot(first[r], even, q), odd, q + 2);
        }
    }
}

/* Sums of codes times activations of one block, for `rows` rows: of columns 0-15 in first[] and 16-31 in second[] for
 * KIND_Q6, of all columns in first[] for others. 64 bytes of codes hold vectors g and g + 4 as halves of bytes; of
 * four columns, words take 0 and 2 (`even`) or 1 and 3 (`odd`) together. */
#define CODES_AT(G)                                                                                                \
    do {                                                                                                           \
        vw both = vw_load(codes + (G) * CODES);                                                                    \
        vw even = vw_take(both, 0, 15), odd = vw_take(both, 8, 15);                                                \
        vw even_high = vw_take(both, 4, 15), odd_high = vw_take(both, 12, 15);                                     \
        if (kind == KIND_Q5 || kind == KIND_Q5_OFFSET) { /* bit G of a byte, and bit G + 4 */                      \
            even = vw_or(even, vw_take(upper, (G) - 4, 16));                                                       \
            odd = vw_or(odd, vw_take(upper, (G) + 4, 16));                                                         \
            even_high = vw_or(even_high, vw_take(upper, (G), 16));                                                 \
            odd_high = vw_or(odd_high, vw_take(upper, (G) + 8, 16));                                               \
        } else if (kind == KIND_Q6) { /* bits 2G and 2G + 1 of a byte, here and 64 bytes on */                     \
            even = vw_or(even, vw_take(upper, 2 * (G) - 4, 48));                                                   \
            odd = vw_or(odd, vw_take(upper, 2 * (G) + 4, 48));                                                     \
            even_high = vw_or(even_high, vw_take(more, 2 * (G) - 4, 48));                                          \
            odd_high = vw_or(odd_high, vw_take(more, 2 * (G) + 4, 48));                                            \
        }                                                                                                          \
        for (int r = 0; r < rows; r++) {                                                                           \
            const int16_t *q = x[r * stride].q + 4 * (G);                                                          \
            first[r] = vi_dot(vi_dot(first[r], even, q), odd, q + 2);                                              \
            vi *high = kind == KIND_Q6 ? &second[r] : &first[r];                                                   \
            *high = vi_dot(vi_dot(*high, even_high, q + 16), odd_high, q + 18);                                    \
        }                                                                                                          \
    } while (0)

/* One row and codes of four bits, three of four taken where they lie in their word: sums of 16 and of 256 times the
 * codes are as exact, and one shift of each does for all. */
INLINE vi row_sums_q4(const uint8_t *codes, const int16_t *q) {
    vi sums = vi_set(0), sums16 = vi_set(0), sums256 = vi_set(0), top = vi_set(0);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++, q += 4) {
        vw both = vw_load(codes + i * CODES);
        sums = vi_dot(sums, vw_take(both, 0, 0xf), q);
        sums256 = vi_dot(sums256, vw_take(both, 0, 0xf00), q + 2);
        sums16 = vi_dot(sums16, vw_take(both, 0, 0xf0), q + 16);
        top = vi_dot(top, vw_take(both, 12, 0xf), q + 18);
    }
    return vi_add(vi_add(sums, top), vi_add(vi_sar(sums16, 4), vi_sar(sums256, 8)));
}

INLINE void block_sums(int kind, int rows, const uint8_t *codes, const QBlock *x, int64_t stride, vi *first,
                       vi *second) {
    if (kind == KIND_Q8) {
        block_sums_q8(rows, codes, x, stride, first);
        return;
    }
    if (rows == 1 && (kind == KIND_Q4 || kind == KIND_Q4_OFFSET)) {
        first[0] = row_sums_q4(codes, x->q);
        return;
    }
    vw upper = vw_load(codes + 4 * CODES), more = upper;
    if (kind == KIND_Q6) more = vw_load(codes + 5 * CODES);
    for (int r = 0; r < rows; r++) first[r] = second[r] = vi_set(0);
    CODES_AT(0);
    CODES_AT(1);
    CODES_AT(2);
    CODES_AT(3);
}
#endif

/* One panel times `rows` rows; sums[r] are the 16 results of row r. */
INLINE void quantised_tile(int kind, int rows, const uint8_t *w, int blocks, const QBlock *x, int64_t stride,
                           vf *sums) {
    int head = kind_head(kind), bytes = kind_bytes(kind);
    for (int r = 0; r < rows; r++) sums[r] = vf_set(0);
    for (int b = 0; b < blocks; b++, w += bytes, x++) {
        vi first[PRODUCT_ROWS], second[PRODUCT_ROWS];
        if (rows <= 4) for (int line = 0; line < bytes; line += 64) prefetch(w + AHEAD + line);
        block_sums(kind, rows, w + head, x, stride, first, second);
        Scales s = load_scales(kind, w);
        for (int r = 0; r < rows; r++) sums[r] = add_block(kind, sums[r], first[r], second[r], &s, &x[r * stride]);
    }
}

INLINE vf dense_load(int kind, const uint8_t *w, int column) {
    if (kind == KIND_F32) return vf_load((const float *)w + column * LANES);
    if (kind == KIND_F16) return vf_load_half((const uint16_t *)w + column * LANES);
    return vf_load_bfloat((const uint16_t *)w + column * LANES);
}

INLINE void dense_tile(int kind, int rows, const uint8_t *w, int width, const float *x, int64_t stride, vf *sums) {
    int element = kind == KIND_F32 ? 4 : 2;
    vf part[PRODUCT_ROWS][4];
    for (int r = 0; r < rows; r++) for (int j = 0; j < 4; j++) part[r][j] = vf_set(0);
    int column = 0;
    for (; column + 4 <= width; column += 4) {
        const uint8_t *ahead = w + column * LANES * element + AHEAD;
        for (int line = 0; line < 4 * LANES * element; line += 64) prefetch(ahead + line);
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            vf weight = dense_load(kind, w, column + j);
            for (int r = 0; r < rows; r++) {
                part[r][j] = vf_fma(weight, vf_set(x[r * stride + column + j]), part[r][j]);
            }
        }
    }
    for (int j = 0; column + j < width; j++) {
        vf weight = dense_load(kind, w, column + j);
        for (int r = 0; r < rows; r++) part[r][j] = vf_fma(weight, vf_set(x[r * stride + column + j]), part[r][j]);
    }
    for (int r = 0; r < rows; r++) sums[r] = vf_add(vf_add(part[r][0], part[r][1]), vf_add(part[r][2], part[r][3]));
}

INLINE void tile(int kind, int rows, const Part *part, int panel, const Input *in, int row, float *out, int64_t stride,
                 int add) {
    const uint8_t *w = part->data + panel * part->stride;
    vf sums[PRODUCT_ROWS];
    if (kind >= KIND_F16) {
        dense_tile(kind, rows, w, in->width, in->x + (int64_t)row * in->width, in->width, sums);
    } else {
        int blocks = in->width / BLOCK;
        quantised_tile(kind, rows, w, blocks, in->q + (int64_t)row * blocks, blocks, sums);
    }
    put_tile(part, panel, rows, sums, out + row * stride, stride, add);
}

/* Rows in tiles of the most rows that registers hold, the rest in smaller ones; the panels of one call stay in the
 * cache while all rows pass by. */
INLINE void all_rows(int kind, const Part *part, int first, int count, const Input *in, float *out, int64_t stride,
                     int add) {
    int most = kind >= KIND_F16 ? DENSE_ROWS : kind == KIND_Q6 ? (PRODUCT_ROWS + 1) / 2 : PRODUCT_ROWS;
    int row = 0;
#if defined(STRATA_ISA_AMX)
    if (kind < KIND_F16) row = tiled_rows(kind, part, first, count, in, out, stride, add);
#endif
#define PASS(N)                                                                                                    \
    if (N <= most)                                                                                                 \
        for (; row + (N) <= in->rows; row += (N))                                                                  \
            for (int panel = first; panel < first + count; panel++)                                                \
                tile(kind, N, part, panel, in, row, out, stride, add);
#if defined(__AVX512F__)
    PASS(8)
#endif
#if !defined(STRATA_ISA_PORTABLE)
    PASS(4)
#endif
    PASS(2)
    PASS(1)
#undef PASS
}

static void product(const Part *part, int first, int count, const Input *in, float *out, int64_t stride, int add) {
    switch (part->kind) {
    case KIND_Q4: all_rows(KIND_Q4, part, first, count, in, out, stride, add); break;
    case KIND_Q4_OFFSET: all_rows(KIND_Q4_OFFSET, part, first, count, in, out, stride, add); break;
    case KIND_Q5: all_rows(KIND_Q5, part, first, count, in, out, stride, add); break;
    case KIND_Q5_OFFSET: all_rows(KIND_Q5_OFFSET, part, first, count, in, out, stride, add); break;
    case KIND_Q6: all_rows(KIND_Q6, part, first, count, in, out, stride, add); break;
    case KIND_Q8: all_rows(KIND_Q8, part, first, count, in, out, stride, add); break;
    case KIND_F16: all_rows(KIND_F16, part, first, count, in, out, stride, add); break;
    case KIND_BF16: all_rows(KIND_BF16, part, first, count, in, out, stride, add); break;
    default: all_rows(KIND_F32, part, first, count, in, out, stride, add); break;
    }
}
