/* AVX2 with FMA and F16C: sixteen lanes are two registers. */
#include <immintrin.h>

typedef struct { __m256 a, b; } vf;
typedef struct { __m256i a, b; } vi;
typedef vi vw;

enum { PRODUCT_ROWS = 4, DENSE_ROWS = 1, TILE_VECTORS = 1 };

#define BOTH(type, f, x, y) ((type){f((x).a, (y).a), f((x).b, (y).b)})

INLINE vf vf_set(float x) { return (vf){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE vf vf_load(const float *x) { return (vf){_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)}; }
INLINE void vf_store(float *out, vf x) { _mm256_storeu_ps(out, x.a), _mm256_storeu_ps(out + 8, x.b); }
INLINE vf vf_add(vf x, vf y) { return BOTH(vf, _mm256_add_ps, x, y); }
INLINE vf vf_sub(vf x, vf y) { return BOTH(vf, _mm256_sub_ps, x, y); }
INLINE vf vf_mul(vf x, vf y) { return BOTH(vf, _mm256_mul_ps, x, y); }
INLINE vf vf_div(vf x, vf y) { return BOTH(vf, _mm256_div_ps, x, y); }
INLINE vf vf_fma(vf x, vf y, vf z) { return (vf){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
/* The second operand where either is NaN. */
INLINE vf vf_max(vf x, vf y) { return BOTH(vf, _mm256_max_ps, x, y); }
INLINE vf vf_min(vf x, vf y) { return BOTH(vf, _mm256_min_ps, x, y); }
INLINE float vf_sum(vf x) {
    __m256 eight = _mm256_add_ps(x.a, x.b);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
INLINE float vf_top(vf x) {
    __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
INLINE vf vf_where_less(vf x, vf y, vf then, vf other) {
    return (vf){_mm256_blendv_ps(other.a, then.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
                _mm256_blendv_ps(other.b, then.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
INLINE vf vf_where_nan(vf x, vf then, vf other) {
    return (vf){_mm256_blendv_ps(other.a, then.a, _mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q)),
                _mm256_blendv_ps(other.b, then.b, _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q))};
}
/* Lanes [low, high) of x, the others of `other`. */
INLINE vf vf_keep(vf x, int low, int high, vf other) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), next = _mm256_add_epi32(lane, _mm256_set1_epi32(8));
    __m256i from = _mm256_set1_epi32(low - 1), to = _mm256_set1_epi32(high);
    __m256i a = _mm256_and_si256(_mm256_cmpgt_epi32(lane, from), _mm256_cmpgt_epi32(to, lane));
    __m256i b = _mm256_and_si256(_mm256_cmpgt_epi32(next, from), _mm256_cmpgt_epi32(to, next));
    return (vf){_mm256_blendv_ps(other.a, x.a, _mm256_castsi256_ps(a)),
                _mm256_blendv_ps(other.b, x.b, _mm256_castsi256_ps(b))};
}

INLINE vi vf_bits(vf x) { return (vi){_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
INLINE vf vf_of_bits(vi x) { return (vf){_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
INLINE vi vf_round(vf x) { return (vi){_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
INLINE vf vf_from_vi(vi x) { return (vf){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
INLINE vi vi_set(int32_t x) { return (vi){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE vi vi_add(vi x, vi y) { return BOTH(vi, _mm256_add_epi32, x, y); }
INLINE vi vi_sub(vi x, vi y) { return BOTH(vi, _mm256_sub_epi32, x, y); }
INLINE vi vi_and(vi x, vi y) { return BOTH(vi, _mm256_and_si256, x, y); }
INLINE vi vi_xor(vi x, vi y) { return BOTH(vi, _mm256_xor_si256, x, y); }
INLINE vi vi_max(vi x, vi y) { return BOTH(vi, _mm256_max_epi32, x, y); }
#define vi_shl(x, n) ((vi){_mm256_slli_epi32((x).a, n), _mm256_slli_epi32((x).b, n)})
#define vi_sar(x, n) ((vi){_mm256_srai_epi32((x).a, n), _mm256_srai_epi32((x).b, n)})
INLINE int32_t vi_sum(vi x) {
    __m256i eight = _mm256_add_epi32(x.a, x.b);
    __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
INLINE int32_t vi_top(vi x) {
    __m256i eight = _mm256_max_epi32(x.a, x.b);
    __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xb1)));
}
INLINE void vi_store_words(int16_t *out, vi x) {
    _mm256_storeu_si256((__m256i *)out, _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8));
}

INLINE vf vf_load_half(const uint16_t *x) {
    const __m128i *from = (const __m128i *)x;
    return (vf){_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from + 1))};
}
INLINE void vf_store_half(uint16_t *out, vf x) {
    _mm_storeu_si128((__m128i *)out, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i *)out + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
INLINE vf vf_load_bfloat(const uint16_t *x) {
    const __m128i *from = (const __m128i *)x;
    vi wide = {_mm256_cvtepu16_epi32(_mm_loadu_si128(from)), _mm256_cvtepu16_epi32(_mm_loadu_si128(from + 1))};
    return vf_of_bits(vi_shl(wide, 16));
}
INLINE vf vf_load_bytes(const int8_t *x) {
    __m128i bytes = _mm_loadu_si128((const __m128i *)x);
    return vf_from_vi((vi){_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
}

INLINE vw vw_load(const uint8_t *x) {
    return (vw){_mm256_loadu_si256((const __m256i *)x), _mm256_loadu_si256((const __m256i *)x + 1)};
}
/* Word by word: (x >> right) & mask; shifts to the left where `right` is negative. */
INLINE __m256i take_words(__m256i x, int right, int mask) {
    __m256i moved = right < 0 ? _mm256_slli_epi16(x, -right) : _mm256_srli_epi16(x, right);
    return _mm256_and_si256(moved, _mm256_set1_epi16((short)mask));
}
INLINE vw vw_take(vw x, int right, int mask) {
    return (vw){take_words(x.a, right, mask), take_words(x.b, right, mask)};
}
INLINE vw vw_or(vw x, vw y) { return BOTH(vw, _mm256_or_si256, x, y); }
/* Every lane of sums, plus its two words of codes times the two at x. */
INLINE vi vi_dot(vi sums, vw codes, const int16_t *x) {
    int32_t two;
    memcpy(&two, x, sizeof two);
    __m256i values = _mm256_set1_epi32(two);
    sums.a = _mm256_add_epi32(sums.a, _mm256_madd_epi16(codes.a, values));
    sums.b = _mm256_add_epi32(sums.b, _mm256_madd_epi16(codes.b, values));
    __asm__("" : "+x"(sums.a), "+x"(sums.b)); /* gcc multiplies first and adds later, products on the stack */
    return sums;
}

INLINE void prefetch(const uint8_t *x) { _mm_prefetch((const char *)x, _MM_HINT_T0); }

INLINE void transpose_eight(__m256 r[8]) {
    __m256 t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}

/* Rows become columns. */
INLINE void transpose(vf r[16]) {
    __m256 quarter[4][8];
    for (int i = 0; i < 8; i++) {
        quarter[0][i] = r[i].a, quarter[1][i] = r[i].b;
        quarter[2][i] = r[i + 8].a, quarter[3][i] = r[i + 8].b;
    }
    for (int i = 0; i < 4; i++) transpose_eight(quarter[i]);
    for (int i = 0; i < 8; i++) {
        r[i] = (vf){quarter[0][i], quarter[2][i]};
        r[i + 8] = (vf){quarter[1][i], quarter[3][i]};
    }
}
