/* Included before everything else: AVX512-VNNI's and AMX's instructions as functions, for machines without them. They
 * compute what Intel's manual says of VPDPBUSD, TILELOADD, TILESTORED and TDPBSUD, and stop where a tile is used beyond
 * how it was configured. */
#ifndef EMULATED_H
#define EMULATED_H
#if defined(STRATA_ISA_AVX512VNNI) || defined(STRATA_ISA_AMX)

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

static inline __m512i emulated_dpbusd(__m512i sums, __m512i a, __m512i b) {
    int32_t sum[16];
    uint8_t x[64];
    int8_t y[64];
    memcpy(sum, &sums, 64), memcpy(x, &a, 64), memcpy(y, &b, 64);
    for (int i = 0; i < 64; i++) sum[i / 4] += x[i] * y[i];
    memcpy(&sums, sum, 64);
    return sums;
}

static _Thread_local struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;
static _Thread_local uint8_t tile_data[8][16][64];

static inline void tile_is(int holds) {
    if (!holds) __builtin_trap();
}

static inline void emulated_config(const void *config) {
    memcpy(&tile_config, config, sizeof tile_config);
    tile_is(sizeof tile_config == 64 && tile_config.palette == 1 && !tile_config.start);
    for (int t = 0; t < 8; t++) tile_is(tile_config.rows[t] <= 16 && tile_config.row_bytes[t] <= 64);
    memset(tile_data, 0, sizeof tile_data);
}

static inline void emulated_release(void) { memset(&tile_config, 0, sizeof tile_config); }

static inline void emulated_load(int t, const void *from, int64_t stride) {
    tile_is(tile_config.palette == 1);
    memset(tile_data[t], 0, sizeof tile_data[t]);
    for (int r = 0; r < tile_config.rows[t]; r++) {
        memcpy(tile_data[t][r], (const char *)from + r * stride, tile_config.row_bytes[t]);
    }
}

static inline void emulated_store(int t, void *to, int64_t stride) {
    tile_is(tile_config.palette == 1);
    for (int r = 0; r < tile_config.rows[t]; r++) {
        memcpy((char *)to + r * stride, tile_data[t][r], tile_config.row_bytes[t]);
    }
}

static inline void emulated_dpbsud(int c, int a, int b) {
    tile_is(tile_config.rows[c] == tile_config.rows[a] && tile_config.row_bytes[c] == tile_config.row_bytes[b]);
    tile_is(tile_config.row_bytes[a] == 4 * tile_config.rows[b]);
    for (int m = 0; m < tile_config.rows[a]; m++) {
        int32_t sum[16];
        memcpy(sum, tile_data[c][m], 64);
        for (int k = 0; k < tile_config.row_bytes[a]; k++) {
            for (int n = 0; n < tile_config.row_bytes[b] / 4; n++) {
                sum[n] += (int8_t)tile_data[a][m][k] * tile_data[b][k / 4][4 * n + k % 4];
            }
        }
        memcpy(tile_data[c][m], sum, 64);
    }
}

#undef _mm512_dpbusd_epi32
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbsud
#define _mm512_dpbusd_epi32 emulated_dpbusd
#define _tile_loadconfig emulated_config
#define _tile_release emulated_release
#define _tile_loadd emulated_load
#define _tile_stored emulated_store
#define _tile_zero(t) memset(tile_data[t], 0, sizeof tile_data[t])
#define _tile_dpbsud emulated_dpbsud

#endif
#endif
