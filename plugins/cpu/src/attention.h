/* Paged attention.
 *
 * Positions are attended in blocks of KV_BLOCK, counted from position 0 whatever a task covers: each block gives a
 * partial softmax, and partial results are merged in the order of their blocks. The same for one row or many, on one
 * thread or many, with or without a window: so a row's result depends on its own sequence only. Scores and sums are
 * products of float32, added one after the other (over the head's elements, over the block's positions).
 *
 * With many query rows a block's keys and values become float32 panels of PANEL columns, which one small matrix kernel
 * multiplies with all of them; with few they are used as they come, in the same order of sums.
 */

enum { PANEL = TILE_VECTORS * LANES };
enum { DIRECT_QUERIES = 4, FEW_QUERIES = 8 }; /* queries taken at once; most that are not worth panels */

/* Sixteen (or the last `n`) stored elements as float32. */
INLINE vf kv_load(int type, const uint8_t *from, int at, int n, float scale) {
    uint8_t padded[LANES * 4];
    const int size = type == KV_F32 ? 4 : type == KV_INT8 ? 1 : 2;
    from += (size_t)at * size;
    if (n < LANES) {
        memset(padded, 0, sizeof padded);
        memcpy(padded, from, (size_t)n * size);
        from = padded;
    }
    if (type == KV_F32) return vf_load((const float *)from);
    if (type == KV_F16) return vf_load_half((const uint16_t *)from);
    if (type == KV_BF16) return vf_load_bfloat((const uint16_t *)from);
    return vf_mul(vf_load_bytes((const int8_t *)from), vf_set(scale));
}

INLINE int kv_size(int type) { return type == KV_F32 ? 4 : type == KV_INT8 ? 1 : 2; }

/* Where a head's rows of one part start in the page that holds a position, and the scales with them. */
typedef struct {
    const uint8_t *rows;
    const float *scales; /* NULL for all types but int8 */
} Rows;

INLINE Rows rows_of(const AttentionTask *t, int position, int values) {
    const Store *s = t->store;
    const Attention *a = t->attention;
    int page = t->table[position / s->page_tokens], width = values ? a->value_dim : a->head_dim;
    const uint8_t *memory = s->chunks[page / s->chunk_pages] + page % s->chunk_pages * s->page_bytes;
    int64_t head = (int64_t)t->head * s->page_tokens;
    Rows r = {memory + (values ? a->v : a->k) + head * width * kv_size(s->kv_type), NULL};
    if (s->kv_type == KV_INT8) r.scales = (const float *)(memory + (values ? a->v_scale : a->k_scale)) + head;
    return r;
}

/* Sixteen positions' keys: where each starts, and its scale. The last of a sequence may be fewer. */
typedef struct {
    const uint8_t *row[LANES];
    float scale[LANES];
    int rows;
} Keys;

INLINE void find_keys(int type, const AttentionTask *t, int first, int rows, Keys *keys) {
    int64_t bytes = (int64_t)t->attention->head_dim * kv_size(type);
    keys->rows = rows < LANES ? rows : LANES;
    for (int i = 0; i < keys->rows;) {
        int position = first + i, at = position % t->store->page_tokens, n = t->store->page_tokens - at;
        Rows r = rows_of(t, position, 0);
        for (int end = i + n < keys->rows ? i + n : keys->rows; i < end; i++, at++) {
            keys->row[i] = r.rows + at * bytes;
            keys->scale[i] = r.scales ? r.scales[at] : 1;
        }
    }
}

/* Their elements d .. d + 15, turned: part[i] is element d + i of all positions. Returns how many there are. */
INLINE int turn_keys(int type, const Keys *keys, int width, int d, vf part[LANES]) {
    const vf none = vf_set(0);
    int n = width - d < LANES ? width - d : LANES;
    if (keys->rows == LANES && n == LANES) {
        for (int i = 0; i < LANES; i++) part[i] = kv_load(type, keys->row[i], d, LANES, keys->scale[i]);
    } else {
        for (int i = 0; i < LANES; i++) {
            part[i] = i < keys->rows ? kv_load(type, keys->row[i], d, n, keys->scale[i]) : none;
        }
    }
    transpose(part);
    return n;
}

