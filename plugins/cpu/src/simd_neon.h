/* AArch64's Advanced SIMD: sixteen lanes are four registers. */
#include <arm_neon.h>

typedef struct { float32x4_t q[4]; } vf;
typedef struct { int32x4_t q[4]; } vi;
typedef struct { uint16x8_t q[4]; } vw;

enum { PRODUCT_ROWS = 4, DENSE_ROWS = 1, TILE_VECTORS = 1 };

#define FOUR for (int i = 0; i < 4; i++)
#define QUARTERS(type, expression) do { type out; FOUR out.q[i] = (expression); return out; } while (0)

INLINE vf vf_set(float x) { QUARTERS(vf, vdupq_n_f32(x)); }
INLINE vf vf_load(const float *x) { QUARTERS(vf, vld1q_f32(x + 4 * i)); }
INLINE void vf_store(float *out, vf x) { FOUR vst1q_f32(out + 4 * i, x.q[i]); }
INLINE vf vf_add(vf a, vf b) { QUARTERS(vf, vaddq_f32(a.q[i], b.q[i])); }
INLINE vf vf_sub(vf a, vf b) { QUARTERS(vf, vsubq_f32(a.q[i], b.q[i])); }
INLINE vf vf_mul(vf a, vf b) { QUARTERS(vf, vmulq_f32(a.q[i], b.q[i])); }
INLINE vf vf_div(vf a, vf b) { QUARTERS(vf, vdivq_f32(a.q[i], b.q[i])); }
INLINE vf vf_fma(vf a, vf b, vf c) { QUARTERS(vf, vfmaq_f32(c.q[i], a.q[i], b.q[i])); }
/* The second operand where either is NaN. */
INLINE vf vf_max(vf a, vf b) { QUARTERS(vf, vbslq_f32(vcgtq_f32(a.q[i], b.q[i]), a.q[i], b.q[i])); }
INLINE vf vf_min(vf a, vf b) { QUARTERS(vf, vbslq_f32(vcltq_f32(a.q[i], b.q[i]), a.q[i], b.q[i])); }
INLINE float vf_sum(vf x) { return vaddvq_f32(vaddq_f32(vaddq_f32(x.q[0], x.q[1]), vaddq_f32(x.q[2], x.q[3]))); }
INLINE float vf_top(vf x) { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.q[0], x.q[1]), vmaxq_f32(x.q[2], x.q[3]))); }
INLINE vf vf_where_less(vf a, vf b, vf then, vf other) {
    QUARTERS(vf, vbslq_f32(vcltq_f32(a.q[i], b.q[i]), then.q[i], other.q[i]));
}
INLINE vf vf_where_nan(vf a, vf then, vf other) {
    QUARTERS(vf, vbslq_f32(vceqq_f32(a.q[i], a.q[i]), other.q[i], then.q[i]));
}
/* Lanes [low, high) of x, the others of `other`. */
INLINE vf vf_keep(vf x, int low, int high, vf other) {
    const int32_t first[4] = {0, 1, 2, 3};
    const int32x4_t lane = vld1q_s32(first);
    vf out;
    FOUR {
        int32x4_t n = vaddq_s32(lane, vdupq_n_s32(4 * i));
        uint32x4_t inside = vandq_u32(vcgeq_s32(n, vdupq_n_s32(low)), vcltq_s32(n, vdupq_n_s32(high)));
        out.q[i] = vbslq_f32(inside, x.q[i], other.q[i]);
    }
    return out;
}

