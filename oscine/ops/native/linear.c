/* Products with dense weights in float32 or bfloat16, RMSNorm, and the ops made of them, such as the router. */
#include "oscine.h"

#define TOKENS 4 /* of a tile: 4 tokens x 3 rows of weights are 12 sums in registers */
#define ROWS 3
#define TOKENS_AT_ONCE 32 /* tokens that are multiplied by a row of weights while it is in the cache */
#define PRODUCTS_PER_TASK 16384

#define INLINE static inline __attribute__((always_inline))

/* Eight weights at an index. */
INLINE f8 weights8(const void *w, enum kind kind, int64_t at) {
    typedef uint16_t halves __attribute__((vector_size(16), aligned(2), may_alias));
    typedef uint32_t bits __attribute__((vector_size(32)));
    if (kind == FLOAT32) return load((const float *)w + at);
    return (f8)(__builtin_convertvector(*(const halves *)((const uint16_t *)w + at), bits) << 16);
}

/* The first `count` < LANES of them, then zeros. */
INLINE f8 some_weights(const void *w, enum kind kind, int64_t at, int64_t count) {
    float padded[LANES] = {0};
    memcpy(padded, (const char *)w + size_of(kind) * at, size_of(kind) * count);
    return weights8(padded, kind, 0);
}

/* Sums of a tile over the width; what is beyond the last token or row is not read, but the last ones again. */
INLINE void tile(
    const float *const x[TOKENS], const void *w, enum kind kind, const int64_t rows[ROWS], int64_t width,
    float out[TOKENS][ROWS]) {
    f8 sum[TOKENS][ROWS] = {0};
    int64_t k = 0;
    for (; k + LANES <= width; k += LANES) {
        const f8 w0 = weights8(w, kind, rows[0] + k), w1 = weights8(w, kind, rows[1] + k);
        const f8 w2 = weights8(w, kind, rows[2] + k);
#pragma GCC unroll 4
        for (int t = 0; t < TOKENS; t++) {
            const f8 a = load(x[t] + k);
            sum[t][0] += a * w0, sum[t][1] += a * w1, sum[t][2] += a * w2;
        }
    }
    for (int t = 0; t < TOKENS; t++)
        for (int r = 0; r < ROWS; r++) {
            if (k < width) sum[t][r] += load_some(x[t] + k, width - k) * some_weights(w, kind, rows[r] + k, width - k);
            out[t][r] = sum8(sum[t][r]);
        }
}

/* Sums of one token and eight rows from index `first` on. */
INLINE void column(const float *x, const void *w, enum kind kind, int64_t first, int64_t width, float out[LANES]) {
    f8 sum[LANES] = {0};
    int64_t k = 0;
    for (; k + LANES <= width; k += LANES) {
        const f8 a = load(x + k);
#pragma GCC unroll 8
        for (int r = 0; r < LANES; r++) sum[r] += a * weights8(w, kind, first + r * width + k);
    }
    for (int r = 0; k < width && r < LANES; r++)
        sum[r] += load_some(x + k, width - k) * some_weights(w, kind, first + r * width + k, width - k);
    store(out, sums8(sum));
}

INLINE void few_rows(
    const float *x, const void *w, enum kind kind, const float *bias, float *y, int64_t num_tokens, int64_t width,
    int64_t stride_y, int64_t first, int64_t last) {
    for (int64_t n = first; n < last; n += ROWS) {
        const float *tokens[TOKENS];
        int64_t rows[ROWS];
        for (int r = 0; r < ROWS; r++) rows[r] = MIN(n + r, last - 1) * width;
        for (int64_t t = 0; t < num_tokens; t += TOKENS) {
            float out[TOKENS][ROWS];
            for (int i = 0; i < TOKENS; i++) tokens[i] = x + MIN(t + i, num_tokens - 1) * width;
            tile(tokens, w, kind, rows, width, out);
            for (int i = 0; i < MIN(TOKENS, num_tokens - t); i++)
                for (int r = 0; r < MIN(ROWS, last - n); r++)
                    y[(t + i) * stride_y + n + r] = out[i][r] + (bias ? bias[n + r] : 0.0f);
        }
    }
}

INLINE void rows_of_kind(
    const float *x, const void *w, enum kind kind, const float *bias, float *y, int64_t num_tokens, int64_t width,
    int64_t stride_y, int64_t first, int64_t last) {
    if (num_tokens == 1) {
        for (; first + LANES <= last; first += LANES) {
            column(x, w, kind, first * width, width, y + first);
            if (bias) store(y + first, load(y + first) + load(bias + first));
        }
    }
    for (int64_t t = 0; t < num_tokens; t += TOKENS_AT_ONCE)
        few_rows(
            x + t * width, w, kind, bias, y + t * stride_y, MIN(TOKENS_AT_ONCE, num_tokens - t), width, stride_y, first,
            last);
}

