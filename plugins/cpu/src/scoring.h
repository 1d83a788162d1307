/* What samplers ask of many scores: see scoring.c. */

enum { GROUP_VECTORS = 8, GROUP = GROUP_VECTORS * LANES };

/* Maxima of GROUP_VECTORS scores each: of every GROUP of them, lane by lane; scores that fill no group stay as they are.
 * Returns how many there are. */
static int64_t peaks(const float *x, int64_t n, float *out) {
    float *to = out;
    int64_t at = 0;
    for (; at + GROUP <= n; at += GROUP, to += LANES) {
        vf top = vf_load(x + at);
        for (int i = 1; i < GROUP_VECTORS; i++) top = vf_max(vf_load(x + at + i * LANES), top);
        vf_store(to, top);
    }
    for (; at < n; at++) *to++ = x[at];
    return to - out;
}

INLINE uint64_t *put_reaching(const float *x, int64_t from, int64_t end, float least, uint64_t *to) {
    for (int64_t i = from; i < end; i++) {
        *to = ranking_key(x[i], i);
        to += x[i] >= least;
    }
    return to;
}

/* Keys of all scores that are at least `least`, in the order of their ids; `high` is what peaks() gave. Returns how many
 * there are; one key more is written to. */
static int64_t reaching(const float *x, int64_t n, const float *high, float least, uint64_t *keys) {
    uint64_t *to = keys;
    int64_t at = 0;
    for (; at + GROUP <= n; at += GROUP, high += LANES) {
        if (vf_top(vf_load(high)) >= least) to = put_reaching(x, at, at + GROUP, least, to);
    }
    return put_reaching(x, at, n, least, to) - keys;
}
