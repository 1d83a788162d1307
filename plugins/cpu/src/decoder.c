/* Whole steps, and the single operations of the compute contract. */
#include <string.h>

#include "phases.h"

/* ---- single operations ----------------------------------------------------------------------------------------- */

typedef struct {
    Engine *engine;
    const Matrix *matrix;
    const float *x, *weight;
    float *out;
    int rows, width, add;
    float eps;
    const Step *step;
    const Rotation *rotation;
    float *turns;
    int heads, head_dim;
    Attending attending;
    int64_t count;
    int activation;
} Call;

static void linear_work(void *context, int thread) {
    Call *c = context;
    phase_product(c->engine, thread, c->matrix, (Source){.x = c->x, .rows = c->rows}, c->out, c->matrix->rows, c->add,
                  NULL);
}

int strata_linear(Engine *e, const Matrix *m, const float *x, int rows, float *out, int add) {
    Call c = {.engine = e, .matrix = m, .x = x, .out = out, .rows = rows, .add = add};
    if (!input_bytes(e, m, rows)) return 1;
    team_run(e->team, linear_work, &c);
    return 0;
}

static void norm_work(void *context, int thread) {
    Call *c = context;
    (void)thread;
    for (Items i; team_take(c->engine->team, 1, c->rows, &i);) {
        int64_t at = (int64_t)i.first * c->width;
        c->engine->kernels->norm(c->x + at, c->weight, c->eps, c->width, c->out + at);
    }
}

int strata_norm(Engine *e, const float *x, const float *weight, float eps, int groups, int width, float *out) {
    Call c = {.engine = e, .x = x, .weight = weight, .eps = eps, .rows = groups, .width = width, .out = out};
    team_run(e->team, norm_work, &c);
    return 0;
}

static void rope_work(void *context, int thread) {
    Call *c = context;
    const Rotation *r = c->rotation;
    (void)thread;
    phase_turns(c->engine, c->step, r, c->turns);
    for (Items i; team_take(c->engine->team, 1, c->step->rows, &i);) {
        c->engine->kernels->rope(c->out + (int64_t)i.first * c->heads * c->head_dim, c->heads, c->head_dim,
                                 c->turns + (int64_t)i.first * r->rotated, r->rotated, r->interleaved);
    }
}

int strata_rope(Engine *e, const Step *step, const Rotation *rotation, float *x, int heads, int head_dim) {
    Call c = {.engine = e, .step = step, .rotation = rotation, .out = x, .heads = heads, .head_dim = head_dim};
    c.turns = engine_buffer(e, BUFFER_TURNS, (size_t)step->rows * (size_t)rotation->rotated * sizeof(float));
    if (!c.turns) return 1;
    team_run(e->team, rope_work, &c);
    return 0;
}

static void gated_work(void *context, int thread) {
    Call *c = context;
    enum { PIECE = 4096 };
    (void)thread;
    int pieces = (int)((c->count + PIECE - 1) / PIECE);
    for (Items i; team_take(c->engine->team, 1, pieces, &i);) {
        int64_t at = (int64_t)i.first * PIECE, n = c->count - at < PIECE ? c->count - at : PIECE;
        c->engine->kernels->gated(c->out + at, c->x + at, n, c->activation);
    }
}

int strata_gated(Engine *e, float *gate, const float *up, int64_t count, int activation) {
    Call c = {.engine = e, .out = gate, .x = up, .count = count, .activation = activation};
    team_run(e->team, gated_work, &c);
    return 0;
}

static void attention_work(void *context, int thread) {
    Call *c = context;
    phase_attention(c->engine, thread, &c->attending, NULL, NULL, NULL);
}

int strata_attention(Engine *e, const Step *step, const Attention *a, const float *q, const float *k, const float *v,
                     float *out) {
    Call c = {.engine = e};
    c.attending = (Attending){.step = step, .attention = a, .q = q, .k = k, .v = v, .out = out,
                              .q_stride = a->heads * a->head_dim, .k_stride = a->kv_heads * a->head_dim,
                              .v_stride = a->kv_heads * a->value_dim};
    attending_plan(e, &c.attending);
    if (!attending_bytes(e, &c.attending)) return 1;
    attending_plan(e, &c.attending);
    team_run(e->team, attention_work, &c);
    return 0;
}

/* ---- a decoder ------------------------------------------------------------------------------------------------- */

typedef struct {
    Engine *engine;
    const Step *step;
    const Decoder *decoder;
    float *x, *projected, *attended, *gate_up, *hidden, *chosen, *turns, *logits;
    Attending attending;
} Run;