/* Keys of positions [first, first + count), turned: element d of position p is at
 * out[p / PANEL * head_dim * PANEL + d * PANEL + p % PANEL]; columns up to a full panel are zero. */
INLINE void load_keys(int type, const AttentionTask *t, int first, int count, float *out) {
    int width = t->attention->head_dim;
    for (int p = 0; p < round_up(count, PANEL); p += LANES) {
        float *to = out + (int64_t)(p / PANEL) * width * PANEL + p % PANEL;
        Keys keys;
        find_keys(type, t, first + p, count - p, &keys);
        for (int d = 0; d < width; d += LANES) {
            vf part[LANES];
            int n = turn_keys(type, &keys, width, d, part);
            for (int i = 0; i < n; i++) vf_store(to + (d + i) * PANEL, part[i]);
        }
    }
}

/* Values: element d of position p at out[d / PANEL * count * PANEL + p * PANEL + d % PANEL], padded with zeros. */
INLINE void load_values(int type, const AttentionTask *t, int first, int count, float *out) {
    int width = t->attention->value_dim, tokens = t->store->page_tokens;
    for (int p = 0; p < count;) {
        int at = (first + p) % tokens, n = tokens - at < count - p ? tokens - at : count - p;
        Rows r = rows_of(t, first + p, 1);
        for (int i = 0; i < n; i++, p++) {
            const uint8_t *row = r.rows + (int64_t)(at + i) * width * kv_size(type);
            float scale = r.scales ? r.scales[at + i] : 1;
            for (int d = 0; d < round_up(width, PANEL); d += LANES) {
                vf part = d + LANES <= width ? kv_load(type, row, d, LANES, scale)
                        : d < width          ? kv_load(type, row, d, width - d, scale)
                                             : vf_set(0);
                vf_store(out + ((int64_t)(d / PANEL) * count + p) * PANEL + d % PANEL, part);
            }
        }
    }
}

/* One panel of `depth` rows times `rows` rows of x: out[r][0 .. PANEL). */
INLINE void panel_tile(int rows, int depth, const float *x, int64_t x_stride, const float *panel, float *out,
                       int64_t stride) {
    vf sums[4][TILE_VECTORS];
    for (int r = 0; r < rows; r++) for (int j = 0; j < TILE_VECTORS; j++) sums[r][j] = vf_set(0);
    for (int d = 0; d < depth; d++, panel += PANEL) {
        vf column[TILE_VECTORS];
        for (int j = 0; j < TILE_VECTORS; j++) column[j] = vf_load(panel + j * LANES);
        for (int r = 0; r < rows; r++) {
            vf factor = vf_set(x[r * x_stride + d]);
            for (int j = 0; j < TILE_VECTORS; j++) sums[r][j] = vf_fma(factor, column[j], sums[r][j]);
        }
    }
    for (int r = 0; r < rows; r++) {
        for (int j = 0; j < TILE_VECTORS; j++) vf_store(out + r * stride + j * LANES, sums[r][j]);
    }
}

static void panels_times(int rows, int depth, const float *x, int64_t x_stride, const float *panels, int columns,
                         float *out, int64_t stride) {
    for (int c = 0; c < columns; c += PANEL, panels += (int64_t)depth * PANEL) {
        const float *from = x;
        float *to = out + c;
        int left = rows;
        for (; left >= 4; left -= 4, from += 4 * x_stride, to += 4 * stride) {
            panel_tile(4, depth, from, x_stride, panels, to, stride);
        }
        switch (left) {
        case 3: panel_tile(3, depth, from, x_stride, panels, to, stride); break;
        case 2: panel_tile(2, depth, from, x_stride, panels, to, stride); break;
        case 1: panel_tile(1, depth, from, x_stride, panels, to, stride); break;
        default: break;
        }
    }
}

/* ---- few queries: keys and values are used in registers as they come -------------------------------------------- */

