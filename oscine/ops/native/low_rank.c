/* The products of low-rank adapters (extensions/adapters/products.py): each row by the factors of its key. A row whose key
   is below 0 has none. */
#include "oscine.h"

#define ROWS_PER_TASK 64 /* of factors: with few columns, as the second product has, a task is still worth a thread */

struct low_rank {
    const float *x;
    const int32_t *keys; /* [P] */
    const char *factors; /* [slots, E, N, K], `slot_stride` elements from a slot to the next; key = slot * E + expert */
    enum kind kind;
    int64_t experts, slot_stride;
    float *out;
    int64_t per_row; /* rows p that read one row of x */
    int64_t num_rows, width, tasks;
    /* Of the second product. */
    const int64_t *ends; /* of parts of N; part i reads columns i K .. (i + 1) K - 1 of x */
    int64_t num_parts, stride;
    int adds;
};

static const void *factors_of(const struct low_rank *a, int64_t key) {
    const int64_t at = key / a->experts * a->slot_stride + key % a->experts * a->num_rows * a->width;
    return a->factors + at * size_of(a->kind);
}

static void in_task(void *context, int64_t i) {
    const struct low_rank *a = context;
    const int64_t p = i / a->tasks, first = i % a->tasks * LANES, last = MIN(first + LANES, a->num_rows);
    float *y = a->out + p * a->num_rows;
    if (a->keys[p] < 0)
        memset(y + first, 0, (last - first) * sizeof(float));
    else
        linear_rows(
            a->x + p / a->per_row * a->width, factors_of(a, a->keys[p]), a->kind, NULL, y, 1, a->width, a->num_rows, first,
            last);
}

static void out_task(void *context, int64_t i) {
    const struct low_rank *a = context;
    const int64_t p = i / a->tasks, begin = i % a->tasks * ROWS_PER_TASK, end = MIN(begin + ROWS_PER_TASK, a->num_rows);
    float *out = a->out + p * a->stride, sums[ROWS_PER_TASK];
    if (a->keys[p] < 0) {
        if (!a->adds) memset(out + begin, 0, (end - begin) * sizeof(float));
        return;
    }
    const char *factors = factors_of(a, a->keys[p]);
    for (int64_t part = 0, first = begin; part < a->num_parts; part++) {
        const int64_t last = MIN(end, a->ends[part]);
        if (first >= last) continue;
        const float *x = a->x + (p * a->num_parts + part) * a->width;
        linear_rows(x, factors + first * a->width * size_of(a->kind), a->kind, NULL, sums, 1, a->width, 0, 0, last - first);
        for (int64_t n = first; n < last; n++) out[n] = sums[n - first] + (a->adds ? out[n] : 0.0f);
        first = last;
    }
}

/* y[p] = factors[keys[p]] x[p / per_row]. x [P / per_row, K]; y [P, N]. */
int oscine_low_rank_in(
    const float *x, const int32_t *keys, const void *factors, int64_t kind, int64_t experts, int64_t slot_stride, float *y,
    int64_t num_pairs, int64_t per_row, int64_t num_rows, int64_t width) {
    struct low_rank a = {
        .x = x, .keys = keys, .factors = factors, .kind = kind, .experts = experts, .slot_stride = slot_stride, .out = y,
        .per_row = per_row, .num_rows = num_rows, .width = width, .tasks = (num_rows + LANES - 1) / LANES,
    };
    for_each_row(num_pairs * a.tasks, LANES * width, in_task, &a);
    return 0;
}

/* out[p, n] (+)= factors[keys[p]][n] y[p, part of n]. y [P, parts, K]; out: rows of `stride` floats. ends: of the parts, in
   N. */
int oscine_low_rank_out(
    const float *y, const int32_t *keys, const void *factors, int64_t kind, int64_t experts, int64_t slot_stride,
    const int64_t *ends, float *out, int64_t num_pairs, int64_t num_parts, int64_t num_rows, int64_t width, int64_t stride,
    int64_t adds) {
    struct low_rank a = {
        .x = y, .keys = keys, .factors = factors, .kind = kind, .experts = experts, .slot_stride = slot_stride, .out = out,
        .per_row = 1, .num_rows = num_rows, .width = width, .tasks = (num_rows + ROWS_PER_TASK - 1) / ROWS_PER_TASK,
        .ends = ends, .num_parts = num_parts, .stride = stride, .adds = adds != 0,
    };
    for_each_row(num_pairs * a.tasks, ROWS_PER_TASK * width, out_task, &a);
    return 0;
}
