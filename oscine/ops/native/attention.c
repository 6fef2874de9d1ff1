/* Queries, keys and values with rotary embedding, and attention over pages with sinks and windows. */
#include "oscine.h"

/* One layer's pages: [2 (key, value), G, P, D] each, `stride` floats from page to page. */
struct pages {
    float *memory;
    int64_t stride, num_heads, page_size, head_dim;
};

static inline float *vectors(const struct pages *p, int64_t page, int kind, int64_t head) {
    return p->memory + page * p->stride + (kind * p->num_heads + head) * p->page_size * p->head_dim;
}

/* ---- rotation: a' = a cos - b sin, b' = b cos + a sin, with the halves a and b of a head ---- */

static void rotate(const float *from, float *to, const float *cos_sin, int64_t half) {
    for (int64_t d = 0; d < half; d++) {
        const float a = from[d], b = from[half + d], c = cos_sin[d], s = cos_sin[half + d];
        to[d] = a * c - b * s;
        to[half + d] = b * c + a * s;
    }
}

struct rope {
    const float *qkv, *cos_sin;
    const int64_t *positions, *slots;
    float *q;
    struct pages kv;
    int64_t query_heads;
};

static void rope_task(void *context, int64_t t) {
    const struct rope *a = context;
    const int64_t dim = a->kv.head_dim, keys = a->kv.num_heads;
    const float *qkv = a->qkv + t * (a->query_heads + 2 * keys) * dim, *angles = a->cos_sin + a->positions[t] * dim;
    const int64_t page = a->slots[t] / a->kv.page_size, place = a->slots[t] % a->kv.page_size * dim;
    for (int64_t h = 0; h < a->query_heads; h++)
        rotate(qkv + h * dim, a->q + (t * a->query_heads + h) * dim, angles, dim / 2);
    for (int64_t g = 0; g < keys; g++) {
        rotate(qkv + (a->query_heads + g) * dim, vectors(&a->kv, page, 0, g) + place, angles, dim / 2);
        memcpy(vectors(&a->kv, page, 1, g) + place, qkv + (a->query_heads + keys + g) * dim, sizeof(float) * dim);
    }
}

/* RMSNorm of x [T, J, H] + residual, projection by w [F, H] and bias [F], rotation: q [T, Q, D] and sum [T, H]; keys and
   values are written to the slots. Returns -1 without memory. */
int oscine_norm_qkv(
    const float *x, int64_t num_parts, const float *residual, const float *norm_weight, float eps, float *sum,
    int64_t num_tokens, int64_t width, const void *w, int64_t kind, const float *bias, const float *cos_sin,
    const int64_t *positions, const int64_t *slots, float *q, int64_t query_heads, float *pages, int64_t page_stride, int64_t kv_heads,
    int64_t page_size, int64_t head_dim) {
    const int64_t num_rows = (query_heads + 2 * kv_heads) * head_dim;
    float *normed = scratch(SCRATCH_X, sizeof(float) * num_tokens * width);
    float *qkv = scratch(SCRATCH_Y, sizeof(float) * num_tokens * num_rows);
    if (!normed || !qkv) return -1;
    oscine_rms_norm(x, num_parts, residual, norm_weight, eps, normed, sum, num_tokens, width);
    if (oscine_linear(normed, w, kind, bias, qkv, num_tokens, num_rows, width)) return -1;
    struct rope a = {qkv, cos_sin, positions, slots, q, {pages, page_stride, kv_heads, page_size, head_dim}, query_heads};
    if (num_tokens < 16)
        for (int64_t t = 0; t < num_tokens; t++) rope_task(&a, t);
    else
        run_parallel(num_tokens, rope_task, &a);
    return 0;
}

/* ---- attention ---- */

#define QUERIES 8 /* of one sequence and key head, per task */
#define KEYS 64   /* scores of a head before their maximum is taken */

struct attention {
    const float *q, *sinks;
    struct pages kv;
    const int32_t *page_table, *query_starts, *context_lens;
    const int32_t *tasks; /* [n, 3]: sequence, first query in it, key head */
    float *out;
    int64_t query_heads, table_width, window;
    float scale;
};

/* scores[r, j] of R queries and the keys first .. last - 1, all of one page. */
static void page_scores(
    const float *q, int64_t repeats, const float *keys, int64_t num_keys, int64_t dim, float scale, float *scores) {
    for (int64_t r = 0; r < repeats; r++) {
        const float *query = q + r * dim;
        int64_t j = 0;
        for (; j + LANES <= num_keys; j += LANES) {
            f8 sum[LANES] = {0};
            for (int64_t d = 0; d < dim; d += LANES) {
                const f8 a = load(query + d);
#pragma GCC unroll 8
                for (int i = 0; i < LANES; i++) sum[i] += a * load(keys + (j + i) * dim + d);
            }
            store(scores + r * KEYS + j, sums8(sum) * all(scale));
        }
        for (; j < num_keys; j++) {
            f8 sum = {0};
            for (int64_t d = 0; d < dim; d += LANES) sum += load(query + d) * load(keys + j * dim + d);
            scores[r * KEYS + j] = sum8(sum) * scale;
        }
    }
}