/* scores[r][p] of `queries` queries, in the order of panel_tile: over the head's elements. */
INLINE void score_keys(int type, int queries, const AttentionTask *t, int first, int count, const float *q,
                       float *scores) {
    int width = t->attention->head_dim;
    Keys keys, next;
    find_keys(type, t, first, count, &next);
    for (int p = 0; p < count; p += LANES) {
        keys = next;
        if (p + LANES < count) find_keys(type, t, first + p + LANES, count - p - LANES, &next);
        vf sums[DIRECT_QUERIES];
        for (int r = 0; r < queries; r++) sums[r] = vf_set(0);
        for (int d = 0; d < width; d += LANES) {
            vf part[LANES];
            int n = turn_keys(type, &keys, width, d, part);
            int byte = d * kv_size(type);
            if (byte % 64 == 0) for (int i = 0; i < next.rows; i++) prefetch(next.row[i] + byte);
            for (int i = 0; i < n; i++) {
                for (int r = 0; r < queries; r++) sums[r] = vf_fma(vf_set(q[r * width + d + i]), part[i], sums[r]);
            }
        }
        for (int r = 0; r < queries; r++) vf_store(scores + r * KV_BLOCK + p, sums[r]);
    }
}

/* Adds `count` positions' values, times their weights, to the sums. `next`: what is read after them. */
INLINE void add_values(int type, int queries, const Rows *rows, int at, int count, int width, int d,
                       const float *weights, const uint8_t *next, vf sums[][TILE_VECTORS]) {
    int64_t bytes = (int64_t)width * kv_size(type);
    const uint8_t *row = rows->rows + at * bytes;
    for (int p = 0; p < count; p++, row += bytes, next += bytes) {
        float scale = rows->scales ? rows->scales[at + p] : 1;
        for (int line = 0; line < PANEL * kv_size(type); line += 64) prefetch(next + d * kv_size(type) + line);
        vf value[TILE_VECTORS];
        for (int j = 0; j < TILE_VECTORS; j++) value[j] = kv_load(type, row, d + j * LANES, LANES, scale);
        for (int r = 0; r < queries; r++) {
            vf weight = vf_set(weights[r * KV_BLOCK + p]);
            for (int j = 0; j < TILE_VECTORS; j++) sums[r][j] = vf_fma(weight, value[j], sums[r][j]);
        }
    }
}

/* The same for the end of a row that fills no panel: vector j, which may be cut short. */
INLINE void add_last(int type, int queries, const Rows *rows, int at, int count, int width, int d, int j,
                     const float *weights, vf sums[][TILE_VECTORS]) {
    int from = d + j * LANES, n = width - from < LANES ? width - from : LANES;
    for (int p = 0; p < count; p++) {
        const uint8_t *row = rows->rows + (int64_t)(at + p) * width * kv_size(type);
        vf value = kv_load(type, row, from, n, rows->scales ? rows->scales[at + p] : 1);
        for (int r = 0; r < queries; r++) sums[r][j] = vf_fma(vf_set(weights[r * KV_BLOCK + p]), value, sums[r][j]);
    }
}

/* out[r][d .. d + PANEL) = weights[r] @ values, in the order of panel_tile: over the positions. */
INLINE void weigh_values(int type, int queries, const AttentionTask *t, int first, int count, const float *weights,
                         int d, float *out, int stride) {
    int width = t->attention->value_dim, tokens = t->store->page_tokens;
    int64_t bytes = (int64_t)width * kv_size(type);
    vf sums[DIRECT_QUERIES][TILE_VECTORS];
    for (int r = 0; r < queries; r++) for (int j = 0; j < TILE_VECTORS; j++) sums[r][j] = vf_set(0);
    for (int p = 0; p < count;) {
        int at = (first + p) % tokens, n = tokens - at < count - p ? tokens - at : count - p;
        if (n > LANES) n = LANES;
        Rows rows = rows_of(t, first + p, 1), next = rows;
        if (p + n < count) next = rows_of(t, first + p + n, 1);
        const uint8_t *ahead = next.rows + (first + p + n) % tokens * bytes;
        if (d + PANEL <= width) {
            add_values(type, queries, &rows, at, n, width, d, weights + p, ahead, sums);
        } else {
            int left = (width - d + LANES - 1) / LANES;
            for (int j = 0; j < left; j++) add_last(type, queries, &rows, at, n, width, d, j, weights + p, sums);
        }
        p += n;
    }
    for (int r = 0; r < queries; r++) {
        for (int j = 0; j < TILE_VECTORS; j++) vf_store(out + r * stride + d + j * LANES, sums[r][j]);
    }
}

