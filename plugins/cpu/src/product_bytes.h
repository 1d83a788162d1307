/* Sums of codes times activations by instructions that multiply bytes: VNNI, NEON with dot products, and AMX for sixteen
 * rows and more.
 *
 * An activation of 16 bits is 256 * high + low, both signed bytes. The sums of both are exact, and so are the same
 * integers that multiplying words gives: what follows has the same bits.
 */

/* The eight vectors of codes of a block, one code a byte. */
INLINE void unpack_codes(int kind, const uint8_t *codes, vw out[8]) {
    if (kind == KIND_Q8) {
        for (int i = 0; i < 8; i++) out[i] = vw_load(codes + i * CODES);
        return;
    }
    vw upper = vw_load(codes + 4 * CODES), more = upper;
    if (kind == KIND_Q6) more = vw_load(codes + 5 * CODES);
#define UNPACK(G)                                                                                                  \
    do {                                                                                                           \
        vw both = vw_load(codes + (G) * CODES);                                                                    \
        out[G] = vw_take(both, 0, 0x0f0f), out[(G) + 4] = vw_take(both, 4, 0x0f0f);                                \
        if (kind == KIND_Q5 || kind == KIND_Q5_OFFSET) { /* bit i of a byte: vector i */                           \
            out[G] = vw_or(out[G], vw_take(upper, (G) - 4, 0x1010));                                               \
            out[(G) + 4] = vw_or(out[(G) + 4], vw_take(upper, (G), 0x1010));                                       \
        } else if (kind == KIND_Q6) { /* bits 2G and 2G + 1 of a byte, here and 64 bytes on */                     \
            out[G] = vw_or(out[G], vw_take(upper, 2 * (G) - 4, 0x3030));                                           \
            out[(G) + 4] = vw_or(out[(G) + 4], vw_take(more, 2 * (G) - 4, 0x3030));                                \
        }                                                                                                          \
    } while (0)
    UNPACK(0);
    UNPACK(1);
    UNPACK(2);
    UNPACK(3);
#undef UNPACK
}

INLINE void block_sums(int kind, int rows, const uint8_t *codes, const QBlock *x, int64_t stride, vi *first,
                       vi *second) {
    vw code[8];
    unpack_codes(kind, codes, code);
    if (CODES_SIGNED && kind == KIND_Q8) for (int i = 0; i < 8; i++) code[i] = vw_centred(code[i]);
    vi high[2][PRODUCT_ROWS], low[2][PRODUCT_ROWS];
    for (int r = 0; r < rows; r++) high[0][r] = low[0][r] = high[1][r] = low[1][r] = vi_set(0);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        int half = kind == KIND_Q6 && i >= 4;
        for (int r = 0; r < rows; r++) {
            const int8_t *q = (const int8_t *)x[r * stride].q + 4 * i;
            high[half][r] = vi_dot_bytes(high[half][r], code[i], q);
            low[half][r] = vi_dot_bytes(low[half][r], code[i], q + BLOCK);
        }
    }
    for (int r = 0; r < rows; r++) {
        first[r] = vi_add(vi_shl(high[0][r], 8), low[0][r]);
        if (CODES_SIGNED && kind == KIND_Q8) {
            first[r] = vi_add(first[r], vi_set(128 * (x[r * stride].half[0] + x[r * stride].half[1])));
        }
        if (kind == KIND_Q6) second[r] = vi_add(vi_shl(high[1][r], 8), low[1][r]);
    }
}

#if defined(STRATA_ISA_AMX)

enum { TILE = 16, GROUP_TILES = 4 }; /* rows of a tile; tiles of rows that meet one unpacked block of weights */

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

/* Tiles 0-3: sums of a half, high and low; 4 and 5: codes of the first and the second half; 6 and 7: activations. A
 * half is a whole block of columns, but for KIND_Q6 whose halves have scales of their own. */
