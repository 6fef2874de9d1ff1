/* What only a draft head needs: joined rows, rotation of queries and keys, the gate of its MLP, and what it keeps of
   each sequence.
   Definitions: extensions/speculation/ops/reference.py. */
#include "oscine.h"

/* Rows x [T, K] -> columns first .. first + K - 1 of y, whose rows have `width` elements. */
int oscine_place(const float *x, float *y, int64_t num_tokens, int64_t columns, int64_t width, int64_t first) {
    for (int64_t t = 0; t < num_tokens; t++)
        memcpy(y + t * width + first, x + t * columns, sizeof(float) * columns);
    return 0;
}

struct rope {
    const float *qkv, *cos_sin;
    const int64_t *positions, *slots;
    float *q, *pages;
    int64_t num_heads, page_stride, num_kv_heads, page_size, head_dim;
};

static void rotate(const float *x, const float *cos, const float *sin, float *y, int64_t half) {
    for (int64_t k = 0; k < half; k++) {
        const float a = x[k], b = x[half + k];
        y[k] = a * cos[k] - b * sin[k];
        y[half + k] = b * cos[k] + a * sin[k];
    }
}

static void rope_task(void *context, int64_t t) {
    const struct rope *a = context;
    const int64_t dim = a->head_dim, half = dim / 2, plane = a->num_kv_heads * a->page_size * dim;
    const float *x = a->qkv + t * (a->num_heads + 2 * a->num_kv_heads) * dim;
    const float *cos = a->cos_sin + a->positions[t] * dim, *sin = cos + half;
    float *key = a->pages + a->slots[t] / a->page_size * a->page_stride + a->slots[t] % a->page_size * dim;
    float *query = a->q + t * a->num_heads * dim;
    for (int64_t h = 0; h < a->num_heads; h++, x += dim, query += dim) rotate(x, cos, sin, query, half);
    for (int64_t g = 0; g < a->num_kv_heads; g++, x += dim, key += a->page_size * dim) {
        rotate(x, cos, sin, key, half);
        memcpy(key + plane, x + a->num_kv_heads * dim, sizeof(float) * dim);
    }
}

/* qkv [T, (Q + 2G) * D] -> q [T, Q, D], and keys and values at their slots of the pages [pages, 2, G, P, D]. */
int oscine_rope(
    const float *qkv, const float *cos_sin, const int64_t *positions, const int64_t *slots, float *q,
    int64_t num_tokens, int64_t num_heads, float *pages, int64_t page_stride, int64_t num_kv_heads, int64_t page_size,
    int64_t head_dim) {
    struct rope a = {qkv, cos_sin, positions, slots, q, pages, num_heads, page_stride, num_kv_heads, page_size, head_dim};
    for (int64_t t = 0; t < num_tokens; t++) rope_task(&a, t);
    return 0;
}

/* Gates and values [T, 2I] -> gate / (1 + e^-gate) * value [T, I]. */
int oscine_swiglu(const float *gate_up, float *out, int64_t num_tokens, int64_t width) {
    for (int64_t t = 0; t < num_tokens; t++, gate_up += 2 * width, out += width) {
        int64_t k = 0;
        for (; k + LANES <= width; k += LANES) {
            const f8 gate = load(gate_up + k);
            store(out + k, gate / (all(1.0f) + exp8(-gate)) * load(gate_up + width + k));
        }
        for (; k < width; k++) out[k] = gate_up[k] / (1.0f + expf(-gate_up[k])) * gate_up[width + k];
    }
    return 0;
}

/* Rows of features [T, H] -> the state of sequences: lens [S + 1], held [S + 1, H]. The last accepted row of a sequence
   is the last that is not REJECTED. The row `padding` is left alone. */
int oscine_hold(
    const int32_t *rows, const int32_t *slots, const int64_t *positions, const int64_t *ids, const float *features,
    int64_t count, int64_t width, int64_t padding, int32_t *lens, float *held, int64_t *next_ids) {
    for (int64_t m = 0; m < count; m++) {
        next_ids[m] = MAX(ids[m], 0);
        if (ids[m] == REJECTED || slots[m] == padding) continue;
        lens[slots[m]] = (int32_t)positions[rows[m]] + 1;
        memcpy(held + slots[m] * width, features + rows[m] * width, sizeof(float) * width);
    }
    return 0;
}

int oscine_held(const int32_t *slots, const float *held, float *features, int64_t count, int64_t width) {
    for (int64_t d = 0; d < count; d++) memcpy(features + d * width, held + slots[d] * width, sizeof(float) * width);
    return 0;
}

int oscine_draft_sampling(
    const int32_t *slots, const int64_t *positions, const float *temperatures, const int64_t *seeds, int64_t count,
    float *temperature, int64_t *seed, int64_t *position) {
    for (int64_t d = 0; d < count; d++) {
        temperature[d] = temperatures[slots[d]];
        seed[d] = seeds[slots[d]];
        position[d] = positions[d] + 2;
    }
    return 0;
}

int oscine_put(
    int32_t *drafts, int64_t most_drafts, int64_t place, const int32_t *slots, const int64_t *ids, int64_t count) {
    for (int64_t d = 0; d < count; d++) drafts[slots[d] * most_drafts + place] = (int32_t)ids[d];
    return 0;
}