#define EACH_QUERIES(F, ...)                                                                                       \
    switch (n) {                                                                                                   \
    case 1: F(type, 1, __VA_ARGS__); break;                                                                        \
    case 2: F(type, 2, __VA_ARGS__); break;                                                                        \
    case 3: F(type, 3, __VA_ARGS__); break;                                                                        \
    default: F(type, 4, __VA_ARGS__); break;                                                                       \
    }

INLINE void score_few(int type, const AttentionTask *t, int queries, int first, int count, const float *q,
                      float *scores) {
    for (int r = 0; r < queries; r += DIRECT_QUERIES, q += DIRECT_QUERIES * t->attention->head_dim) {
        int n = queries - r;
        EACH_QUERIES(score_keys, t, first, count, q, scores + r * KV_BLOCK)
    }
}

INLINE void weigh_few(int type, const AttentionTask *t, int queries, int first, int count, const float *weights,
                      float *out, int stride) {
    for (int r = 0; r < queries; r += DIRECT_QUERIES, weights += DIRECT_QUERIES * KV_BLOCK) {
        int n = queries - r;
        for (int d = 0; d < stride; d += PANEL) {
            EACH_QUERIES(weigh_values, t, first, count, weights, d, out + r * stride, stride)
        }
    }
}

/* ---- one block of positions ------------------------------------------------------------------------------------- */

/* Scores of one row, of which [low, high) are attended, become weights; returns their maximum (-inf: none). */
INLINE float soften(float *scores, int padded, int low, int high, float softcap, float *sum) {
    const vf hidden = vf_set(-INFINITY);
    vf top = hidden, total = vf_set(0);
    for (int p = 0; p < padded; p += LANES) {
        vf s = vf_load(scores + p);
        if (softcap > 0) s = vf_mul(vf_tanh(vf_div(s, vf_set(softcap))), vf_set(softcap));
        if (p < low || p + LANES > high) s = vf_keep(s, low - p, high - p, hidden);
        top = vf_max(top, s);
        vf_store(scores + p, s);
    }
    float most = vf_top(top);
    vf shift = vf_set(most);
    for (int p = 0; p < padded; p += LANES) {
        vf w = vf_exp(vf_sub(vf_load(scores + p), shift));
        total = vf_add(total, w);
        vf_store(scores + p, w);
    }
    *sum = vf_sum(total);
    return most;
}

static int64_t attend_scratch(const Attention *a, int rows) {
    int64_t queries = (int64_t)rows * (a->heads / a->kv_heads);
    return (int64_t)KV_BLOCK * (a->head_dim + round_up(a->value_dim, PANEL)) + queries * (a->head_dim + KV_BLOCK)
         + queries * round_up(a->value_dim, PANEL);
}

INLINE void attend_as(int type, const AttentionTask *t, int block, float *scratch, Partial *partial) {
    const Attention *a = t->attention;
    int group = a->heads / a->kv_heads, queries = t->rows * group, begin = block * KV_BLOCK;
    int last = t->position + t->rows - 1, count = last + 1 - begin < KV_BLOCK ? last + 1 - begin : KV_BLOCK;
    int padded = round_up(count, PANEL), wide = round_up(a->value_dim, PANEL);
    float *keys = scratch, *values = keys + KV_BLOCK * a->head_dim, *q = values + KV_BLOCK * wide;
    float *scores = q + queries * a->head_dim, *sums = scores + queries * KV_BLOCK;
    int few = queries <= FEW_QUERIES;
    for (int r = 0; r < queries; r++) {
        const float *from = t->q + r / group * t->q_stride + r % group * a->head_dim;
        for (int d = 0; d < a->head_dim; d++) q[r * a->head_dim + d] = from[d] * a->scale;
    }
    if (few) {
        padded = round_up(count, LANES);
        score_few(type, t, queries, begin, count, q, scores);
    } else {
        load_keys(type, t, begin, count, keys);
        panels_times(queries, a->head_dim, q, a->head_dim, keys, padded, scores, KV_BLOCK);
    }
    for (int r = 0; r < queries; r++) {
        int position = t->position + r / group, high = position + 1 - begin;
        int low = a->window > 0 ? position - a->window + 1 - begin : 0;
        if (high > count) high = count;
        if (high <= low || high <= 0) {
            memset(scores + r * KV_BLOCK, 0, (size_t)padded * sizeof *scores);
            partial[r].max = -INFINITY;
        } else {
            partial[r].max = soften(scores + r * KV_BLOCK, padded, low, high, a->softcap, &partial[r].sum);
        }
    }
    if (few) {
        weigh_few(type, t, queries, begin, count, scores, sums, wide);
    } else {
        load_values(type, t, begin, count, values);
        panels_times(queries, count, scores, KV_BLOCK, values, wide, sums, wide);
    }
    for (int r = 0; r < queries; r++) {
        memcpy(partial[r].value, sums + (int64_t)r * wide, sizeof(float) * (size_t)round_up(a->value_dim, LANES));
    }
}

