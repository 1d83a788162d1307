#include "phases.h"

#include <math.h>
#include <string.h>

static int quantised(const Matrix *m) {
    for (int i = 0; i < m->parts; i++) if (m->part[i].kind < KIND_F16) return 1;
    return 0;
}

int input_bytes(Engine *e, const Matrix *m, int rows) {
    size_t elements = (size_t)rows * (size_t)m->width;
    return engine_buffer(e, BUFFER_NORMED, elements * sizeof(float))
        && engine_buffer(e, BUFFER_BLOCKS, whole((int)m->width, BLOCK) * (size_t)rows * sizeof(QBlock));
}

void phase_input(Engine *e, const Matrix *m, const float *x, const float *weight, float eps, Input *in) {
    const Kernels *k = e->kernels;
    float *normed = e->buffer[BUFFER_NORMED];
    QBlock *blocks = e->buffer[BUFFER_BLOCKS];
    int per_row = m->width / BLOCK, quantise = quantised(m);
    in->width = m->width;
    in->x = weight ? normed : x;
    in->q = blocks;
    if (weight || quantise) {
        for (int row; (row = team_take(e->team, 1)) < in->rows;) {
            const float *from = x + (int64_t)row * m->width;
            if (weight) {
                float *to = normed + (int64_t)row * m->width;
                k->norm(from, weight, eps, m->width, to);
                from = to;
            }
            if (quantise) k->quantise(from, per_row, blocks + (int64_t)row * per_row);
        }
    }
    team_meet(e->team);
}

void phase_product(Engine *e, const Matrix *m, const Input *in, float *out, int64_t stride, int add) {
    /* Few panels a task, so that they stay in the cache while many rows pass, and threads end together. */
    int few = in->rows < 16, grain = m->panels / (team_size(e->team) * (few ? 4 : 8)), most = few ? 64 : 4;
    grain = grain < 1 ? 1 : grain > most ? most : grain;
    for (int first; (first = team_take(e->team, grain)) < m->panels;) {
        int end = first + grain < m->panels ? first + grain : m->panels, column = 0;
        for (int i = 0, before = 0; i < m->parts && before < end; i++) {
            const Part *part = &m->part[i];
            int a = first > before ? first - before : 0, b = end - before < part->panels ? end - before : part->panels;
            if (a < b) e->kernels->product(part, a, b - a, in, out + column, stride, add);
            before += part->panels;
            column += part->rows;
        }
    }
    team_meet(e->team);
}

void phase_turns(Engine *e, const Step *step, const Rotation *rotation, float *turns) {
    int pairs = rotation->rotated / 2;
    for (int row; (row = team_take(e->team, 1)) < step->rows;) {
        float *to = turns + (int64_t)row * rotation->rotated;
        for (int i = 0; i < pairs; i++) {
            float angle = (float)step->position[row] * rotation->frequency[i]; /* float32, as models are trained */
            to[i] = rotation->magnitude * cosf(angle);
            to[pairs + i] = rotation->magnitude * sinf(angle);
        }
    }
    team_meet(e->team);
}

static uint8_t *page_of(const Store *s, const int32_t *table, int position) {
    int page = table[position / s->page_tokens];
    return s->chunks[page / s->chunk_pages] + page % s->chunk_pages * s->page_bytes;
}

/* The span that a row belongs to; `row` becomes its number within the span. */
static const Span *span_of(const Step *step, int *row) {
    const Span *span = step->span;
    while (*row >= span->rows) *row -= (span++)->rows;
    return span;
}

void phase_write(Engine *e, const Attending *a, const Rotation *rotation, const float *turns) {
    const Attention *attention = a->attention;
    const Store *store = a->step->store[attention->layout];
    const Kernels *kernels = e->kernels;
    for (int row; (row = team_take(e->team, 1)) < a->step->rows;) {
        float *q = (float *)a->q + row * a->q_stride, *k = (float *)a->k + row * a->k_stride;
        if (turns) {
            const float *turn = turns + (int64_t)row * rotation->rotated;
            kernels->rope(q, attention->heads, attention->head_dim, turn, rotation->rotated, rotation->interleaved);
            kernels->rope(k, attention->kv_heads, attention->head_dim, turn, rotation->rotated, rotation->interleaved);
        }
        int local = row;
        const Span *span = span_of(a->step, &local);
        int position = span->start + local;
        uint8_t *page = page_of(store, span->tables[attention->layout], position);
        kernels->write(attention, store, page, position % store->page_tokens, k, a->v + row * a->v_stride);
    }
    team_meet(e->team);
}