/* Rows whose logits are wanted, of x and of what the last layer attended: all else of that layer is left out. */
static void choose_rows(Run *run, int width, int attended) {
    size_t wide = sizeof(float) * (size_t)width, narrow = sizeof(float) * (size_t)attended;
    int outputs = run->step->outputs;
    for (Items i; team_take(run->engine->team, 1, outputs, &i);) {
        int64_t to = i.first, row = run->step->output[to];
        memcpy(run->chosen + to * width, run->x + row * width, wide);
        memcpy(run->projected + to * attended, run->attended + row * attended, narrow);
    }
    team_meet(run->engine->team, outputs);
}

static void attention_half(Run *run, const Layer *layer, int thread) {
    Engine *e = run->engine;
    Source x = {run->x, layer->attention_norm, layer->eps, run->step->rows};
    Attending a = run->attending;
    a.attention = &layer->attention;
    a.k = a.q + layer->attention.heads * layer->attention.head_dim;
    a.v = a.k + layer->attention.kv_heads * layer->attention.head_dim;
    a.q_stride = a.k_stride = a.v_stride = layer->qkv->rows;
    a.q_norm = layer->q_norm;
    a.k_norm = layer->k_norm;
    a.eps = layer->eps;
    attending_plan(e, &a);
    phase_product(e, thread, layer->qkv, x, run->projected, layer->qkv->rows, 0, layer->output);
    phase_attention(e, thread, &a, layer->rotation, run->turns, layer->output);
}

static void decode_work(void *context, int thread) {
    Run *run = context;
    Engine *e = run->engine;
    const Decoder *d = run->decoder;
    phase_turns(e, run->step, d->layer->rotation, run->turns);
    float *x = run->x, *attended = run->attended;
    int rows = run->step->rows;
    for (int i = 0; i < d->layers; i++) {
        const Layer *layer = &d->layer[i];
        attention_half(run, layer, thread);
        if (i == d->layers - 1) {
            rows = run->step->outputs;
            if (!rows) return;
            choose_rows(run, layer->output->rows, layer->output->width);
            x = run->chosen;
            attended = run->projected;
        }
        phase_product(e, thread, layer->output, (Source){.x = attended, .rows = rows}, x, layer->output->rows, 1,
                      layer->gate_up);
        phase_gated_product(e, thread, layer->gate_up, (Source){x, layer->ffn_norm, layer->eps, rows},
                            layer->activation, run->gate_up, run->hidden, layer->down);
        phase_product(e, thread, layer->down, (Source){.x = run->hidden, .rows = rows}, x, layer->down->rows, 1,
                      i + 1 < d->layers ? d->layer[i + 1].qkv : d->output);
    }
    phase_product(e, thread, d->output, (Source){x, d->norm, d->eps, rows}, run->logits, d->output->rows, 0,
                  NULL);
}

static int larger(int a, int b) { return a > b ? a : b; }

/* Buffers for the largest layer. */
static int prepare(Run *run) {
    Engine *e = run->engine;
    const Decoder *d = run->decoder;
    size_t rows = (size_t)run->step->rows;
    int projected = 0, attended = 0, ffn = 0;
    for (int i = 0; i < d->layers; i++) {
        const Layer *l = &d->layer[i];
        projected = larger(projected, larger(l->qkv->rows, l->output->width));
        attended = larger(attended, l->output->width);
        ffn = larger(ffn, l->down->width);
        run->attending.attention = &l->attention;
        attending_plan(e, &run->attending);
        if (!attending_bytes(e, &run->attending)) return 0;
        const Matrix *inputs[] = {l->qkv, l->output, l->gate_up, l->down};
        for (int j = 0; j < 4; j++) if (!input_bytes(e, inputs[j], (int)rows)) return 0;
    }
    size_t hidden = rows * (size_t)ffn * sizeof(float);
    size_t chosen = ((size_t)run->step->outputs + 1) * (size_t)d->output->width * sizeof(float);
    run->projected = engine_buffer(e, BUFFER_PROJECTED, rows * (size_t)projected * sizeof(float));
    run->attended = engine_buffer(e, BUFFER_ATTENDED, rows * (size_t)attended * sizeof(float));
    run->gate_up = engine_buffer(e, BUFFER_HIDDEN, 3 * hidden);
    run->chosen = engine_buffer(e, BUFFER_CHOSEN, chosen);
    run->turns = engine_buffer(e, BUFFER_TURNS, rows * (size_t)d->layer->rotation->rotated * sizeof(float));
    if (!run->projected || !run->attended || !run->gate_up || !run->chosen || !run->turns) return 0;
    run->hidden = run->gate_up + 2 * rows * (size_t)ffn;
    run->attending.q = run->projected;
    run->attending.out = run->attended;
    return 1;
}

int strata_decode(Engine *e, const Step *step, const Decoder *d, float *x, float *logits) {
    Run run = {.engine = e, .step = step, .decoder = d, .x = x, .logits = logits, .attending = {.step = step}};
    if (!prepare(&run)) return 1;
    team_run(e->team, decode_work, &run);
    return 0;
}
