/* All kernels of one instruction set: compiled once with each STRATA_ISA_... and its compiler flags. */
#include "simd.h"

#include "product.h"
#include "elementwise.h"
#include "attention.h"
#include "recurrent.h"
#include "scoring.h"

#define TABLE(NAME, isa)                                                                                           \
    const Kernels NAME = {isa, quantise, norm, gated, rope, product, write_head, attend, merge, attend_scratch, \
                          delta, conv, peaks, reaching}

#if defined(STRATA_ISA_AMX)
TABLE(kernels_amx, "amx");
#elif defined(STRATA_ISA_AVX512VNNI)
TABLE(kernels_avx512vnni, "avx512vnni");
#elif defined(STRATA_ISA_AVX512)
TABLE(kernels_avx512, "avx512");
#elif defined(STRATA_ISA_AVX2)
TABLE(kernels_avx2, "avx2");
#elif defined(STRATA_ISA_NEON)
TABLE(kernels_neon, "neon");
#elif defined(STRATA_ISA_NEONDOT)
TABLE(kernels_neondot, "neondot");
#else
TABLE(kernels_portable, "portable");
#endif
