/* Recurrent layers: the gated delta rule and the causal convolution. */

INLINE vf load_columns(const float *x, int used) { return used == LANES ? vf_load(x) : vf_load_some(x, used); }
INLINE void store_columns(float *out, vf x, int used) {
    if (used == LANES) vf_store(out, x);
    else vf_store_some(out, x, used);
}

/* Columns [first, first + LANES) of one value head's state, over consecutive rows: S = f S; S += k (x) beta (v - k S);
 * y = q S. Columns do not depend on each other, so this much of the state stays in the nearest cache from row to row.
 * `used` columns are there; the state is (key_dim, value_dim), and is read from `before` (NULL: zeros). */
static void delta(const Delta *d, const float *before, float *after, int head, int first, int row, int rows) {
    int used = d->value_dim - first < LANES ? d->value_dim - first : LANES;
    int64_t k_stride = (int64_t)d->key_heads * d->key_dim, v_stride = (int64_t)d->value_heads * d->value_dim;
    int key_head = head / (d->value_heads / d->key_heads);
    vf state[MOST_KEY_DIM];
    for (int i = 0; i < d->key_dim; i++) {
        state[i] = before ? load_columns(before + (int64_t)i * d->value_dim + first, used) : vf_set(0);
    }
    for (int end = row + rows; row < end; row++) {
        const float *k = d->k + row * k_stride + key_head * d->key_dim;
        const float *q = d->q + row * k_stride + key_head * d->key_dim;
        const float *v = d->v + row * v_stride + head * d->value_dim + first;
        vf factor = vf_set(d->factor[(int64_t)row * d->value_heads + head]), known = vf_set(0), y = vf_set(0);
        for (int i = 0; i < d->key_dim; i++) {
            state[i] = vf_mul(state[i], factor);
            known = vf_fma(vf_set(k[i]), state[i], known);
        }
        vf change = vf_mul(vf_sub(load_columns(v, used), known), vf_set(d->beta[(int64_t)row * d->value_heads + head]));
        for (int i = 0; i < d->key_dim; i++) {
            state[i] = vf_fma(vf_set(k[i]), change, state[i]);
            y = vf_fma(vf_set(q[i]), state[i], y);
        }
        store_columns(d->out + row * v_stride + head * d->value_dim + first, y, used);
    }
    for (int i = 0; i < d->key_dim; i++) {
        store_columns(after + (int64_t)i * d->value_dim + first, state[i], used);
    }
}

/* Row `t` of a sequence, counted from its first row in this step, or of the rows before it (t < 0). */
INLINE const float *conv_row(const Conv *c, const float *before, int row, int t) {
    if (t >= 0) return c->x + (int64_t)(row + t) * c->channels;
    return before ? before + (int64_t)(t + (c->kernel - 1) * c->dilation) * c->channels : NULL;
}

/* Channels [first, first + LANES) of one sequence's rows. */
static void conv(const Conv *c, const float *before, float *after, int first, int row, int rows) {
    int used = c->channels - first < LANES ? c->channels - first : LANES, past = (c->kernel - 1) * c->dilation;
    for (int t = 0; t < rows; t++) {
        vf y = vf_set(0);
        for (int j = 0; j < c->kernel; j++) {
            const float *x = conv_row(c, before, row, t - (c->kernel - 1 - j) * c->dilation);
            const float *w = c->weight + (int64_t)j * c->channels + first;
            if (x) y = vf_add(vf_mul(load_columns(x + first, used), load_columns(w, used)), y);
        }
        store_columns(c->out + (int64_t)(row + t) * c->channels + first, y, used);
    }
    for (int p = 0; p < past; p++) { /* ascending: `after` is another page than `before` */
        const float *x = conv_row(c, before, row, rows - past + p);
        store_columns(after + (int64_t)p * c->channels + first, x ? load_columns(x + first, used) : vf_set(0), used);
    }
}
