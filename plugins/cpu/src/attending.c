/* Attention as a phase: what is a task, who writes, who merges. */
#include <math.h>
#include <string.h>

#include "phases.h"

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

/* Heads of one row, normed and rotated where they lie. */
static void turn_heads(Engine *e, const Attending *a, const float *weight, const Rotation *rotation,
                       const float *turns, int row, int heads, float *x) {
    int width = a->attention->head_dim;
    if (weight) for (int i = 0; i < heads; i++) e->kernels->norm(x + i * width, weight, a->eps, width, x + i * width);
    if (!turns) return;
    const float *turn = turns + (int64_t)row * rotation->rotated;
    e->kernels->rope(x, heads, width, turn, rotation->rotated, rotation->interleaved);
}

/* One row's K and V of K/V heads [first, end) into its page, after k was normed and rotated. */
static void write_heads(Engine *e, const Attending *a, const Rotation *rotation, const float *turns, int row,
                        int first, int end) {
    const Attention *attention = a->attention;
    const Store *store = a->step->store[attention->layout];
    int local = row, width = attention->head_dim;
    const Span *span = span_of(a->step, &local);
    int position = span->start + local;
    uint8_t *page = page_of(store, span->tables[attention->layout], position);
    float *k = (float *)a->k + row * a->k_stride + first * width;
    const float *v = a->v + row * a->v_stride + first * attention->value_dim;
    turn_heads(e, a, a->k_norm, rotation, turns, row, end - first, k);
    for (int head = first; head < end; head++, k += width, v += attention->value_dim) {
        e->kernels->write(attention, store, page, position % store->page_tokens, head, k, v);
    }
}

static void phase_write(Engine *e, const Attending *a, const Rotation *rotation, const float *turns) {
    const Attention *attention = a->attention;
    int rows = a->step->rows;
    for (Items i; team_take(e->team, 1, rows, &i);) {
        int row = i.first;
        turn_heads(e, a, a->q_norm, rotation, turns, row, attention->heads, (float *)a->q + row * a->q_stride);
        write_heads(e, a, rotation, turns, row, 0, attention->kv_heads);
    }
    team_meet(e->team, rows);
}

/* ---- tasks ------------------------------------------------------------------------------------------------------- */

typedef struct {
    AttentionTask task;
    int first_row;   /* in the batch */
    int begin, end;  /* blocks of positions */
    int64_t partial; /* number of its first partial result, in split mode */
    int block;       /* split mode: the block to attend */
    int head;        /* split mode: number of this tile and head among all */
} Item;

static int tiles_of(const Span *span) { return whole(span->rows, TILE_ROWS); }

/* Blocks that any row of a tile attends. */
static void blocks_of(const Attention *a, const Span *span, int tile, int *begin, int *end) {
    int first = span->start + tile * TILE_ROWS, rows = span->rows - tile * TILE_ROWS;
    int last = first + (rows < TILE_ROWS ? rows : TILE_ROWS) - 1, low = a->window > 0 ? first - a->window + 1 : 0;
    *begin = (low > 0 ? low : 0) / KV_BLOCK;
    *end = last / KV_BLOCK + 1;
}

/* Task number i: tiles of all spans, heads within a tile, and in split mode blocks within a head. */
static void find(const Attending *a, int i, Item *item) {
    const Attention *attention = a->attention;
    int group = attention->heads / attention->kv_heads, row = 0, before = 0;
    int64_t partial = 0;
    for (const Span *span = a->step->span;; row += (span++)->rows) {
        for (int tile = 0; tile < tiles_of(span); tile++, before += attention->kv_heads) {
            int begin, end, left = span->rows - tile * TILE_ROWS, rows = left < TILE_ROWS ? left : TILE_ROWS;
            blocks_of(attention, span, tile, &begin, &end);
            int each = a->split ? end - begin : 1;
            if (i < each * attention->kv_heads) {
                int head = i / each, first = row + tile * TILE_ROWS;
                *item = (Item){.first_row = first, .begin = begin, .end = end, .block = begin + i % each};
                item->partial = partial + (int64_t)head * (end - begin) * rows * group;
                item->head = before + head;
                item->task = (AttentionTask){
                    .attention = attention, .store = a->step->store[attention->layout],
                    .table = span->tables[attention->layout], .head = head,
                    .position = span->start + tile * TILE_ROWS, .rows = rows,
                    .q = a->q + first * a->q_stride + head * group * attention->head_dim, .q_stride = a->q_stride,
                };
                return;
            }
            i -= each * attention->kv_heads;
            partial += (int64_t)attention->kv_heads * (end - begin) * rows * group;
        }
    }
}

static int64_t wide_values(const Attention *a) { return round_up(a->value_dim, LANES); }

/* Floats that one row's queries of one K/V head take in a thread's scratch memory. */
static int64_t own_queries(const Attention *a) { return round_up(a->heads / a->kv_heads * a->head_dim, LANES); }

