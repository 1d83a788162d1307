/* Plain C: for machines without kernels of their own, and as the other headers' meaning. */

typedef struct { float v[16]; } vf;
typedef struct { int32_t v[16]; } vi;
typedef struct { uint16_t v[32]; } vw;

enum { PRODUCT_ROWS = 2, DENSE_ROWS = 2, TILE_VECTORS = 1 };

#define EACH for (int i = 0; i < 16; i++)
#define LANEWISE(type, expression) do { type out; EACH out.v[i] = (expression); return out; } while (0)

INLINE vf vf_set(float x) { LANEWISE(vf, x); }
INLINE vf vf_load(const float *x) { vf out; memcpy(out.v, x, sizeof out.v); return out; }
INLINE void vf_store(float *out, vf x) { memcpy(out, x.v, sizeof x.v); }
INLINE vf vf_add(vf a, vf b) { LANEWISE(vf, a.v[i] + b.v[i]); }
INLINE vf vf_sub(vf a, vf b) { LANEWISE(vf, a.v[i] - b.v[i]); }
INLINE vf vf_mul(vf a, vf b) { LANEWISE(vf, a.v[i] * b.v[i]); }
INLINE vf vf_div(vf a, vf b) { LANEWISE(vf, a.v[i] / b.v[i]); }
INLINE vf vf_fma(vf a, vf b, vf c) { LANEWISE(vf, a.v[i] * b.v[i] + c.v[i]); }
INLINE vf vf_max(vf a, vf b) { LANEWISE(vf, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
INLINE vf vf_min(vf a, vf b) { LANEWISE(vf, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
INLINE float vf_sum(vf x) {
    for (int half = 8; half; half /= 2) for (int i = 0; i < half; i++) x.v[i] += x.v[i + half];
    return x.v[0];
}
INLINE float vf_top(vf x) { float top = x.v[0]; EACH top = x.v[i] > top ? x.v[i] : top; return top; }
INLINE vf vf_where_less(vf a, vf b, vf then, vf other) { LANEWISE(vf, a.v[i] < b.v[i] ? then.v[i] : other.v[i]); }
INLINE vf vf_where_nan(vf a, vf then, vf other) { LANEWISE(vf, isnan(a.v[i]) ? then.v[i] : other.v[i]); }
INLINE vf vf_keep(vf x, int low, int high, vf other) { LANEWISE(vf, i >= low && i < high ? x.v[i] : other.v[i]); }

INLINE vi vf_bits(vf x) { vi out; memcpy(&out, &x, sizeof out); return out; }
INLINE vf vf_of_bits(vi x) { vf out; memcpy(&out, &x, sizeof out); return out; }
/* To nearest even; for |x| < 2^22, which is all that is asked. Others, NaN included, give some number. */
INLINE int32_t round_one(float x) { return (int32_t)(float_bits(x + 0x1.8p23f) - 0x4b400000u); }
INLINE vi vf_round(vf x) { LANEWISE(vi, round_one(x.v[i])); }
INLINE vf vf_from_vi(vi x) { LANEWISE(vf, (float)x.v[i]); }
INLINE vi vi_set(int32_t x) { LANEWISE(vi, x); }
INLINE vi vi_add(vi a, vi b) { LANEWISE(vi, (int32_t)((uint32_t)a.v[i] + (uint32_t)b.v[i])); }
INLINE vi vi_sub(vi a, vi b) { LANEWISE(vi, (int32_t)((uint32_t)a.v[i] - (uint32_t)b.v[i])); }
INLINE vi vi_and(vi a, vi b) { LANEWISE(vi, a.v[i] & b.v[i]); }
INLINE vi vi_xor(vi a, vi b) { LANEWISE(vi, a.v[i] ^ b.v[i]); }
INLINE vi vi_max(vi a, vi b) { LANEWISE(vi, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
INLINE vi vi_shl(vi x, int n) { LANEWISE(vi, (int32_t)((uint32_t)x.v[i] << n)); }
INLINE vi vi_sar(vi x, int n) { LANEWISE(vi, x.v[i] >> n); }
INLINE int32_t vi_sum(vi x) { int32_t sum = 0; EACH sum += x.v[i]; return sum; }
INLINE int32_t vi_top(vi x) { int32_t top = x.v[0]; EACH top = x.v[i] > top ? x.v[i] : top; return top; }
INLINE void vi_store_words(int16_t *out, vi x) { EACH out[i] = (int16_t)x.v[i]; }

INLINE vf vf_load_half(const uint16_t *x) { LANEWISE(vf, half_to_float(x[i])); }
INLINE void vf_store_half(uint16_t *out, vf x) { EACH out[i] = float_to_half(x.v[i]); }
INLINE vf vf_load_bfloat(const uint16_t *x) { LANEWISE(vf, bfloat_to_float(x[i])); }
INLINE vf vf_load_bytes(const int8_t *x) { LANEWISE(vf, (float)x[i]); }

#define WORDWISE(expression) do { vw out; for (int i = 0; i < 32; i++) out.v[i] = (uint16_t)(expression); return out; } while (0)
INLINE vw vw_load(const uint8_t *x) { WORDWISE(x[2 * i] | x[2 * i + 1] << 8); }
/* Word by word: (x >> right) & mask; shifts to the left where `right` is negative. */
INLINE vw vw_take(vw x, int right, int mask) { WORDWISE((right < 0 ? x.v[i] << -right : x.v[i] >> right) & mask); }
INLINE vw vw_or(vw a, vw b) { WORDWISE(a.v[i] | b.v[i]); }
/* Every lane of sums, plus its two words of codes times the two at x. */
INLINE vi vi_dot(vi sums, vw codes, const int16_t *x) { LANEWISE(vi, sums.v[i] + codes.v[2 * i] * x[0] + codes.v[2 * i + 1] * x[1]); }

INLINE void prefetch(const uint8_t *x) { (void)x; }

INLINE void transpose(vf r[16]) {
    vf t[16];
    EACH for (int j = 0; j < 16; j++) t[j].v[i] = r[i].v[j];
    EACH r[i] = t[i];
}
