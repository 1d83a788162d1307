/* What samplers ask of many scores: the highest of them.
 *
 * Of k disjoint groups with maxima of at least t, each has a score of at least t: so the k-th highest of the maxima of
 * all groups is at most the k-th highest score, and mostly close to it. That number is found in the same way, from maxima
 * of maxima. Only scores that reach it are sorted.
 */
#include "engine.h"

#include <string.h>

/* Orders keys by score, the highest first, and leaves those of equal scores as they are: in the order of their ids.
 * Returns where the keys are in the end, which is `keys` or `spare`. */
static uint64_t *sort_keys(uint64_t *keys, uint64_t *spare, int64_t n) {
    enum { DIGITS = 4, VALUES = 256 };
    int64_t count[DIGITS][VALUES];
    memset(count, 0, sizeof count);
    for (int64_t i = 0; i < n; i++) {
        for (int d = 0; d < DIGITS; d++) count[d][keys[i] >> (32 + 8 * d) & 255]++;
    }
    for (int d = 0; d < DIGITS; d++) {
        int shift = 32 + 8 * d;
        if (count[d][keys[0] >> shift & 255] == n) continue; /* all have the same digit */
        int64_t at = 0;
        for (int value = 0; value < VALUES; value++) {
            int64_t many = count[d][value];
            count[d][value] = at;
            at += many;
        }
        for (int64_t i = 0; i < n; i++) spare[count[d][keys[i] >> shift & 255]++] = keys[i];
        uint64_t *sorted = spare;
        spare = keys;
        keys = sorted;
    }
    return keys;
}

static int64_t all_keys(const float *x, int64_t n, uint64_t *keys) {
    for (int64_t i = 0; i < n; i++) keys[i] = ranking_key(x[i], i);
    return n;
}

int strata_top(Engine *e, const float *x, int64_t n, int64_t k, int64_t *ids) {
    enum { FEW = 512 }; /* scores that are rather sorted than looked through once more */
    size_t most = (size_t)n / 4 + 8 * FEW; /* more than an eighth, an eighth of it, and so on, each and a group */
    float *high = engine_buffer(e, BUFFER_PEAKS, most * sizeof *high);
    uint64_t *keys = engine_buffer(e, BUFFER_KEYS, 2 * (size_t)(n + 1) * sizeof *keys), *spare = keys + n + 1;
    if (!high || !keys) return 1;
    const float *level = x;
    int64_t count = n;
    for (float *to = high; count > FEW && count / 8 >= k; to += count) {
        count = e->kernels->peaks(level, count, to);
        level = to;
    }
    int64_t found = all_keys(level, count, keys);
    if (level != x) {
        float least = ranking_score(sort_keys(keys, spare, count)[k - 1]);
        found = e->kernels->reaching(x, n, high, least, keys);
    }
    if (found < k) return 1; /* there are NaN */
    const uint64_t *sorted = sort_keys(keys, spare, found);
    for (int64_t i = 0; i < k; i++) ids[i] = (int64_t)(sorted[i] & UINT32_MAX);
    return 0;
}
