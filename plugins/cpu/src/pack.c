/* From tensors as model files hold them to panels (see enum Kind in strata.h), and from panels to single rows.
 *
 * Nothing is quantised again: codes are moved, and only the scales of the K types, which are products there, are
 * rounded once to float16 (relative error at most 2^-11).
 */
#include <string.h>

#include "engine.h"
#include "halves.h"

enum { HALVES = LANES * 2, CODES = 64 };

typedef struct {
    int elements, bytes, kind;
} Format;

static const Format formats[] = {
    [STORED_Q4_0] = {32, 18, KIND_Q4},          [STORED_Q4_1] = {32, 20, KIND_Q4_OFFSET},
    [STORED_Q5_0] = {32, 22, KIND_Q5},          [STORED_Q5_1] = {32, 24, KIND_Q5_OFFSET},
    [STORED_Q8_0] = {32, 34, KIND_Q8},          [STORED_Q4_K] = {256, 144, KIND_Q4_OFFSET},
    [STORED_Q5_K] = {256, 176, KIND_Q5_OFFSET}, [STORED_Q6_K] = {256, 210, KIND_Q6},
    [STORED_F16] = {1, 2, KIND_F16},            [STORED_BF16] = {1, 2, KIND_BF16},
    [STORED_F32] = {1, 4, KIND_F32},
};

static int block_bytes(int kind) {
    switch (kind) {
    case KIND_Q4: return HALVES + 4 * CODES;
    case KIND_Q4_OFFSET: return 2 * HALVES + 4 * CODES;
    case KIND_Q5: return HALVES + 5 * CODES;
    case KIND_Q5_OFFSET: return 2 * HALVES + 5 * CODES;
    case KIND_Q6: return 2 * HALVES + 6 * CODES;
    default: return HALVES + 8 * CODES;
    }
}

int strata_kind(int stored) { return formats[stored].kind; }

int64_t strata_panel_bytes(int stored, int width) {
    int kind = formats[stored].kind;
    if (kind >= KIND_F16) return (int64_t)width * LANES * formats[stored].bytes;
    return (int64_t)(width / BLOCK) * block_bytes(kind);
}

/* 32 weights of one row, on their way into a panel. */
typedef struct {
    uint8_t code[BLOCK];
    uint16_t scale, second; /* float16; second: the offset, or the scale of columns 16-31 */
} Cell;

static uint16_t read_half(const uint8_t *at) { return (uint16_t)(at[0] | at[1] << 8); }

static void nibbles(const uint8_t *packed, uint8_t *code) {
    for (int i = 0; i < 16; i++) {
        code[i] = packed[i] & 15;
        code[i + 16] = packed[i] >> 4;
    }
}

/* Types of one block each: d, perhaps m, perhaps fifth bits, codes. */
static void read_simple(int stored, const uint8_t *from, Cell *cell) {
    cell->scale = read_half(from);
    from += 2;
    if (stored == STORED_Q8_0) {
        for (int i = 0; i < BLOCK; i++) cell->code[i] = from[i] ^ 128;
        return;
    }
    if (stored == STORED_Q4_1 || stored == STORED_Q5_1) {
        cell->second = read_half(from);
        from += 2;
    }
    if (stored == STORED_Q4_0 || stored == STORED_Q4_1) {
        nibbles(from, cell->code);
        return;
    }
    nibbles(from + 4, cell->code);
    for (int i = 0; i < BLOCK; i++) cell->code[i] |= (from[i / 8] >> i % 8 & 1) << 4;
}

/* Group g (of eight) of Q4_K and Q5_K: six-bit scales and minimums, see strata_core.weights.quant.kquants. */
static void read_k45(int stored, const uint8_t *from, int g, Cell *cell) {
    const uint8_t *s = from + 4;
    int scale = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 6) << 4;
    int least = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | (s[g] >> 6) << 4;
    cell->scale = float_to_half(half_to_float(read_half(from)) * (float)scale);
    cell->second = float_to_half(-half_to_float(read_half(from + 2)) * (float)least);
    const uint8_t *code = from + (stored == STORED_Q4_K ? 16 : 48) + g / 2 * 32;
    for (int i = 0; i < BLOCK; i++) cell->code[i] = g % 2 ? code[i] >> 4 : code[i] & 15;
    if (stored == STORED_Q5_K) for (int i = 0; i < BLOCK; i++) cell->code[i] |= (from[16 + i] >> g & 1) << 4;
}

