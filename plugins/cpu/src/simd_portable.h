/* The vectors of gcc and clang, which they lower to whatever the machine has: for machines without kernels of their
 * own, and as the other headers' meaning. */

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint16_t vw __attribute__((vector_size(64)));

enum { PRODUCT_ROWS = 2, DENSE_ROWS = 1, TILE_VECTORS = 1 };

#define EACH for (int i = 0; i < 16; i++)

INLINE vf vf_set(float x) { return x - (vf){0}; }
INLINE vf vf_load(const float *x) { vf out; memcpy(&out, x, sizeof out); return out; }
INLINE void vf_store(float *out, vf x) { memcpy(out, &x, sizeof x); }
INLINE vf vf_add(vf a, vf b) { return a + b; }
INLINE vf vf_sub(vf a, vf b) { return a - b; }
INLINE vf vf_mul(vf a, vf b) { return a * b; }
INLINE vf vf_div(vf a, vf b) { return a / b; }
INLINE vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
INLINE float vf_sum(vf x) {
    float sum = 0;
    EACH sum += x[i];
    return sum;
}
INLINE float vf_top(vf x) {
    float top = x[0];
    EACH top = x[i] > top ? x[i] : top;
    return top;
}

INLINE vi vf_bits(vf x) { return (vi)x; }
INLINE vf vf_of_bits(vi x) { return (vf)x; }
INLINE vf vf_choose(vi mask, vf then, vf other) { return (vf)((mask & (vi)then) | (~mask & (vi)other)); }
/* The second operand where either is NaN. */
INLINE vf vf_max(vf a, vf b) { return vf_choose(a > b, a, b); }
INLINE vf vf_min(vf a, vf b) { return vf_choose(a < b, a, b); }
INLINE vf vf_where_less(vf a, vf b, vf then, vf other) { return vf_choose(a < b, then, other); }
INLINE vf vf_where_nan(vf a, vf then, vf other) { return vf_choose(a != a, then, other); }
/* Lanes [low, high) of x, the others of `other`. */
INLINE vf vf_keep(vf x, int low, int high, vf other) {
    EACH x[i] = i >= low && i < high ? x[i] : other[i];
    return x;
}
INLINE vi vi_set(int32_t x) { return x - (vi){0}; }
INLINE vi vi_add(vi a, vi b) { return a + b; }
INLINE vi vi_sub(vi a, vi b) { return a - b; }
INLINE vi vi_and(vi a, vi b) { return a & b; }
INLINE vi vi_xor(vi a, vi b) { return a ^ b; }
INLINE vi vi_max(vi a, vi b) { return ((a > b) & a) | (~(a > b) & b); }
INLINE vi vi_shl(vi x, int n) { return x << n; }
INLINE vi vi_sar(vi x, int n) { return x >> n; }
/* To nearest even; for |x| < 2^22, which is all that is asked. Others, NaN included, give some number. */
INLINE vi vf_round(vf x) { return (vi)(x + vf_set(0x1.8p23f)) - vi_set(0x4b400000); }
INLINE vf vf_from_vi(vi x) { return __builtin_convertvector(x, vf); }
INLINE int32_t vi_sum(vi x) {
    int32_t sum = 0;
    EACH sum += x[i];
    return sum;
}
INLINE int32_t vi_top(vi x) {
    int32_t top = x[0];
    EACH top = x[i] > top ? x[i] : top;
    return top;
}
INLINE void vi_store_words(int16_t *out, vi x) { EACH out[i] = (int16_t)x[i]; }

INLINE vf vf_load_half(const uint16_t *x) {
    float out[LANES];
    EACH out[i] = half_to_float(x[i]);
    return vf_load(out);
}
INLINE void vf_store_half(uint16_t *out, vf x) { EACH out[i] = float_to_half(x[i]); }
INLINE vf vf_load_bfloat(const uint16_t *x) {
    float out[LANES];
    EACH out[i] = bfloat_to_float(x[i]);
    return vf_load(out);
}
INLINE vf vf_load_bytes(const int8_t *x) {
    float out[LANES];
    EACH out[i] = (float)x[i];
    return vf_load(out);
}

INLINE vw vw_load(const uint8_t *x) { vw out; memcpy(&out, x, sizeof out); return out; }
/* Word by word: (x >> right) & mask; shifts to the left where `right` is negative. */
INLINE vw vw_take(vw x, int right, int mask) { return (right < 0 ? x << -right : x >> right) & (uint16_t)mask; }
INLINE vw vw_or(vw a, vw b) { return a | b; }
/* Every lane of sums, plus its two words of codes (of twelve bits at most) times the two at x. */
INLINE vi vi_dot(vi sums, vw codes, const int16_t *x) {
    vi both = (vi)codes;
    return sums + (both & 4095) * vi_set(x[0]) + (both >> 16) * vi_set(x[1]);
}

INLINE void prefetch(const uint8_t *x) { (void)x; }

/* Rows become columns. */
INLINE void transpose(vf r[16]) {
    float rows[16][16], column[16];
    EACH vf_store(rows[i], r[i]);
    for (int j = 0; j < 16; j++) {
        EACH column[i] = rows[i][j];
        r[j] = vf_load(column);
    }
}