void attending_plan(Engine *e, Attending *a) {
    const Attention *attention = a->attention;
    int group = attention->heads / attention->kv_heads, heads = 0, blocks = 0, most = 0;
    a->partials = 0;
    for (int s = 0; s < a->step->spans; s++) {
        const Span *span = &a->step->span[s];
        int rows = span->rows < TILE_ROWS ? span->rows : TILE_ROWS;
        heads += tiles_of(span) * attention->kv_heads;
        if (rows > most) most = rows;
        for (int tile = 0; tile < tiles_of(span); tile++) {
            int begin, end;
            blocks_of(attention, span, tile, &begin, &end);
            blocks += (end - begin) * attention->kv_heads;
            a->partials += (int64_t)attention->kv_heads * (end - begin) * rows * group;
        }
    }
    a->split = team_size(e->team) > 1 && heads < 4 * team_size(e->team);
    a->fused = most == 1;
    a->tasks = a->split ? blocks : heads;
    int64_t own = 2 * most * group; /* partial results of a task that attends several blocks itself */
    a->scratch = e->kernels->attend_scratch(attention, most) + own_queries(attention)
               + own * (wide_values(attention) + (int64_t)(sizeof(Partial) / sizeof(float)));
    a->scratch = (a->scratch + 15) / 16 * 16;
    a->values = e->buffer[BUFFER_PARTIAL];
    a->ended = e->buffer[BUFFER_ENDED];
    if (a->split) a->partial = (Partial *)(a->values + a->partials * wide_values(attention));
}

int attending_bytes(Engine *e, const Attending *a) {
    size_t each = sizeof(Partial) + (size_t)wide_values(a->attention) * sizeof(float);
    size_t heads = (size_t)(4 * team_size(e->team)) * sizeof(atomic_int); /* there are fewer in split mode */
    if (!engine_buffer(e, BUFFER_ENDED, heads)) return 0;
    memset(e->buffer[BUFFER_ENDED], 0, heads);
    return engine_buffer(e, BUFFER_THREADS, (size_t)(team_size(e->team) * a->scratch) * sizeof(float))
        && engine_buffer(e, BUFFER_PARTIAL, a->split ? (size_t)a->partials * each : 64);
}

/* ---- what a task does -------------------------------------------------------------------------------------------- */

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
        float *to = a->out + (int64_t)row * attention->heads * width + (int64_t)head * width, sum = total[r].sum;
        if (attention->sinks) sum += expf(attention->sinks[head] - total[r].max); /* infinite: nothing else counts */
        for (int d = 0; d < width; d++) to[d] = total[r].value[d] / sum;
    }
}

static void merge_all(const Kernels *k, Partial *total, const Partial *next, int count, int width) {
    for (int r = 0; r < count; r++) k->merge(&total[r], &next[r], width);
}

/* scratch: for the kernel and for values; this thread's part of the buffer ends at `end`. */
static void attend_all(Engine *e, const Attending *a, const Item *item, float *scratch, float *end) {
    const Kernels *k = e->kernels;
    int width = a->attention->value_dim, queries = item->task.rows * (a->attention->heads / a->attention->kv_heads);
    int64_t wide = wide_values(a->attention);
    float *values = scratch + k->attend_scratch(a->attention, item->task.rows);
    Partial *own = (Partial *)end - 2 * queries;
    Partial *total = partials_at(own, values, 0, queries, wide);
    Partial *next = partials_at(own, values, queries, queries, wide);
    k->attend(&item->task, item->begin, scratch, total);
    for (int block = item->begin + 1; block < item->end; block++) {
        k->attend(&item->task, block, scratch, next);
        merge_all(k, total, next, queries, width);
    }
    put_result(a, item, total);
}

static void attend_block(Engine *e, const Attending *a, const Item *item, float *scratch) {
    const Kernels *k = e->kernels;
    int width = a->attention->value_dim, queries = item->task.rows * (a->attention->heads / a->attention->kv_heads);
    int blocks = item->end - item->begin;
    int64_t first = item->partial + (int64_t)(item->block - item->begin) * queries;
    k->attend(&item->task, item->block, scratch,
              partials_at(a->partial, a->values, first, queries, wide_values(a->attention)));
    if (atomic_fetch_add(&a->ended[item->head], 1) + 1 < blocks) return;
    a->ended[item->head] = 0;
    Partial *total = a->partial + item->partial; /* in the order of blocks, whoever ended last */
    for (int block = 1; block < blocks; block++) merge_all(k, total, total + block * queries, queries, width);
    put_result(a, item, total);
}

/* The one row of a fused task: this thread's own rotated queries, and K and V where the task attends them. */
static void prepare_task(Engine *e, const Attending *a, const Rotation *rotation, const float *turns, Item *item,
                         float *q) {
    const Attention *attention = a->attention;
    int group = attention->heads / attention->kv_heads, head = item->task.head;
    if (!a->split || item->block == item->end - 1) {
        write_heads(e, a, rotation, turns, item->first_row, head, head + 1);
    }
    memcpy(q, item->task.q, sizeof(float) * (size_t)(group * attention->head_dim));
    turn_heads(e, a, a->q_norm, rotation, turns, item->first_row, group, q);
    item->task.q = q;
}

void phase_attention(Engine *e, int thread, const Attending *a, const Rotation *rotation, const float *turns,
                     Next next) {
    float *own = (float *)e->buffer[BUFFER_THREADS] + thread * a->scratch, *scratch = own + own_queries(a->attention);
    if (!a->fused) phase_write(e, a, rotation, turns);
    for (Items i; team_take(e->team, 1, a->tasks, &i);) {
        Item item;
        find(a, i.first, &item);
        if (a->fused) prepare_task(e, a, rotation, turns, &item, own);
        if (a->split) attend_block(e, a, &item, scratch);
        else attend_all(e, a, &item, scratch, own + a->scratch);
    }
    fetch_ahead(e, next, a->step->rows);
    team_meet(e->team, a->tasks);
}