/* Columns 32 g .. 32 g + 31 of a Q6_K block: 16 signed scales, each of 16 columns. */
static void read_q6(const uint8_t *from, int g, Cell *cell) {
    const uint8_t *low = from + g / 4 * 64 + g % 2 * 32, *upper = from + 128 + g / 4 * 32;
    const int8_t *scale = (const int8_t *)from + 192 + 2 * g;
    float d = half_to_float(read_half(from + 208));
    for (int i = 0; i < BLOCK; i++) {
        int nibble = g % 4 < 2 ? low[i] & 15 : low[i] >> 4;
        cell->code[i] = (uint8_t)(nibble | (upper[i] >> 2 * (g % 4) & 3) << 4);
    }
    cell->scale = float_to_half(d * scale[0]);
    cell->second = float_to_half(d * scale[1]);
}

static void read_cell(int stored, const uint8_t *row, int block, Cell *cell) {
    int each = formats[stored].elements / BLOCK;
    const uint8_t *from = row + (int64_t)(block / each) * formats[stored].bytes;
    if (stored == STORED_Q6_K) read_q6(from, block % each, cell);
    else if (stored == STORED_Q4_K || stored == STORED_Q5_K) read_k45(stored, from, block % each, cell);
    else read_simple(stored, from, cell);
}

/* Element `column` of a block: in which vector of four columns a lane, and where in it. */
static int place(int lane, int column) { return lane * 4 + column % 4; }

static void write_cell(int kind, uint8_t *block, int lane, const Cell *cell) {
    int second = kind == KIND_Q4_OFFSET || kind == KIND_Q5_OFFSET || kind == KIND_Q6;
    memcpy(block + lane * 2, &cell->scale, 2);
    if (second) memcpy(block + HALVES + lane * 2, &cell->second, 2);
    uint8_t *codes = block + (second ? 2 : 1) * HALVES;
    if (kind == KIND_Q8) {
        for (int i = 0; i < BLOCK; i += 4) memcpy(codes + i / 4 * CODES + lane * 4, cell->code + i, 4);
        return;
    }
    for (int i = 0; i < 16; i++) {
        codes[i / 4 * CODES + place(lane, i)] = (uint8_t)((cell->code[i] & 15) | cell->code[i + 16] << 4);
    }
    uint8_t *high = codes + 4 * CODES;
    if (kind == KIND_Q5 || kind == KIND_Q5_OFFSET) {
        for (int i = 0; i < BLOCK; i++) high[place(lane, i)] |= (uint8_t)((cell->code[i] >> 4) << i / 4);
    } else if (kind == KIND_Q6) {
        for (int i = 0; i < BLOCK; i++) {
            high[i / 16 * CODES + place(lane, i)] |= (uint8_t)((cell->code[i] >> 4) << i % 16 / 4 * 2);
        }
    }
}

typedef struct {
    Engine *engine;
    int stored;
    const uint8_t *tensor;
    Part *part;
} Packing;

/* Simple four-bit types are most of what people load: whole rows, four columns at a time. */
static void pack_q4(const Packing *p, int lane, const uint8_t *row, uint8_t *panel) {
    int head = p->stored == STORED_Q4_1 ? 2 : 1, bytes = block_bytes(p->part->kind), size = formats[p->stored].bytes;
    for (int block = 0; block < p->part->width / BLOCK; block++, row += size, panel += bytes) {
        memcpy(panel + lane * 2, row, 2);
        if (head == 2) memcpy(panel + HALVES + lane * 2, row + 2, 2);
        for (int g = 0; g < 4; g++) memcpy(panel + head * HALVES + g * CODES + lane * 4, row + head * 2 + g * 4, 4);
    }
}

