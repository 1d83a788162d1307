/* AVX-512 (F, BW, DQ, VL). */
#include <immintrin.h>

typedef __m512 vf;
typedef __m512i vi;
typedef __m512i vw;

enum { PRODUCT_ROWS = 8, DENSE_ROWS = 4, TILE_VECTORS = 4 };

INLINE vf vf_set(float x) { return _mm512_set1_ps(x); }
INLINE vf vf_load(const float *x) { return _mm512_loadu_ps(x); }
INLINE void vf_store(float *out, vf x) { _mm512_storeu_ps(out, x); }
INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
/* The second operand where either is NaN. */
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vf_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE float vf_sum(vf x) { return _mm512_reduce_add_ps(x); }
INLINE float vf_top(vf x) { return _mm512_reduce_max_ps(x); }
INLINE vf vf_where_less(vf a, vf b, vf then, vf other) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), other, then);
}
INLINE vf vf_where_nan(vf a, vf then, vf other) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), other, then);
}
/* Lanes [low, high) of x, the others of `other`. */
INLINE vf vf_keep(vf x, int low, int high, vf other) {
    low = low < 0 ? 0 : low > 16 ? 16 : low;
    high = high < 0 ? 0 : high > 16 ? 16 : high;
    unsigned mask = high > low ? ((1u << high) - 1) & ~((1u << low) - 1) : 0;
    return _mm512_mask_blend_ps((__mmask16)mask, other, x);
}

INLINE vi vf_bits(vf x) { return _mm512_castps_si512(x); }
INLINE vf vf_of_bits(vi x) { return _mm512_castsi512_ps(x); }
INLINE vi vf_round(vf x) { return _mm512_cvtps_epi32(x); }
INLINE vf vf_from_vi(vi x) { return _mm512_cvtepi32_ps(x); }
INLINE vi vi_set(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
INLINE vi vi_xor(vi a, vi b) { return _mm512_xor_si512(a, b); }
INLINE vi vi_max(vi a, vi b) { return _mm512_max_epi32(a, b); }
#define vi_shl(x, n) _mm512_slli_epi32(x, n)
#define vi_sar(x, n) _mm512_srai_epi32(x, n)
INLINE int32_t vi_sum(vi x) { return _mm512_reduce_add_epi32(x); }
INLINE int32_t vi_top(vi x) { return _mm512_reduce_max_epi32(x); }
INLINE void vi_store_words(int16_t *out, vi x) { _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16(x)); }

#if defined(STRATA_BYTES)
enum { CODES_SIGNED = 0 };
INLINE void vi_store_bytes(int8_t *out, vi x) { _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8(x)); }
INLINE vi vi_dot_bytes(vi sums, vw codes, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm512_dpbusd_epi32(sums, codes, _mm512_set1_epi32(four));
}
#endif

INLINE vf vf_load_half(const uint16_t *x) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x)); }
INLINE void vf_store_half(uint16_t *out, vf x) {
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE vf vf_load_bfloat(const uint16_t *x) {
    return vf_of_bits(vi_shl(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16));
}
INLINE vf vf_load_bytes(const int8_t *x) {
    return vf_from_vi(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)));
}

INLINE vw vw_load(const uint8_t *x) { return _mm512_loadu_si512(x); }
/* Word by word: (x >> right) & mask; shifts to the left where `right` is negative. */
#define vw_shift(x, right)                                                                                         \
    ((right) < 0 ? _mm512_slli_epi16(x, (right) < 0 ? -(right) : 0) : _mm512_srli_epi16(x, (right) < 0 ? 0 : (right)))
#define vw_take(x, right, mask) /* a shift leaves only so many bits by itself */                                    \
    ((right) > 0 && 0xffff >> ((right) > 0 ? (right) : 0) == (mask)                                                \
         ? vw_shift(x, right)                                                                                      \
         : _mm512_and_si512(vw_shift(x, right), _mm512_set1_epi16(mask)))
INLINE vw vw_or(vw a, vw b) { return _mm512_or_si512(a, b); }
/* Bytes from 0 to 255, less 128. */
INLINE vw vw_centred(vw x) { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }
/* Every lane of sums, plus its two words of codes times the two at x. */
INLINE vi vi_dot(vi sums, vw codes, const int16_t *x) {
    int32_t two;
    memcpy(&two, x, sizeof two);
    sums = _mm512_add_epi32(sums, _mm512_madd_epi16(codes, _mm512_set1_epi32(two)));
    __asm__("" : "+v"(sums)); /* gcc multiplies first and adds later, with every product on the stack until then */
    return sums;
}

INLINE void prefetch(const uint8_t *x) { _mm_prefetch((const char *)x, _MM_HINT_T0); }

/* Rows become columns. */
INLINE void transpose(vf r[16]) {
    vf t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
        r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[i]), _mm512_castps_pd(t[i + 2])));
        r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
        r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(t[i + 1]), _mm512_castps_pd(t[i + 3])));
    }
    for (int i = 0; i < 4; i++) { /* r[4j + i] holds column i of each quarter, of rows 4j .. 4j + 3 */
        vf a = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88), b = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        vf c = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88), d = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
        t[i] = _mm512_shuffle_f32x4(a, c, 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
        t[i + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
        t[i + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
    for (int i = 0; i < 16; i++) r[i] = t[i];
}
