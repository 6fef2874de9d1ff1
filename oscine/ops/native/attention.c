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

#define ROWS 40 /* most pairs of query and head that meet a key while it is in the cache */
#define KEYS 64 /* scores of a row before their maximum is taken */
#define INLINE static inline __attribute__((always_inline))

/* Pairs of query and head, for the heads of one key head. The queries are tokens of one sequence, one after the other; the
   heads of a query come first. */
struct task {
    int64_t table, key_head; /* row of the page tables */
    int64_t token, end;      /* the first query, and how many positions it attends to */
    int64_t first, count;    /* pairs, counted from the first query's */
};

struct attention {
    const float *q, *sinks;
    struct pages kv;
    const int32_t *page_table;
    const struct task *tasks;
    float *out;
    int64_t query_heads, table_width, window;
    float scale;
};

/* The rows of a task, and their running softmax. A row is a query and a head; the heads of a query come first. */
struct rows {
    int64_t count, begin[ROWS], end[ROWS]; /* positions that a row attends to */
    const float *q[ROWS];
    float *out[ROWS]; /* weighted sums of values */
    float top[ROWS], total[ROWS], shrink[ROWS], scores[ROWS][KEYS];
};

/* KEYS positions, which may be on several pages. Rows attend to some of the keys first .. last - 1; no other key is read. */
struct keys {
    const float *keys[KEYS], *values[KEYS];
    int64_t position, first, last;
};

/* Scores of two rows, which may be the same row, with four keys. */
INLINE void score(struct rows *rows, int64_t r, int64_t s, const float *const key[4], int64_t j, int64_t dim) {
    f8 sum[LANES] = {0};
    for (int64_t d = 0; d < dim; d += LANES) {
        f8 a = load(rows->q[r] + d), b = load(rows->q[s] + d);
        KEEP(a);
        KEEP(b);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            f8 c = load(key[i] + d);
            KEEP(c);
            sum[i] += a * c, sum[4 + i] += b * c;
        }
    }
    float both[LANES];
    store(both, sums8(sum));
    memcpy(rows->scores[r] + j, both, sizeof both / 2);
    memcpy(rows->scores[s] + j, both + 4, sizeof both / 2);
}

static void score_all(struct rows *rows, const struct keys *k, int64_t dim) {
    for (int64_t j = k->first / LANES * LANES; j < k->last; j += 4) {
        const float *key[4];
        for (int i = 0; i < 4; i++) key[i] = k->keys[MIN(MAX(j + i, k->first), k->last - 1)];
        for (int64_t i = j; i < MIN(j + 4, k->last); i++)
            for (int64_t d = 0; d < dim; d += 64 / sizeof(float)) __builtin_prefetch(k->values[MAX(i, k->first)] + d);
        for (int64_t r = 0; r < rows->count; r += 2) score(rows, r, MIN(r + 1, rows->count - 1), key, j, dim);
    }
}

/* Scores of a row -> weights of values, relative to the new maximum. */
static void weigh(struct rows *rows, int64_t r, const struct keys *k, float scale) {
    const int32_t begin = MAX(rows->begin[r] - k->position, k->first), end = MIN(rows->end[r] - k->position, k->last);
    const int64_t first = k->first / LANES * LANES;
    float *scores = rows->scores[r];
    rows->shrink[r] = 1.0f;
    if (begin >= end) {
        memset(scores, 0, sizeof rows->scores[r]);
        return;
    }
    f8 most = all(rows->top[r]), sum = {0};
    for (int64_t j = first; j < k->last; j += LANES) {
        const i8 at = (i8){0, 1, 2, 3, 4, 5, 6, 7} + (int32_t)j;
        const f8 masked = choose8((at >= begin) & (at < end), load(scores + j) * all(scale), all(-INFINITY));
        store(scores + j, masked);
        most = max8(most, masked);
    }
    const float highest = largest8(most);
    for (int64_t j = first; j < k->last; j += LANES) {
        const f8 weights = exp8(load(scores + j) - all(highest));
        store(scores + j, weights);
        sum += weights;
    }
    rows->shrink[r] = expf(rows->top[r] - highest);
    rows->total[r] = rows->total[r] * rows->shrink[r] + sum8(sum);
    rows->top[r] = highest;
}