static void pack_panel(const Packing *p, int number) {
    const Part *part = p->part;
    const Format *f = &formats[p->stored];
    uint8_t *panel = part->data + number * part->stride;
    int64_t row_bytes = (int64_t)(part->width / f->elements) * f->bytes;
    for (int lane = 0; lane < LANES && number * LANES + lane < part->rows; lane++) {
        const uint8_t *row = p->tensor + (int64_t)(number * LANES + lane) * row_bytes;
        if (part->kind >= KIND_F16) {
            for (int c = 0; c < part->width; c++) {
                memcpy(panel + (c * LANES + lane) * f->bytes, row + c * f->bytes, (size_t)f->bytes);
            }
        } else if (p->stored == STORED_Q4_0 || p->stored == STORED_Q4_1) {
            pack_q4(p, lane, row, panel);
        } else {
            int bytes = block_bytes(part->kind);
            for (int block = 0; block < part->width / BLOCK; block++) {
                Cell cell = {.second = 0};
                read_cell(p->stored, row, block, &cell);
                write_cell(part->kind, panel + (int64_t)block * bytes, lane, &cell);
            }
        }
    }
}

static void pack_panels(void *context, int thread) {
    const Packing *p = context;
    (void)thread;
    const int grain = 4, panels = p->part->panels;
    for (Items i; team_take(p->engine->team, grain, panels, &i);) {
        for (; i.first < i.end; i.first++) pack_panel(p, i.first);
    }
}

void strata_pack(Engine *e, int stored, const uint8_t *tensor, Part *part) {
    Packing packing = {e, stored, tensor, part};
    team_run(e->team, pack_panels, &packing);
}

/* ---- single rows, for embeddings ------------------------------------------------------------------------------ */

static void read_block(int kind, const uint8_t *block, int lane, float *out) {
    int second = kind == KIND_Q4_OFFSET || kind == KIND_Q5_OFFSET || kind == KIND_Q6;
    const uint8_t *codes = block + (second ? 2 : 1) * HALVES, *high = codes + 4 * CODES;
    float scale = half_to_float(read_half(block + lane * 2));
    float other = second ? half_to_float(read_half(block + HALVES + lane * 2)) : 0;
    for (int i = 0; i < BLOCK; i++) {
        int at = place(lane, i);
        if (kind == KIND_Q8) {
            out[i] = scale * (float)(codes[i / 4 * CODES + at] - 128);
            continue;
        }
        int both = codes[i % 16 / 4 * CODES + at], code = i < 16 ? both & 15 : both >> 4;
        if (kind == KIND_Q5 || kind == KIND_Q5_OFFSET) code |= (high[at] >> i / 4 & 1) << 4;
        if (kind == KIND_Q6) code |= (high[i / 16 * CODES + at] >> i % 16 / 4 * 2 & 3) << 4;
        switch (kind) {
        case KIND_Q4: out[i] = scale * (float)(code - 8); break;
        case KIND_Q5: out[i] = scale * (float)(code - 16); break;
        case KIND_Q6: out[i] = (i < 16 ? scale : other) * (float)(code - 32); break;
        default: out[i] = scale * (float)code + other; break;
        }
    }
}

static void read_row(const Part *part, int row, float *out) {
    const uint8_t *panel = part->data + row / LANES * part->stride;
    int lane = row % LANES;
    if (part->kind < KIND_F16) {
        for (int b = 0; b < part->width / BLOCK; b++, panel += block_bytes(part->kind)) {
            read_block(part->kind, panel, lane, out + b * BLOCK);
        }
        return;
    }
    for (int c = 0; c < part->width; c++) {
        int at = c * LANES + lane;
        out[c] = part->kind == KIND_F32 ? ((const float *)panel)[at]
               : part->kind == KIND_F16 ? half_to_float(((const uint16_t *)panel)[at])
                                        : bfloat_to_float(((const uint16_t *)panel)[at]);
    }
}

void strata_rows(const Matrix *m, const int32_t *row, int count, float scale, float *out) {
    for (int i = 0; i < count; i++, out += m->width) {
        const Part *part = m->part;
        int local = row[i];
        while (local >= part->rows) local -= (part++)->rows;
        read_row(part, local, out);
        if (scale != 1) for (int c = 0; c < m->width; c++) out[c] *= scale;
    }
}