/* Takes up to KEYS keys into the running softmax of one query: its maximum, its sum, and the weighted values. */
static void take_page(
    float *scores, const float *values, int64_t num_keys, int64_t dim, float *top, float *total, float *out) {
    float highest = *top;
    for (int64_t j = 0; j < num_keys; j++) highest = MAX(highest, scores[j]);
    const float shrink = expf(*top - highest);
    for (int64_t j = num_keys; j % LANES; j++) scores[j] = -INFINITY;
    f8 sum = {0};
    for (int64_t j = 0; j < num_keys; j += LANES) {
        const f8 p = exp8(load(scores + j) - all(highest));
        store(scores + j, p);
        sum += p;
    }
    *total = *total * shrink + sum8(sum);
    *top = highest;
    for (int64_t d = 0; d < dim; d += 4 * LANES) {
        const int64_t parts = MIN(4, (dim - d) / LANES);
        f8 v[4];
        for (int64_t i = 0; i < parts; i++) v[i] = load(out + d + i * LANES) * all(shrink);
        for (int64_t j = 0; j < num_keys; j++)
            for (int64_t i = 0; i < parts; i++) v[i] += all(scores[j]) * load(values + j * dim + d + i * LANES);
        for (int64_t i = 0; i < parts; i++) store(out + d + i * LANES, v[i]);
    }
}

static void attend(const struct attention *a, int64_t s, int64_t query, int64_t g) {
    const int64_t dim = a->kv.head_dim, size = a->kv.page_size, repeats = a->query_heads / a->kv.num_heads;
    const int64_t start = a->query_starts[s], position = a->context_lens[s] - (a->query_starts[s + 1] - start) + query;
    const int64_t row = (start + query) * a->query_heads + g * repeats;
    const int64_t begin = a->window && position >= a->window ? position - a->window + 1 : 0;
    float top[repeats], total[repeats], scores[repeats * KEYS];
    for (int64_t r = 0; r < repeats; r++) top[r] = a->sinks[g * repeats + r], total[r] = 1.0f;
    memset(a->out + row * dim, 0, sizeof(float) * repeats * dim);
    for (int64_t key = begin; key <= position;) {
        const int64_t offset = key % size, count = MIN(MIN(size - offset, KEYS), position + 1 - key);
        const int64_t page = a->page_table[s * a->table_width + key / size];
        page_scores(a->q + row * dim, repeats, vectors(&a->kv, page, 0, g) + offset * dim, count, dim, a->scale, scores);
        for (int64_t r = 0; r < repeats; r++)
            take_page(
                scores + r * KEYS, vectors(&a->kv, page, 1, g) + offset * dim, count, dim, top + r, total + r,
                a->out + (row + r) * dim);
        key += count;
    }
    for (int64_t r = 0; r < repeats; r++)
        for (int64_t d = 0; d < dim; d++) a->out[(row + r) * dim + d] /= total[r];
}

static void attention_task(void *context, int64_t i) {
    const struct attention *a = context;
    const int64_t s = a->tasks[3 * i], first = a->tasks[3 * i + 1], g = a->tasks[3 * i + 2];
    const int64_t num_queries = a->query_starts[s + 1] - a->query_starts[s];
    for (int64_t query = first; query < MIN(first + QUERIES, num_queries); query++) attend(a, s, query, g);
}

/* q [T, Q, D] -> out [T, Q * D]. window 0: none. Returns -1 without memory. */
int oscine_attention(
    const float *q, float *pages, int64_t page_stride, int64_t kv_heads, int64_t page_size, int64_t head_dim,
    const int32_t *page_table, int64_t table_width, const int32_t *query_starts, const int32_t *context_lens,
    int64_t num_sequences, const float *sinks, int64_t query_heads, int64_t window, float *out) {
    int64_t most = 0, count = 0;
    for (int64_t s = 0; s < num_sequences; s++)
        most += (query_starts[s + 1] - query_starts[s] + QUERIES - 1) / QUERIES * kv_heads;
    int32_t *tasks = scratch(SCRATCH_ROWS, sizeof(int32_t) * 3 * most);
    if (!tasks) return -1;
    for (int64_t s = 0; s < num_sequences; s++)
        for (int32_t query = 0; query < query_starts[s + 1] - query_starts[s]; query += QUERIES)
            for (int64_t g = 0; g < kv_heads; g++, count++)
                tasks[3 * count] = s, tasks[3 * count + 1] = query, tasks[3 * count + 2] = g;
    struct attention a = {
        q, sinks, {pages, page_stride, kv_heads, page_size, head_dim}, page_table, query_starts, context_lens, tasks, out,
        query_heads, table_width, window, 1.0f / sqrtf((float)head_dim)};
    run_parallel(count, attention_task, &a);
    return 0;
}