/* Adds weighted values to dimensions d .. d + 8 * parts - 1 of two rows, which may be the same row. */
INLINE void add_values(struct rows *rows, int64_t r, int64_t s, const struct keys *k, int64_t d, int parts) {
    f8 a[4], b[4];
#pragma GCC unroll 4
    for (int i = 0; i < parts; i++) {
        a[i] = load(rows->out[r] + d + LANES * i) * all(rows->shrink[r]);
        b[i] = load(rows->out[s] + d + LANES * i) * all(rows->shrink[s]);
    }
    for (int64_t j = k->first; j < k->last; j++) {
        const f8 weight_a = all(rows->scores[r][j]), weight_b = all(rows->scores[s][j]);
#pragma GCC unroll 4
        for (int i = 0; i < parts; i++) {
            f8 value = load(k->values[j] + d + LANES * i);
            KEEP(value);
            a[i] += weight_a * value, b[i] += weight_b * value;
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < parts; i++) {
        store(rows->out[r] + d + LANES * i, a[i]);
        store(rows->out[s] + d + LANES * i, b[i]);
    }
}

static void take_keys(struct rows *rows, const struct keys *k, int64_t dim, float scale) {
    score_all(rows, k, dim);
    for (int64_t r = 0; r < rows->count; r++) weigh(rows, r, k, scale);
    for (int64_t r = 0; r < rows->count; r += 2) {
        int64_t d = 0, s = MIN(r + 1, rows->count - 1);
        for (; d + 4 * LANES <= dim; d += 4 * LANES) add_values(rows, r, s, k, d, 4);
        for (; d < dim; d += LANES) add_values(rows, r, s, k, d, 1);
    }
}

/* The positions begin .. end - 1 that row r attends to. */
static int64_t end_of(const struct attention *a, const struct task *task, int64_t r) {
    return task->end + (task->first + r) / (a->query_heads / a->kv.num_heads);
}

static int64_t begin_of(const struct attention *a, const struct task *task, int64_t r) {
    return a->window ? MAX(end_of(a, task, r) - a->window, 0) : 0;
}

static void begin_rows(const struct attention *a, const struct task *task, struct rows *rows) {
    const int64_t repeats = a->query_heads / a->kv.num_heads, dim = a->kv.head_dim;
    rows->count = task->count;
    for (int64_t r = 0; r < rows->count; r++) {
        const int64_t query = (task->first + r) / repeats, head = task->key_head * repeats + (task->first + r) % repeats;
        const int64_t at = ((task->token + query) * a->query_heads + head) * dim;
        rows->begin[r] = begin_of(a, task, r), rows->end[r] = end_of(a, task, r);
        rows->q[r] = a->q + at, rows->out[r] = a->out + at;
        rows->top[r] = a->sinks[head], rows->total[r] = 1.0f;
        memset(rows->out[r], 0, sizeof(float) * dim);
    }
}

/* Finds the keys k->first .. k->last - 1. */
static void find_keys(const struct attention *a, const struct task *task, struct keys *k) {
    const int32_t *pages = a->page_table + task->table * a->table_width;
    const int64_t size = a->kv.page_size, dim = a->kv.head_dim;
    for (int64_t j = k->first; j < k->last;) {
        const int64_t offset = (k->position + j) % size, page = pages[(k->position + j) / size];
        const float *key = vectors(&a->kv, page, 0, task->key_head), *value = vectors(&a->kv, page, 1, task->key_head);
        for (int64_t at = offset; at < size && j < k->last; at++, j++)
            k->keys[j] = key + at * dim, k->values[j] = value + at * dim;
    }
}

static void attention_task(void *context, int64_t i) {
    const struct attention *a = context;
    const int64_t dim = a->kv.head_dim;
    const struct task *task = a->tasks + i;
    struct rows rows;
    begin_rows(a, task, &rows);
    const int64_t begin = begin_of(a, task, 0), end = end_of(a, task, task->count - 1);
    for (int64_t position = begin / KEYS * KEYS; position < end; position += KEYS) {
        struct keys keys;
        keys.position = position, keys.first = MAX(begin - position, 0), keys.last = MIN(KEYS, end - position);
        find_keys(a, task, &keys);
        take_keys(&rows, &keys, dim, a->scale);
    }
    for (int64_t r = 0; r < rows.count; r++)
        for (int64_t d = 0; d < dim; d++) rows.out[r][d] /= rows.total[r];
}

/* The sequences of a batch, as their columns. */
struct sequences {
    const int32_t *page_table, *query_starts, *context_lens;
    int64_t count, table_width, page_size, window;
};

/* The end of the run of sequences from s on that are consecutive tokens of one sequence, such as drafts. The last one has
   the pages of all. */
static int64_t end_of_run(const struct sequences *a, int64_t s) {
    const int64_t first = s, first_page = (a->window ? MAX(a->context_lens[s] - a->window, 0) : 0) / a->page_size;
    for (s++; s < a->count && a->query_starts[s + 1] - a->query_starts[first] == s + 1 - first; s++) {
        const int64_t num_pages = (a->context_lens[s - 1] - 1) / a->page_size + 1 - first_page;
        const int32_t *pages = a->page_table + s * a->table_width + first_page;
        if (a->context_lens[s] != a->context_lens[s - 1] + 1) break;
        if (memcmp(pages - a->table_width, pages, sizeof(int32_t) * num_pages)) break;
    }
    return s;
}

/* q [T, Q, D] -> out [T, Q * D]. window 0: none. Returns -1 without memory. */
int oscine_attention(
    const float *q, float *pages, int64_t page_stride, int64_t kv_heads, int64_t page_size, int64_t head_dim,
    const int32_t *page_table, int64_t table_width, const int32_t *query_starts, const int32_t *context_lens,
    int64_t num_sequences, const float *sinks, int64_t query_heads, int64_t window, float *out) {
    const struct sequences all = {page_table, query_starts, context_lens, num_sequences, table_width, page_size, window};
    const int64_t repeats = query_heads / kv_heads;
    int64_t most = 0, count = 0;
    for (int64_t s = 0; s < num_sequences; s++)
        most += ((query_starts[s + 1] - query_starts[s]) * repeats + ROWS - 1) / ROWS * kv_heads;
    struct task *tasks = scratch(SCRATCH_ROWS, sizeof(struct task) * most);
    if (!tasks) return -1;
    for (int64_t s = 0, next; s < num_sequences; s = next) {
        next = end_of_run(&all, s);
        const int64_t first = query_starts[s], num_rows = (query_starts[next] - first) * repeats;
        const int64_t end = context_lens[next - 1] - (query_starts[next] - first) + 1;
        for (int64_t row = 0; row < num_rows; row += ROWS)
            for (int64_t g = 0; g < kv_heads; g++)
                tasks[count++] = (struct task){next - 1, g, first, end, row, MIN(ROWS, num_rows - row)};
    }
    struct attention a = {
        q, sinks, {pages, page_stride, kv_heads, page_size, head_dim}, page_table, tasks, out,
        query_heads, table_width, window, 1.0f / sqrtf((float)head_dim)};
    run_parallel(count, attention_task, &a);
    return 0;
}
