/* Compares every instruction set that this machine runs with the portable kernels, through the library's own calls: for
 * machines that are emulated, and have no Python. Exits with 1 after the first difference above rounding. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "strata.h"

static uint32_t state = 1;

static uint32_t random_bits(void) {
    state = state * 1664525 + 1013904223;
    return state >> 8;
}

static float random_number(void) { return (float)(random_bits() % 20001) / 10000.f - 1; }

static void fill(float *x, int n) {
    for (int i = 0; i < n; i++) x[i] = random_number();
}

static void compare(const char *what, const float *a, const float *b, int n) {
    float largest = 1e-6f, worst = 0;
    for (int i = 0; i < n; i++) {
        largest = fmaxf(largest, fabsf(b[i]));
        worst = isnan(a[i]) || isnan(b[i]) ? INFINITY : fmaxf(worst, fabsf(a[i] - b[i]));
    }
    printf("  %-24s %.2g\n", what, worst / largest);
    if (worst > 2e-5f * largest) exit(1);
}

static const struct { int stored, elements, bytes, scales[2]; } formats[] = {
    {STORED_Q4_0, 32, 18, {0, 0}},    {STORED_Q4_1, 32, 20, {0, 2}},   {STORED_Q5_0, 32, 22, {0, 0}},
    {STORED_Q5_1, 32, 24, {0, 2}},    {STORED_Q8_0, 32, 34, {0, 0}},   {STORED_Q4_K, 256, 144, {0, 2}},
    {STORED_Q5_K, 256, 176, {0, 2}},  {STORED_Q6_K, 256, 210, {208, 208}}, {STORED_F16, 1, 2, {0, 0}},
};

enum { OUT = 37, WIDTH = 512, ROWS = 9 };

static void products(Engine *own, Engine *plain) {
    static float x[ROWS * WIDTH], a[ROWS * OUT], b[ROWS * OUT];
    fill(x, ROWS * WIDTH);
    for (size_t f = 0; f < sizeof formats / sizeof *formats; f++) {
        int blocks = OUT * WIDTH / formats[f].elements, bytes = formats[f].bytes;
        uint8_t *tensor = malloc((size_t)(blocks * bytes));
        for (int i = 0; i < blocks * bytes; i++) tensor[i] = (uint8_t)random_bits();
        for (int i = 0; i < blocks; i++) {
            for (int s = 0; s < 2; s++) { /* float16 of about 0.03, so that nothing is infinite */
                uint8_t *scale = tensor + i * bytes + formats[f].scales[s];
                scale[1] = 0x28 | (scale[1] & 3);
            }
        }
        Part part = {.kind = strata_kind(formats[f].stored), .rows = OUT, .width = WIDTH, .panels = (OUT + 15) / 16};
        part.stride = strata_panel_bytes(formats[f].stored, WIDTH);
        part.data = strata_allocate(part.stride * part.panels);
        strata_pack(plain, formats[f].stored, tensor, &part);
        Matrix matrix = {1, OUT, WIDTH, part.panels, &part};
        for (int rows = 1; rows <= ROWS; rows += 4) {
            char name[32];
            snprintf(name, sizeof name, "type %d, %d rows", formats[f].stored, rows);
            strata_linear(own, &matrix, x, rows, a, 0);
            strata_linear(plain, &matrix, x, rows, b, 0);
            compare(name, a, b, rows * OUT);
        }
        strata_release(part.data, part.stride * part.panels);
        free(tensor);
    }
}

static void elementwise(Engine *own, Engine *plain) {
    static float x[3 * 100], weight[100], a[300], b[300];
    fill(x, 300);
    fill(weight, 100);
    strata_norm(own, x, weight, 1e-5f, 3, 100, a);
    strata_norm(plain, x, weight, 1e-5f, 3, 100, b);
    compare("norm", a, b, 300);
    for (int activation = 0; activation < 2; activation++) {
        fill(a, 300);
        for (int i = 0; i < 300; i++) b[i] = a[i] *= 20;
        strata_gated(own, a, x, 300, activation);
        strata_gated(plain, b, x, 300, activation);
        compare("gated", a, b, 300);
    }
}

static void attention(Engine *own, Engine *plain) {
    enum { HEADS = 4, KV = 2, DIM = 40, TOKENS = 300, PAGE = 16, PAGES = 19 };
    static float q[TOKENS * HEADS * DIM], k[TOKENS * KV * DIM], v[TOKENS * KV * DIM], a[TOKENS * HEADS * DIM], b[TOKENS * HEADS * DIM];
    fill(q, TOKENS * HEADS * DIM);
    fill(k, TOKENS * KV * DIM);
    fill(v, TOKENS * KV * DIM);
    const int64_t part = KV * PAGE * DIM * 4, scales = KV * PAGE * 4, bytes = 2 * part + 2 * scales;
    uint8_t *memory = aligned_alloc(64, (size_t)(bytes * PAGES)), *chunks[1] = {memory};
    int32_t table[PAGES], position[TOKENS];
    for (int i = 0; i < PAGES; i++) table[i] = PAGES - 1 - i;
    for (int i = 0; i < TOKENS; i++) position[i] = i;
    const int32_t *tables[1] = {table};
    for (int type = KV_F32; type <= KV_INT8; type++) {
        Store store = {type, PAGE, PAGES, bytes, chunks};
        const Store *stores[1] = {&store};
        Span span = {0, TOKENS, tables};
        Step step = {TOKENS, 1, 0, &span, position, NULL, stores};
        Attention spec = {0, HEADS, KV, DIM, DIM, 200, 0.4f, 30, 0, part, 2 * part, 2 * part + scales, NULL};
        memset(memory, 0xff, (size_t)(bytes * PAGES));
        strata_attention(own, &step, &spec, q, k, v, a);
        strata_attention(plain, &step, &spec, q, k, v, b);
        compare("attention", a, b, TOKENS * HEADS * DIM);
        const float sinks[HEADS] = {-50, 1, 3, 50};
        spec.sinks = sinks;
        strata_attention(own, &step, &spec, q, k, v, a);
        strata_attention(plain, &step, &spec, q, k, v, b);
        compare("attention with sinks", a, b, TOKENS * HEADS * DIM);
    }
    free(memory);
}

static void ranking(Engine *own) {
    enum { SCORES = 5003 };
    static float scores[SCORES];
    static int64_t ids[SCORES];
    fill(scores, SCORES);
    for (int k = 1; k <= SCORES; k = 3 * k + 1) {
        if (strata_top(own, scores, SCORES, k, ids)) exit(1);
        for (int i = 1; i < k; i++) {
            float last = scores[ids[i - 1]], next = scores[ids[i]];
            if (last < next || (last == next && ids[i - 1] >= ids[i])) exit(1);
        }
        int higher = 0; /* than the last one, or equal and before it: all but itself are among the best */
        for (int i = 0; i < SCORES; i++) {
            float last = scores[ids[k - 1]];
            higher += scores[i] > last || (scores[i] == last && i < ids[k - 1]);
        }
        printf("  %d highest\n", k);
        if (higher != k - 1) exit(1);
    }
}

int main(void) {
    for (int i = 0; strcmp(strata_isa(i), "portable"); i++) {
        printf("%s against portable\n", strata_isa(i));
        Engine *own = strata_open(2, strata_isa(i)), *plain = strata_open(1, "portable");
        if (!own || !plain) return 1;
        products(own, plain);
        elementwise(own, plain);
        attention(own, plain);
        ranking(own);
        strata_close(own);
        strata_close(plain);
    }
    return 0;
}