static void attend(const AttentionTask *t, int block, float *scratch, Partial *partial) {
    switch (t->store->kv_type) {
    case KV_F32: attend_as(KV_F32, t, block, scratch, partial); break;
    case KV_F16: attend_as(KV_F16, t, block, scratch, partial); break;
    case KV_BF16: attend_as(KV_BF16, t, block, scratch, partial); break;
    default: attend_as(KV_INT8, t, block, scratch, partial); break;
    }
}

static void merge(Partial *total, const Partial *next, int value_dim) {
    if (next->max == -INFINITY) return;
    int wide = round_up(value_dim, LANES);
    if (total->max == -INFINITY) {
        memcpy(total->value, next->value, sizeof(float) * (size_t)wide);
        total->max = next->max;
        total->sum = next->sum;
        return;
    }
    float top = total->max > next->max ? total->max : next->max;
    vf a = vf_exp(vf_set(total->max - top)), b = vf_exp(vf_set(next->max - top));
    for (int d = 0; d < wide; d += LANES) {
        vf v = vf_mul(vf_load(total->value + d), a);
        vf_store(total->value + d, vf_fma(vf_load(next->value + d), b, v));
    }
    float lanes[2][LANES];
    vf_store(lanes[0], a);
    vf_store(lanes[1], b);
    total->sum = total->sum * lanes[0][0] + next->sum * lanes[1][0];
    total->max = top;
}

/* One head's row into a page, in the rounding of the reference. */
INLINE void write_row(int type, const float *x, int width, uint8_t *to, float *scale) {
    if (type == KV_F32) {
        memcpy(to, x, sizeof *x * (size_t)width);
    } else if (type == KV_F16) {
        int i = 0;
        for (; i + LANES <= width; i += LANES) vf_store_half((uint16_t *)to + i, vf_load(x + i));
        for (; i < width; i++) ((uint16_t *)to)[i] = float_to_half(x[i]);
    } else if (type == KV_BF16) {
        for (int i = 0; i < width; i++) ((uint16_t *)to)[i] = float_to_bfloat(x[i]);
    } else {
        float top = 0;
        for (int i = 0; i < width; i++) top = fabsf(x[i]) > top || isnan(x[i]) ? fabsf(x[i]) : top;
        *scale = top / 127;
        for (int i = 0; i < width; i++) ((int8_t *)to)[i] = (int8_t)(*scale > 0 ? rintf(x[i] / *scale) : 0);
    }
}

static void write_head(const Attention *a, const Store *s, uint8_t *page, int at, int head, const float *k,
                       const float *v) {
    int size = kv_size(s->kv_type);
    int64_t row = (int64_t)head * s->page_tokens + at;
    float *k_scale = (float *)(page + a->k_scale) + row, *v_scale = (float *)(page + a->v_scale) + row;
    write_row(s->kv_type, k, a->head_dim, page + a->k + row * a->head_dim * size, k_scale);
    write_row(s->kv_type, v, a->value_dim, page + a->v + row * a->value_dim * size, v_scale);
}
