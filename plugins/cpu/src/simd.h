/* Sixteen lanes, whatever the machine has.
 *
 * Kernels are written once in the types and functions below; simd_<isa>.h gives them for one instruction set:
 *
 *   vf, vi   16 floats, 16 int32
 *   vw       32 words of 16 bits: two for each lane
 *
 * Where bytes are multiplied there is also vi_dot_bytes(sums, codes, x): every lane of sums, plus its four bytes of
 * codes times the four signed ones at x. CODES_SIGNED says that these codes are signed too.
 *
 * Every instruction set computes the same sums in the same order; only vf_sum and vf_top, which add and compare across
 * lanes, are free to choose the order, and each does so the same way every time.
 */
#ifndef SIMD_H
#define SIMD_H

#include <float.h>
#include <math.h>

#include "halves.h"
#include "kernels.h"

#if defined(_MSC_VER) && !defined(__clang__)
#error "the kernels need gcc or clang"
#endif
#define INLINE static inline __attribute__((always_inline))

#if defined(STRATA_ISA_AVX512VNNI) || defined(STRATA_ISA_AMX) || defined(STRATA_ISA_NEONDOT)
#define STRATA_BYTES /* products multiply bytes: product_bytes.h */
#endif
#if defined(STRATA_ISA_NEON) || defined(STRATA_ISA_NEONDOT)
#include "simd_neon.h"
#elif defined(STRATA_ISA_AVX512) || defined(STRATA_BYTES)
#include "simd_avx512.h"
#elif defined(STRATA_ISA_AVX2)
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif

/* What every instruction set builds from the above. */

INLINE vf vf_neg(vf x) { return vf_of_bits(vi_xor(vf_bits(x), vi_set(INT32_MIN))); }
INLINE vf vf_abs(vf x) { return vf_of_bits(vi_and(vf_bits(x), vi_set(INT32_MAX))); }

INLINE vf vf_load_some(const float *x, int n) {
    float padded[LANES] = {0};
    memcpy(padded, x, (size_t)n * sizeof *x);
    return vf_load(padded);
}

INLINE void vf_store_some(float *out, vf x, int n) {
    float all[LANES];
    vf_store(all, x);
    memcpy(out, all, (size_t)n * sizeof *out);
}

/* exp(x) to 2 ulp (Cody & Waite's reduction, Taylor's polynomial); exp(0) is 1; below -87.3 it is 0, and so never
 * subnormal; above 88.7 infinite; NaN stays NaN. */
INLINE vf vf_exp(vf x) {
    vf bounded = vf_max(vf_set(-88.f), vf_min(vf_set(89.f), x));
    vi n = vf_round(vf_mul(bounded, vf_set(1.44269504f)));
    vf k = vf_from_vi(n);
    vf r = vf_fma(k, vf_set(-0.693145752f), bounded);
    r = vf_fma(k, vf_set(-1.42860677e-6f), r);
    vf p = vf_set(1.f / 5040);
    p = vf_fma(p, r, vf_set(1.f / 720));
    p = vf_fma(p, r, vf_set(1.f / 120));
    p = vf_fma(p, r, vf_set(1.f / 24));
    p = vf_fma(p, r, vf_set(1.f / 6));
    p = vf_fma(p, r, vf_set(0.5f));
    p = vf_fma(p, r, vf_set(1.f));
    p = vf_fma(p, r, vf_set(1.f));
    /* 2^n in two steps: n = 128 is no exponent of its own, but exp(88.7) is finite. */
    vi half = vi_sar(n, 1), rest = vi_sub(n, half);
    p = vf_mul(p, vf_of_bits(vi_shl(vi_add(half, vi_set(127)), 23)));
    p = vf_mul(p, vf_of_bits(vi_shl(vi_add(rest, vi_set(127)), 23)));
    p = vf_where_less(x, vf_set(-87.3f), vf_set(0), p);
    return vf_where_nan(x, x, p);
}

INLINE vf vf_sigmoid(vf x) { return vf_div(vf_set(1.f), vf_add(vf_set(1.f), vf_exp(vf_neg(x)))); }

/* tanh(x) = 1 - 2 / (exp(2x) + 1), accurate to 1e-7 absolute. */
INLINE vf vf_tanh(vf x) {
    vf e = vf_exp(vf_add(x, x));
    return vf_sub(vf_set(1.f), vf_div(vf_set(2.f), vf_add(e, vf_set(1.f))));
}

#endif