INLINE void configure_tiles(int kind) {
    int columns = kind == KIND_Q6 ? BLOCK / 2 : BLOCK;
    TileConfig c = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        c.rows[i] = (uint8_t)(i == 4 || i == 5 ? columns / 4 : TILE);
        c.row_bytes[i] = (uint16_t)(i < 6 ? CODES : columns);
    }
    _tile_loadconfig(&c);
}

/* Sums of one block for 16 rows, high bytes in sums[0] and low in sums[1]; of KIND_Q6's second half in [2] and [3]. */
INLINE void tile_sums(int kind, const QBlock *x, int64_t stride, int32_t sums[4][TILE][LANES]) {
    const int8_t *q = (const int8_t *)x->q;
    const int64_t bytes = stride * (int64_t)sizeof *x;
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(6, q, bytes);
    _tile_loadd(7, q + BLOCK, bytes);
    _tile_dpbsud(0, 6, 4);
    _tile_dpbsud(1, 7, 4);
    _tile_stored(0, sums[0], CODES);
    _tile_stored(1, sums[1], CODES);
    if (kind != KIND_Q6) return;
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(6, q + BLOCK / 2, bytes);
    _tile_loadd(7, q + BLOCK + BLOCK / 2, bytes);
    _tile_dpbsud(2, 6, 5);
    _tile_dpbsud(3, 7, 5);
    _tile_stored(2, sums[2], CODES);
    _tile_stored(3, sums[3], CODES);
}

INLINE vi whole_sum(const int32_t *high, const int32_t *low) {
    return vi_add(vi_shl(_mm512_loadu_si512(high), 8), _mm512_loadu_si512(low));
}

/* One panel times `tiles` * 16 rows. */
INLINE void group_of_tiles(int kind, int tiles, const uint8_t *w, int blocks, const QBlock *x, vf *sums) {
    int head = kind_head(kind), bytes = kind_bytes(kind);
    for (int r = 0; r < tiles * TILE; r++) sums[r] = vf_set(0);
    for (int b = 0; b < blocks; b++, w += bytes, x++) {
        _Alignas(64) vw code[8];
        _Alignas(64) int32_t whole[4][TILE][LANES];
        unpack_codes(kind, w + head, code);
        _tile_loadd(4, code, CODES);
        if (kind == KIND_Q6) _tile_loadd(5, code + 4, CODES);
        Scales s = load_scales(kind, w);
        for (int t = 0; t < tiles; t++) {
            const QBlock *rows = x + (int64_t)t * TILE * blocks;
            tile_sums(kind, rows, blocks, whole);
            for (int r = 0; r < TILE; r++) {
                vi first = whole_sum(whole[0][r], whole[1][r]), second = first;
                if (kind == KIND_Q6) second = whole_sum(whole[2][r], whole[3][r]);
                sums[t * TILE + r] = add_block(kind, sums[t * TILE + r], first, second, &s, rows + (int64_t)r * blocks);
            }
        }
    }
}

/* As many rows as fill tiles; returns how many. */
INLINE int tiled_rows(int kind, const Part *part, int first, int count, const Input *in, float *out, int64_t stride,
                      int add) {
    int blocks = in->width / BLOCK, row = 0;
    if (in->rows < TILE) return 0;
    configure_tiles(kind);
    while (in->rows - row >= TILE) {
        int tiles = (in->rows - row) / TILE;
        if (tiles > GROUP_TILES) tiles = GROUP_TILES;
        for (int panel = first; panel < first + count; panel++) {
            vf sums[GROUP_TILES * TILE];
            group_of_tiles(kind, tiles, part->data + panel * part->stride, blocks, in->q + (int64_t)row * blocks, sums);
            put_tile(part, panel, tiles * TILE, sums, out + row * stride, stride, add);
        }
        row += tiles * TILE;
    }
    _tile_release(); /* so that the system need not keep the tiles' contents */
    return row;
}

#endif