/* ---- attention tasks ------------------------------------------------------------------------------------------- */

typedef struct {
    AttentionTask task;
    int first_row;       /* in the batch */
    int begin, end;      /* blocks of positions */
    int64_t partial;     /* number of its first partial result, in split mode */
    int block;           /* split mode: the block to attend */
} Item;

static int tiles_of(const Span *span) { return whole(span->rows, TILE_ROWS); }

/* Blocks that any row of a tile attends. */
static void blocks_of(const Attention *a, const Span *span, int tile, int *begin, int *end) {
    int first = span->start + tile * TILE_ROWS, rows = span->rows - tile * TILE_ROWS;
    int last = first + (rows < TILE_ROWS ? rows : TILE_ROWS) - 1, low = a->window > 0 ? first - a->window + 1 : 0;
    *begin = (low > 0 ? low : 0) / KV_BLOCK;
    *end = last / KV_BLOCK + 1;
}

/* Task number i: tiles of all spans, heads within a tile, and in split mode (`blocks` true) blocks within a head. */
static int find(const Attending *a, int i, int blocks, Item *item) {
    const Attention *attention = a->attention;
    int group = attention->heads / attention->kv_heads, row = 0;
    int64_t partial = 0;
    for (int s = 0; s < a->step->spans; s++) {
        const Span *span = &a->step->span[s];
        for (int tile = 0; tile < tiles_of(span); tile++) {
            int begin, end, left = span->rows - tile * TILE_ROWS, rows = left < TILE_ROWS ? left : TILE_ROWS;
            blocks_of(attention, span, tile, &begin, &end);
            int each = blocks ? end - begin : 1;
            if (i < each * attention->kv_heads) {
                int head = i / each, first = row + tile * TILE_ROWS;
                *item = (Item){.first_row = first, .begin = begin, .end = end, .block = begin + i % each};
                item->partial = partial + (int64_t)head * (end - begin) * rows * group;
                item->task = (AttentionTask){
                    .attention = attention, .store = a->step->store[attention->layout],
                    .table = span->tables[attention->layout], .head = head,
                    .position = span->start + tile * TILE_ROWS, .rows = rows,
                    .q = a->q + first * a->q_stride + head * group * attention->head_dim, .q_stride = a->q_stride,
                };
                return 1;
            }
            i -= each * attention->kv_heads;
            partial += (int64_t)attention->kv_heads * (end - begin) * rows * group;
        }
        row += span->rows;
    }
    return 0;
}

static int64_t wide_values(const Attention *a) { return round_up(a->value_dim, LANES); }

void attending_plan(Engine *e, Attending *a) {
    const Attention *attention = a->attention;
    int group = attention->heads / attention->kv_heads, tasks = 0, most = 0;
    a->partials = 0;
    for (int s = 0; s < a->step->spans; s++) {
        const Span *span = &a->step->span[s];
        int rows = span->rows < TILE_ROWS ? span->rows : TILE_ROWS;
        tasks += tiles_of(span) * attention->kv_heads;
        if (rows > most) most = rows;
        for (int tile = 0; tile < tiles_of(span); tile++) {
            int begin, end;
            blocks_of(attention, span, tile, &begin, &end);
            a->partials += (int64_t)attention->kv_heads * (end - begin) * rows * group;
        }
    }
    a->split = team_size(e->team) > 1 && tasks < 4 * team_size(e->team);
    int64_t own = 2 * most * group; /* partial results of a task that attends several blocks itself */
    a->scratch = e->kernels->attend_scratch(attention, most)
               + own * (wide_values(attention) + (int64_t)(sizeof(Partial) / sizeof(float)));
    a->scratch = (a->scratch + 15) / 16 * 16;
    a->values = e->buffer[BUFFER_PARTIAL];
    if (a->split) a->partial = (Partial *)(a->values + a->partials * wide_values(attention));
}

