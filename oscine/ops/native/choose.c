/* The most probable token of each row, without its logits in memory. */
#include "oscine.h"

#define ROWS_PER_TASK 96
#define TOKENS 16 /* rows of x that meet a part of the head together */

struct greedy {
    const float *x, *head;
    float *best; /* [parts, N]: the largest logit of a part of the vocabulary */
    int64_t *ids;
    int64_t num_rows, vocabulary, width;
};

static void greedy_task(void *context, int64_t i) {
    const struct greedy *a = context;
    const int64_t first = i * ROWS_PER_TASK, count = MIN(ROWS_PER_TASK, a->vocabulary - first);
    float logits[TOKENS * ROWS_PER_TASK];
    for (int64_t n = 0; n < a->num_rows; n += TOKENS) {
        const int64_t rows = MIN(TOKENS, a->num_rows - n);
        linear_rows(a->x + n * a->width, a->head + first * a->width, NULL, logits, rows, a->width, count, 0, count);
        for (int64_t r = 0; r < rows; r++) {
            const float *row = logits + r * count;
            float best = -INFINITY;
            int64_t id = -1;
            for (int64_t v = 0; v < count; v++)
                if (!(row[v] <= best)) { /* NaN wins, and stays */
                    best = row[v], id = first + v;
                    if (isnan(best)) break;
                }
            a->best[i * a->num_rows + n + r] = best;
            a->ids[i * a->num_rows + n + r] = isnan(best) ? -1 : id;
        }
    }
}

/* x [N, H], head [V, H] of the tokens from `first` on -> values [N]: the largest logits; ids [N]: their tokens, -1 for a
 * row with NaN, or without a logit above -inf. -1 without memory. */
int oscine_greedy(
    const float *x, const float *head, float *values, int64_t *ids, int64_t first, int64_t num_rows, int64_t vocabulary,
    int64_t width) {
    const int64_t parts = (vocabulary + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
    struct greedy a = {x, head, scratch(SCRATCH_X, sizeof(float) * parts * num_rows), NULL, num_rows, vocabulary, width};
    a.ids = scratch(SCRATCH_Y, sizeof(int64_t) * parts * num_rows);
    if (!a.best || !a.ids) return -1;
    run_parallel(parts, greedy_task, &a);
    for (int64_t n = 0; n < num_rows; n++) {
        values[n] = -INFINITY;
        ids[n] = -1;
        for (int64_t i = 0; i < parts; i++) {
            const float found = a.best[i * num_rows + n];
            if (isnan(found)) {
                values[n] = found, ids[n] = -1;
                break;
            }
            if (found > values[n]) values[n] = found, ids[n] = first + a.ids[i * num_rows + n];
        }
    }
    return 0;
}