INLINE vi vf_bits(vf x) { QUARTERS(vi, vreinterpretq_s32_f32(x.q[i])); }
INLINE vf vf_of_bits(vi x) { QUARTERS(vf, vreinterpretq_f32_s32(x.q[i])); }
INLINE vi vf_round(vf x) { QUARTERS(vi, vcvtnq_s32_f32(x.q[i])); }
INLINE vf vf_from_vi(vi x) { QUARTERS(vf, vcvtq_f32_s32(x.q[i])); }
INLINE vi vi_set(int32_t x) { QUARTERS(vi, vdupq_n_s32(x)); }
INLINE vi vi_add(vi a, vi b) { QUARTERS(vi, vaddq_s32(a.q[i], b.q[i])); }
INLINE vi vi_sub(vi a, vi b) { QUARTERS(vi, vsubq_s32(a.q[i], b.q[i])); }
INLINE vi vi_and(vi a, vi b) { QUARTERS(vi, vandq_s32(a.q[i], b.q[i])); }
INLINE vi vi_xor(vi a, vi b) { QUARTERS(vi, veorq_s32(a.q[i], b.q[i])); }
INLINE vi vi_max(vi a, vi b) { QUARTERS(vi, vmaxq_s32(a.q[i], b.q[i])); }
INLINE vi vi_shl(vi x, int n) { QUARTERS(vi, vshlq_s32(x.q[i], vdupq_n_s32(n))); }
INLINE vi vi_sar(vi x, int n) { QUARTERS(vi, vshlq_s32(x.q[i], vdupq_n_s32(-n))); }
INLINE int32_t vi_sum(vi x) { return vaddvq_s32(vaddq_s32(vaddq_s32(x.q[0], x.q[1]), vaddq_s32(x.q[2], x.q[3]))); }
INLINE int32_t vi_top(vi x) { return vmaxvq_s32(vmaxq_s32(vmaxq_s32(x.q[0], x.q[1]), vmaxq_s32(x.q[2], x.q[3]))); }
INLINE void vi_store_words(int16_t *out, vi x) { FOUR vst1_s16(out + 4 * i, vqmovn_s32(x.q[i])); }

INLINE vf vf_load_half(const uint16_t *x) { QUARTERS(vf, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x + 4 * i)))); }
INLINE void vf_store_half(uint16_t *out, vf x) {
    FOUR vst1_u16(out + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.q[i])));
}
INLINE vf vf_load_bfloat(const uint16_t *x) {
    QUARTERS(vf, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(x + 4 * i), 16)));
}
INLINE vf vf_load_bytes(const int8_t *x) {
    int8x16_t bytes = vld1q_s8(x);
    int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    vi wide = {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
                vmovl_s16(vget_high_s16(high))}};
    return vf_from_vi(wide);
}

INLINE vw vw_load(const uint8_t *x) { QUARTERS(vw, vreinterpretq_u16_u8(vld1q_u8(x + 16 * i))); }
/* Word by word: (x >> right) & mask; shifts to the left where `right` is negative. */
INLINE vw vw_take(vw x, int right, int mask) {
    QUARTERS(vw, vandq_u16(vshlq_u16(x.q[i], vdupq_n_s16((int16_t)-right)), vdupq_n_u16((uint16_t)mask)));
}
INLINE vw vw_or(vw a, vw b) { QUARTERS(vw, vorrq_u16(a.q[i], b.q[i])); }
/* Bytes from 0 to 255, less 128. */
INLINE vw vw_centred(vw x) { QUARTERS(vw, veorq_u16(x.q[i], vdupq_n_u16(0x8080))); }
/* Every lane of sums, plus its two words of codes times the two at x. */
INLINE vi vi_dot(vi sums, vw codes, const int16_t *x) {
    int32_t two;
    memcpy(&two, x, sizeof two);
    const int16x8_t values = vreinterpretq_s16_s32(vdupq_n_s32(two));
    vi out;
    FOUR {
        int16x8_t code = vreinterpretq_s16_u16(codes.q[i]);
        int32x4_t low = vmull_s16(vget_low_s16(code), vget_low_s16(values)), high = vmull_high_s16(code, values);
        out.q[i] = vaddq_s32(sums.q[i], vpaddq_s32(low, high));
    }
    return out;
}

#if defined(STRATA_BYTES)
enum { CODES_SIGNED = 1 };
INLINE void vi_store_bytes(int8_t *out, vi x) {
    int16x8_t low = vcombine_s16(vmovn_s32(x.q[0]), vmovn_s32(x.q[1]));
    int16x8_t high = vcombine_s16(vmovn_s32(x.q[2]), vmovn_s32(x.q[3]));
    vst1q_s8(out, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}
INLINE vi vi_dot_bytes(vi sums, vw codes, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    const int8x16_t values = vreinterpretq_s8_s32(vdupq_n_s32(four));
    QUARTERS(vi, vdotq_s32(sums.q[i], vreinterpretq_s8_u16(codes.q[i]), values));
}
#endif

INLINE void prefetch(const uint8_t *x) { __builtin_prefetch(x); }

/* Rows become columns. */
INLINE void transpose(vf r[16]) {
    float rows[16][16];
    for (int i = 0; i < 16; i++) vf_store(rows[i], r[i]);
    for (int i = 0; i < 16; i++) {
        float column[16];
        for (int j = 0; j < 16; j++) column[j] = rows[j][i];
        r[i] = vf_load(column);
    }
}
