/* The most probable token of each row, without its logits in memory. */
#include "oscine.h"

#define ROWS_PER_TASK 96

struct greedy {
    const float *x;
    const void *head;
    enum kind kind;
    struct quantized quantized; /* x, for a head in int8 */
    float *best; /* [parts, N]: the largest logit of a part of the vocabulary */
    int64_t *ids;
    int64_t num_rows, vocabulary, width;
};

/* Logits [rows, count] of the rows of a tile and `count` tokens from `first` on, a multiple of 8. */
static void part_of_logits(const struct greedy *a, struct tile rows, int64_t first, int64_t count, float *logits) {
    const char *head = a->head;
    if (a->kind != INT8) {
        const float *x = a->x + rows.first * a->width;
        head += first * a->width * size_of(a->kind);
        linear_rows(x, head, a->kind, NULL, logits, rows.count, a->width, count, 0, count);
        return;
    }
    head += first / 8 * a->quantized.num_blocks * INT8_BYTES;
    int8_rows(&a->quantized, rows, (const uint8_t *)head, NULL, logits, count, count, 0, (count + 7) / 8);
}

static void greedy_task(void *context, int64_t i) {
    const struct greedy *a = context;
    const int64_t first = i * ROWS_PER_TASK, count = MIN(ROWS_PER_TASK, a->vocabulary - first);
    float logits[TILE * ROWS_PER_TASK];
    for (int64_t n = 0; n < a->num_rows; n += TILE) {
        const struct tile rows = tile_of(n, 0, a->num_rows);
        part_of_logits(a, rows, first, count, logits);
        for (int64_t r = 0; r < rows.count; r++) {
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

/* x [N, H], head [V, H], of any kind, of the tokens from `first` on -> values [N]: the largest logits; ids [N]: their
 * tokens, -1 for a row with NaN, or without a logit above -inf. -1 without memory. */
int oscine_greedy(
    const float *x, const void *head, int64_t kind, float *values, int64_t *ids, int64_t first, int64_t num_rows,
    int64_t vocabulary, int64_t width) {
    const int64_t parts = (vocabulary + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
    struct greedy a = {.x = x, .head = head, .kind = kind, .num_rows = num_rows, .vocabulary = vocabulary, .width = width};
    a.best = scratch(SCRATCH_X, sizeof(float) * parts * num_rows);
    a.ids = scratch(SCRATCH_Y, sizeof(int64_t) * parts * num_rows);
    if (!a.best || !a.ids || (kind == INT8 && quantize_rows(x, num_rows, width, &a.quantized))) return -1;
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
