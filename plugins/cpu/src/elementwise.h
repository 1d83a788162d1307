/* Norms, activations, rotations, and the quantisation of activations. */

/* Sixteen activations, number `half` of a block's two. */
INLINE void store_activations(QBlock *out, int half, vi x) {
#if defined(STRATA_BYTES)
    vi high = vi_sar(vi_add(x, vi_set(128)), 8), low = vi_sub(x, vi_shl(high, 8));
    int8_t *bytes = (int8_t *)out->q + half * LANES;
    vi_store_bytes(bytes, high);
    vi_store_bytes(bytes + BLOCK, low);
#else
    int16_t *q = out->q + half * LANES;
    vi_store_words(q, x);
    for (int i = 1; i < LANES; i += 4) {
        int16_t second = q[i];
        q[i] = q[i + 1];
        q[i + 1] = second;
    }
#endif
}

/* Codes are round(x * MOST / max |x|). A block with an infinite or undefined number gets an undefined scale, so that
 * the fault shows in the output. */
static void quantise(const float *x, int64_t blocks, QBlock *out) {
    for (; blocks--; x += BLOCK, out++) {
        vf a = vf_load(x), b = vf_load(x + LANES);
        /* Magnitudes compare as integers; so NaN is greater than any number. */
        float top = bits_float((uint32_t)vi_top(vi_max(vf_bits(vf_abs(a)), vf_bits(vf_abs(b)))));
        if (!(top <= FLT_MAX)) {
            memset(out, 0, sizeof *out);
            out->d = out->sum = NAN;
            continue;
        }
        float d = top / MOST, inverse = d >= FLT_MIN ? 1 / d : 0;
        vi low = vf_round(vf_mul(a, vf_set(inverse))), high = vf_round(vf_mul(b, vf_set(inverse)));
        store_activations(out, 0, low);
        store_activations(out, 1, high);
        out->d = d;
        out->half[0] = vi_sum(low);
        out->half[1] = vi_sum(high);
        out->sum = d * (float)(out->half[0] + out->half[1]);
    }
}

static void norm(const float *x, const float *weight, float eps, int width, float *out) {
    vf squares = vf_set(0);
    int i = 0;
    for (; i + LANES <= width; i += LANES) {
        vf v = vf_load(x + i);
        squares = vf_fma(v, v, squares);
    }
    if (i < width) {
        vf v = vf_load_some(x + i, width - i);
        squares = vf_fma(v, v, squares);
    }
    vf factor = vf_set(1 / sqrtf(vf_sum(squares) / (float)width + eps));
    for (i = 0; i + LANES <= width; i += LANES) {
        vf_store(out + i, vf_mul(vf_mul(vf_load(x + i), factor), vf_load(weight + i)));
    }
    if (i < width) {
        vf v = vf_mul(vf_mul(vf_load_some(x + i, width - i), factor), vf_load_some(weight + i, width - i));
        vf_store_some(out + i, v, width - i);
    }
}

INLINE vf activate(vf x, int activation) {
    if (activation == ACTIVATION_SILU) return vf_mul(x, vf_sigmoid(x));
    /* x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) */
    vf inner = vf_mul(vf_mul(vf_fma(vf_mul(x, x), vf_set(0.044715f), vf_set(1.f)), x), vf_set(0.797884561f));
    return vf_mul(vf_mul(x, vf_set(0.5f)), vf_add(vf_set(1.f), vf_tanh(inner)));
}

static void gated(float *gate, const float *up, int64_t count, int activation) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        vf_store(gate + i, vf_mul(activate(vf_load(gate + i), activation), vf_load(up + i)));
    }
    if (i < count) {
        int n = (int)(count - i);
        vf v = vf_mul(activate(vf_load_some(gate + i, n), activation), vf_load_some(up + i, n));
        vf_store_some(gate + i, v, n);
    }
}

static void rope(float *x, int heads, int head_dim, const float *turns, int rotated, int interleaved) {
    int pairs = rotated / 2, first = interleaved ? 2 : 1, second = interleaved ? 1 : pairs;
    const float *cosine = turns, *sine = turns + pairs;
    for (int head = 0; head < heads; head++, x += head_dim) {
        for (int i = 0; i < pairs; i++) {
            float a = x[first * i], b = x[first * i + second];
            x[first * i] = a * cosine[i] - b * sine[i];
            x[first * i + second] = b * cosine[i] + a * sine[i];
        }
    }
}
