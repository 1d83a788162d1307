/* Conversions of single 16-bit numbers, in integer arithmetic, so that they are the same everywhere. */
#ifndef HALVES_H
#define HALVES_H

#include <stdint.h>
#include <string.h>

static inline uint32_t float_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float bits_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
    if (exponent == 31) return bits_float(sign | 0x7f800000 | fraction << 13);
    if (exponent) return bits_float(sign | (exponent + 112) << 23 | fraction << 13);
    float small = (float)fraction * 0x1p-24f;
    return sign ? -small : small;
}

/* Rounds to nearest even; beyond 65504 becomes infinite. */
static inline uint16_t float_to_half(float x) {
    uint32_t bits = float_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (magnitude < 0x38800000) { /* subnormal: adding 0.5 leaves what is wanted in the lowest bits */
        uint32_t sum = float_bits(bits_float(magnitude) + 0.5f);
        return (uint16_t)(sign | (sum - 0x3f000000));
    }
    return (uint16_t)(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

static inline float bfloat_to_float(uint16_t b) { return bits_float((uint32_t)b << 16); }

static inline uint16_t float_to_bfloat(float x) {
    uint32_t bits = float_bits(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#endif