void linear_rows(
    const float *x, const void *w, enum kind kind, const float *bias, float *y, int64_t num_tokens, int64_t width,
    int64_t stride_y, int64_t first, int64_t last) {
    if (kind == BFLOAT16)
        rows_of_kind(x, w, BFLOAT16, bias, y, num_tokens, width, stride_y, first, last);
    else
        rows_of_kind(x, w, FLOAT32, bias, y, num_tokens, width, stride_y, first, last);
}

struct linear {
    const float *x, *bias;
    const void *w;
    enum kind kind;
    float *y;
    int64_t num_tokens, num_rows, width, rows_per_task;
};

static void linear_task(void *context, int64_t i) {
    const struct linear *a = context;
    const int64_t first = i * a->rows_per_task, last = MIN(first + a->rows_per_task, a->num_rows);
    linear_rows(a->x, a->w, a->kind, a->bias, a->y, a->num_tokens, a->width, a->num_rows, first, last);
}

/* A multiple of LANES, so that few rows are computed apart. */
static int64_t rows_per_task(int64_t num_tokens, int64_t width) {
    const int64_t rows = PRODUCTS_PER_TASK / (MAX(1, MIN(num_tokens, 4)) * width) / 24 * 24;
    return MAX(rows, 24);
}

int oscine_linear(
    const float *x, const void *w, int64_t kind, const float *bias, float *y, int64_t num_tokens, int64_t num_rows,
    int64_t width) {
    if (kind == INT8) return int8_linear(x, w, bias, y, num_tokens, num_rows, width);
    struct linear a = {x, bias, w, kind, y, num_tokens, num_rows, width, rows_per_task(num_tokens, width)};
    run_parallel((num_rows + a.rows_per_task - 1) / a.rows_per_task, linear_task, &a);
    return 0;
}

/* ---- RMSNorm: y = s / sqrt(mean(s^2) + eps) * weight, s = sum of the parts of x + residual ---- */

struct norm {
    const float *x, *residual, *weight;
    float *y, *sum;
    int64_t num_parts, width;
    float eps;
};

static void norm_task(void *context, int64_t t) {
    const struct norm *a = context;
    float *sum = a->sum + t * a->width, *y = a->y + t * a->width;
    f8 squares = {0};
    float rest = 0.0f;
    for (int64_t j = 0; j < a->num_parts; j++) {
        const float *x = a->x + (t * a->num_parts + j) * a->width;
        const float *before = j ? sum : a->residual ? a->residual + t * a->width : NULL;
        for (int64_t k = 0; k < a->width; k++) sum[k] = x[k] + (before ? before[k] : 0.0f);
    }
    int64_t k = 0;
    for (; k + LANES <= a->width; k += LANES) squares += load(sum + k) * load(sum + k);
    for (; k < a->width; k++) rest += sum[k] * sum[k];
    const float scale = 1.0f / sqrtf((sum8(squares) + rest) / (float)a->width + a->eps);
    for (k = 0; k < a->width; k++) y[k] = sum[k] * scale * a->weight[k];
}

int oscine_rms_norm(
    const float *x, int64_t num_parts, const float *residual, const float *weight, float eps, float *y, float *sum,
    int64_t num_tokens, int64_t width) {
    struct norm a = {x, residual, weight, y, sum, num_parts, width, eps};
    for_each_row(num_tokens, width, norm_task, &a);
    return 0;
}

/* ---- router ---- */

/* The K largest of E logits, largest first, and the softmax over them. */
static void top_experts(float *logits, int64_t num_experts, int64_t top, int64_t *ids, float *weights) {
    float total = 0.0f;
    for (int64_t k = 0; k < top; k++) {
        int64_t best = 0;
        for (int64_t e = 1; e < num_experts; e++)
            if (logits[e] > logits[best]) best = e;
        ids[k] = best, weights[k] = logits[best];
        logits[best] = -INFINITY;
    }
    for (int64_t k = top - 1; k >= 0; k--) total += weights[k] = expf(weights[k] - weights[0]);
    for (int64_t k = 0; k < top; k++) weights[k] /= total;
}

/* As oscine_rms_norm; then router [E, H] and bias [E] -> ids, weights [T, K]. Returns -1 without memory. */
int oscine_norm_route(
    const float *x, int64_t num_parts, const float *residual, const float *weight, float eps, float *y, float *sum,
    int64_t num_tokens, int64_t width, const float *router, const float *bias, int64_t num_experts, int64_t top,
    int64_t *ids, float *weights) {
    float *logits = scratch(SCRATCH_ROWS, sizeof(float) * num_tokens * num_experts);
    if (!logits) return -1;
    oscine_rms_norm(x, num_parts, residual, weight, eps, y, sum, num_tokens, width);
    oscine_linear(y, router, FLOAT32, bias, logits, num_tokens, num_experts, width);
    for (int64_t t = 0; t < num_tokens; t++)
        top_experts(logits + t * num_experts, num_experts, top, ids + t * top, weights + t * top);
    return 0;
}