int attending_bytes(Engine *e, const Attending *a) {
    size_t each = sizeof(Partial) + (size_t)wide_values(a->attention) * sizeof(float);
    return engine_buffer(e, BUFFER_THREADS, (size_t)(team_size(e->team) * a->scratch) * sizeof(float))
        && engine_buffer(e, BUFFER_PARTIAL, a->split ? (size_t)a->partials * each : 64);
}

/* Partial results number `first` and up, which find their values in `values`. */
static Partial *partials_at(Partial *all, float *values, int64_t first, int count, int64_t wide) {
    for (int i = 0; i < count; i++) all[first + i].value = values + (first + i) * wide;
    return all + first;
}

static void put_result(const Attending *a, const Item *item, const Partial *total) {
    const Attention *attention = a->attention;
    int group = attention->heads / attention->kv_heads, width = attention->value_dim;
    for (int r = 0; r < item->task.rows * group; r++) {
        int row = item->first_row + r / group, head = item->task.head * group + r % group;
        float *to = a->out + (int64_t)row * attention->heads * width + (int64_t)head * width;
        for (int d = 0; d < width; d++) to[d] = total[r].value[d] / total[r].sum;
    }
}

static void merge_all(const Kernels *k, Partial *total, const Partial *next, int count, int width) {
    for (int r = 0; r < count; r++) k->merge(&total[r], &next[r], width);
}

void phase_attend(Engine *e, const Attending *a, int thread) {
    const Kernels *k = e->kernels;
    int width = a->attention->value_dim, group = a->attention->heads / a->attention->kv_heads;
    int64_t wide = wide_values(a->attention);
    float *scratch = (float *)e->buffer[BUFFER_THREADS] + thread * a->scratch;
    Item item;
    if (!a->split) {
        while (find(a, team_take(e->team, 1), 0, &item)) {
            int queries = item.task.rows * group;
            float *values = scratch + k->attend_scratch(a->attention, item.task.rows);
            Partial *own = (Partial *)(scratch + a->scratch) - 2 * queries;
            Partial *total = partials_at(own, values, 0, queries, wide);
            Partial *next = partials_at(own, values, queries, queries, wide);
            k->attend(&item.task, item.begin, scratch, total);
            for (int block = item.begin + 1; block < item.end; block++) {
                k->attend(&item.task, block, scratch, next);
                merge_all(k, total, next, queries, width);
            }
            put_result(a, &item, total);
        }
        team_meet(e->team);
        return;
    }
    while (find(a, team_take(e->team, 1), 1, &item)) {
        int queries = item.task.rows * group;
        int64_t first = item.partial + (int64_t)(item.block - item.begin) * queries;
        k->attend(&item.task, item.block, scratch, partials_at(a->partial, a->values, first, queries, wide));
    }
    team_meet(e->team);
    while (find(a, team_take(e->team, 1), 0, &item)) {
        int queries = item.task.rows * group;
        Partial *total = a->partial + item.partial;
        for (int block = 1; block < item.end - item.begin; block++) {
            merge_all(k, total, total + block * queries, queries, width);
        }
        put_result(a, &item, total);
    }
    team_meet(e->team);
}

void phase_gated(Engine *e, float *gate_up, int rows, int width, int activation, float *out) {
    /* Pieces of rows, so that one row also keeps all threads busy. */
    enum { PIECE = 512 };
    int pieces = whole(width, PIECE);
    for (int i; (i = team_take(e->team, 1)) < rows * pieces;) {
        int64_t row = i / pieces, at = i % pieces * PIECE, n = width - at < PIECE ? width - at : PIECE;
        float *gate = gate_up + row * 2 * width + at, *to = out + row * width + at;
        memcpy(to, gate, (size_t)n * sizeof *to);
        e->kernels->gated(to, gate + width, n, activation);
    }
    team_meet(e->team);
}
