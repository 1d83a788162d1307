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
    for (int row; (row = team_take(e->team, 1, in->rows)) < in->rows;) prepare_row(e, source, in, row, quantise);
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

void phase_product(Engine *e, int thread, const Matrix *m, Source source, float *out, int64_t stride, int add) {
    Input in;
    int unready = phase_input(e, thread, m, &source, &in), grain = grain_of(e, m->panels, in.rows);
    for (int first; (first = team_take(e->team, grain, m->panels)) < m->panels;) {
        if (unready) prepare_own(e, m, &source, &in);
        unready = 0;
        int end = first + grain < m->panels ? first + grain : m->panels, column = 0;
        for (int i = 0, before = 0; i < m->parts && before < end; i++) {
            const Part *part = &m->part[i];
            int a = first > before ? first - before : 0, b = end - before < part->panels ? end - before : part->panels;
            if (a < b) e->kernels->product(part, a, b - a, &in, out + column, stride, add);
            before += part->panels;
            column += part->rows;
        }
    }
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
                         float *out) {
    int width = m->rows / 2;
    if (m->parts == 2 && m->part[0].rows == m->part[1].rows) { /* a task does the same panels of both */
        Input in;
        int unready = phase_input(e, thread, m, &source, &in), panels = m->part[0].panels;
        int grain = grain_of(e, panels, in.rows);
        for (int first; (first = team_take(e->team, grain, panels)) < panels;) {
            if (unready) prepare_own(e, m, &source, &in);
            unready = 0;
            int count = first + grain < panels ? grain : panels - first, at = first * LANES;
            int columns = at + count * LANES < width ? count * LANES : width - at;
            e->kernels->product(&m->part[0], first, count, &in, both, 2 * width, 0);
            e->kernels->product(&m->part[1], first, count, &in, both + width, 2 * width, 0);
            for (int row = 0; row < in.rows; row++) gate_piece(e, both, row, width, at, columns, activation, out);
        }
        team_meet(e->team, panels);
        return;
    }
    enum { PIECE = 512 };
    int pieces = whole(width, PIECE), all = pieces * source.rows;
    phase_product(e, thread, m, source, both, 2 * width, 0);
    for (int i; (i = team_take(e->team, 1, all)) < all;) {
        int at = i % pieces * PIECE, columns = width - at < PIECE ? width - at : PIECE;
        gate_piece(e, both, i / pieces, width, at, columns, activation, out);
    }
    team_meet(e->team, all);
}

void phase_turns(Engine *e, const Step *step, const Rotation *rotation, float *turns) {
    int pairs = rotation->rotated / 2;
    for (int row; (row = team_take(e->team, 1, step->rows)) < step->rows;) {
        float *to = turns + (int64_t)row * rotation->rotated;
        for (int i = 0; i < pairs; i++) {
            float angle = (float)step->position[row] * rotation->frequency[i]; /* float32, as models are trained */
            to[i] = rotation->magnitude * cosf(angle);
            to[pairs + i] = rotation->magnitude * sinf(angle);
        }
    }
    team_meet(e->team, step->rows);
}
