#include "phases.h"

#include <math.h>
#include <string.h>

/* Rows that every thread prepares for itself rather than wait for others' shares: some two microseconds of work, which
 * is what a meeting costs. */
enum { OWN_ROWS = 4 };

static int quantised(const Matrix *m) {
    for (int i = 0; i < m->parts; i++) if (m->part[i].kind < KIND_F16) return 1;
    return 0;
}

int input_bytes(Engine *e, const Matrix *m, int rows) {
    int own = team_size(e->team) * (rows < OWN_ROWS ? rows : OWN_ROWS); /* of these rows, or of fewer of them */
    size_t all = (size_t)(own > rows ? own : rows);
    return engine_buffer(e, BUFFER_NORMED, all * (size_t)round_up(m->width, LANES) * sizeof(float))
        && engine_buffer(e, BUFFER_BLOCKS, all * (size_t)whole(m->width, BLOCK) * sizeof(QBlock));
}

/* One row of a source becomes row number `to` of an input. */
static void prepare_row(Engine *e, const Source *source, const Input *in, int64_t row, int quantise) {
    const float *from = source->x + row * in->width;
    if (source->weight) {
        float *to = (float *)in->x + row * in->width;
        e->kernels->norm(from, source->weight, source->eps, in->width, to);
        from = to;
    }
    int per_row = in->width / BLOCK;
    if (quantise) e->kernels->quantise(from, per_row, (QBlock *)in->q + row * per_row);
}

/* The input of a product. With few rows it is this thread's own, and still to be prepared: that is the result. */
static int phase_input(Engine *e, int thread, const Matrix *m, const Source *source, Input *in) {
    int quantise = quantised(m), own = source->rows <= OWN_ROWS;
    int64_t first = own ? (int64_t)thread * source->rows : 0;
    in->rows = source->rows;
    in->width = m->width;
    in->x = source->weight ? (float *)e->buffer[BUFFER_NORMED] + first * round_up(m->width, LANES) : source->x;
    in->q = (QBlock *)e->buffer[BUFFER_BLOCKS] + first * whole(m->width, BLOCK);
    if (!source->weight && !quantise) return 0;
    if (own) return 1;
    for (Items i; team_take(e->team, 1, in->rows, &i);) prepare_row(e, source, in, i.first, quantise);
    team_meet(e->team, in->rows);
    return 0;
}

static void prepare_own(Engine *e, const Matrix *m, const Source *source, const Input *in) {
    int quantise = quantised(m);
    for (int row = 0; row < in->rows; row++) prepare_row(e, source, in, row, quantise);
}

/* Few panels a task, so that they stay in the cache while many rows pass, and threads end together. */
static int grain_of(const Engine *e, int panels, int rows) {
    int few = rows < 16, grain = panels / (team_size(e->team) * (few ? 4 : 8)), most = few ? 64 : 4;
    return grain < 1 ? 1 : grain > most ? most : grain;
}

/* Whether a task takes the same panels of both parts. */
static int halves(const Matrix *m) { return m->parts == 2 && m->part[0].rows == m->part[1].rows; }

void fetch_ahead(const Engine *e, Next m, int rows) {
    enum { FIRST = 16384, LINE = 64 }; /* bytes: what one thread reads in some two microseconds */
    if (!m || rows > OWN_ROWS) return;
    int panel = team_first(e->team, halves(m) ? m->part[0].panels : m->panels), i = 0;
    while (panel >= m->part[i].panels) panel -= m->part[i++].panels;
    const Part *part = &m->part[i];
    const uint8_t *from = part->data + panel * part->stride;
    int64_t left = (part->panels - panel) * part->stride;
    for (int64_t at = 0; at < FIRST && at < left; at += LINE) __builtin_prefetch(from + at, 0, 2);
}

void phase_product(Engine *e, int thread, const Matrix *m, Source source, float *out, int64_t stride, int add,
                   Next next) {
    Input in;
    int unready = phase_input(e, thread, m, &source, &in), grain = grain_of(e, m->panels, in.rows);
    for (Items panels; team_take(e->team, grain, m->panels, &panels);) {
        if (unready) prepare_own(e, m, &source, &in);
        unready = 0;
        for (int i = 0, before = 0, column = 0; i < m->parts && before < panels.end; i++) {
            const Part *part = &m->part[i];
            int a = panels.first > before ? panels.first - before : 0;
            int b = panels.end - before < part->panels ? panels.end - before : part->panels;
            if (a < b) e->kernels->product(part, a, b - a, &in, out + column, stride, add);
            before += part->panels;
            column += part->rows;
        }
    }
    fetch_ahead(e, next, source.rows);
    team_meet(e->team, m->panels);
}

/* Columns [at, at + count) of both halves of a row. */
static void gate_piece(Engine *e, const float *both, int64_t row, int width, int at, int count, int activation,
                       float *out) {
    const float *gate = both + row * 2 * width + at;
    float *to = out + row * width + at;
    memcpy(to, gate, (size_t)count * sizeof *to);
    e->kernels->gated(to, gate + width, count, activation);
}

void phase_gated_product(Engine *e, int thread, const Matrix *m, Source source, int activation, float *both,
                         float *out, Next next) {
    int width = m->rows / 2;
    if (halves(m)) {
        Input in;
        int unready = phase_input(e, thread, m, &source, &in), panels = m->part[0].panels;
        int grain = grain_of(e, panels, in.rows);
        for (Items i; team_take(e->team, grain, panels, &i);) {
            if (unready) prepare_own(e, m, &source, &in);
            unready = 0;
            int first = i.first, count = i.end - i.first, at = first * LANES;
            int columns = at + count * LANES < width ? count * LANES : width - at;
            e->kernels->product(&m->part[0], first, count, &in, both, 2 * width, 0);
            e->kernels->product(&m->part[1], first, count, &in, both + width, 2 * width, 0);
            for (int row = 0; row < in.rows; row++) gate_piece(e, both, row, width, at, columns, activation, out);
        }
        fetch_ahead(e, next, source.rows);
        team_meet(e->team, panels);
        return;
    }
    enum { PIECE = 512 };
    int pieces = whole(width, PIECE), all = pieces * source.rows;
    phase_product(e, thread, m, source, both, 2 * width, 0, NULL);
    for (Items i; team_take(e->team, 1, all, &i);) {
        int at = i.first % pieces * PIECE, columns = width - at < PIECE ? width - at : PIECE;
        gate_piece(e, both, i.first / pieces, width, at, columns, activation, out);
    }
    fetch_ahead(e, next, source.rows);
    team_meet(e->team, all);
}

void phase_turns(Engine *e, const Step *step, const Rotation *rotation, float *turns) {
    int pairs = rotation->rotated / 2;
    for (Items i; team_take(e->team, 1, step->rows, &i);) {
        int row = i.first;
        float *to = turns + (int64_t)row * rotation->rotated;
        for (int i = 0; i < pairs; i++) {
            float angle = (float)step->position[row] * rotation->frequency[i]; /* float32, as models are trained */
            to[i] = rotation->magnitude * cosf(angle);
            to[pairs + i] = rotation->magnitude * sinf(angle);
        }
    }
    team_meet(e->team, step->rows);
}
