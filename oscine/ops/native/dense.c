/* Products with int8 dense weights, the default of projections and head on a CPU. Layout: products.c.

   The scale of a row's 32 columns is their largest magnitude / 127, rounded up to what bfloat16 holds. */
#include "oscine.h"

#define PRODUCTS_PER_TASK 65536

/* ---- packing ---- */

struct packing {
    const uint16_t *weights; /* bfloat16 [N, K] */
    uint8_t *out;
    int64_t num_rows, width, num_blocks;
};

/* Rounds up to bfloat16. */
static inline uint16_t bf16_above(float value) {
    const union { float value; uint32_t bits; } wide = {value};
    return (uint16_t)((wide.bits + 0xffff) >> 16);
}

static void pack_row(const struct packing *a, int64_t row, int64_t block, uint8_t *out) {
    const int64_t first = block * BLOCK, count = row < a->num_rows ? MIN(BLOCK, a->width - first) : 0;
    const uint16_t *weights = a->weights + row * a->width + first;
    float largest = 0.0f;
    for (int64_t k = 0; k < count; k++) {
        const float magnitude = fabsf(of_bf16(weights[k]));
        largest = isnan(largest) || magnitude <= largest ? largest : magnitude;
    }
    const int usable = largest >= 1e-35f && isfinite(largest); /* the inverse is finite, too */
    const uint16_t scale = usable ? bf16_above(largest / 127.0f) : isfinite(largest) ? 0 : 0x7fc0;
    memcpy(out + 2 * (row % 8), &scale, 2);
    const float inverse = usable ? 1.0f / of_bf16(scale) : 0.0f;
    for (int64_t k = 0; usable && k < count; k++)
        out[INT8_SCALES + k / 4 * BLOCK + 4 * (row % 8) + k % 4] = (uint8_t)(int8_t)rintf(of_bf16(weights[k]) * inverse);
}

static void pack_task(void *context, int64_t group) {
    const struct packing *a = context;
    memset(a->out + group * a->num_blocks * INT8_BYTES, 0, a->num_blocks * INT8_BYTES);
    for (int64_t b = 0; b < a->num_blocks; b++)
        for (int r = 0; r < 8; r++)
            pack_row(a, 8 * group + r, b, a->out + (group * a->num_blocks + b) * INT8_BYTES);
}

/* Bytes of packed weights [N, 32 B]. */
int64_t oscine_dense_bytes(int64_t num_rows, int64_t num_blocks) { return (num_rows + 7) / 8 * num_blocks * INT8_BYTES; }

/* weights: bfloat16 [N, K] */
void oscine_pack_dense(const uint16_t *weights, uint8_t *out, int64_t num_rows, int64_t width) {
    struct packing a = {weights, out, num_rows, width, (width + BLOCK - 1) / BLOCK};
    ask_for_large_pages(out, oscine_dense_bytes(num_rows, a.num_blocks));
    run_parallel((num_rows + 7) / 8, pack_task, &a);
}

/* ---- y = x W^T + b ---- */

struct dense {
    struct quantized x;
    const uint8_t *w;
    const float *bias;
    float *y;
    int64_t num_tokens, num_rows, groups_per_task;
};

void int8_rows(
    const struct quantized *x, struct tile tile, const uint8_t *w, const float *bias, float *y, int64_t stride_y,
    int64_t num_rows, int64_t first_group, int64_t last_group) {
    for (int64_t group = first_group; group < last_group; group += 2) {
        const int64_t groups = MIN(2, last_group - group);
        f8 out[2 * TILE];
        int8_products(w + group * x->num_blocks * INT8_BYTES, groups, x, tile, out);
        for (int64_t g = 0; g < groups; g++) {
            const int64_t row = 8 * (group + g), rows = MIN(LANES, num_rows - row);
            const f8 added = !bias ? all(0.0f) : rows == LANES ? load(bias + row) : load_some(bias + row, rows);
            for (int64_t n = 0; n < tile.count; n++) store_some(y + n * stride_y + row, out[n * groups + g] + added, rows);
        }
    }
}

static void dense_task(void *context, int64_t i) {
    const struct dense *a = context;
    const int64_t first = i * a->groups_per_task, last = MIN(first + a->groups_per_task, (a->num_rows + 7) / 8);
    for (int64_t t = 0; t < a->num_tokens; t += TILE)
        int8_rows(
            &a->x, tile_of(t, 0, a->num_tokens), a->w, a->bias, a->y + t * a->num_rows, a->num_rows, a->num_rows, first,
            last);
}

/* Groups of 8 rows per task: an even number. */
static int64_t groups_per_task(int64_t num_tokens, int64_t num_blocks) {
    const int64_t products = 16 * BLOCK * num_blocks * MAX(1, MIN(num_tokens, TILE) / 8);
    return 2 * MAX(1, PRODUCTS_PER_TASK / products);
}

int int8_linear(
    const float *x, const uint8_t *w, const float *bias, float *y, int64_t num_tokens, int64_t num_rows, int64_t width) {
    struct dense a = {.w = w, .bias = bias, .y = y, .num_tokens = num_tokens, .num_rows = num_rows};
    if (quantize_rows(x, num_tokens, width, &a.x)) return -1;
    a.groups_per_task = groups_per_task(num_tokens, a.x.num_blocks);
    run_parallel(((num_rows + 7) / 8 + a.groups_per_task - 1) / a.groups_per_task, dense_task, &a);
    return 0;
}

/* x [T, K], ids [T, A] of packed rows w -> out [T, A]: the same products, of some rows only. Returns -1 without memory. */
int oscine_int8_few(
    const float *x, const uint8_t *w, const int64_t *ids, float *out, int64_t num_tokens, int64_t num_ids, int64_t width) {
    const int64_t num_blocks = (width + BLOCK - 1) / BLOCK;
    void *memory = scratch(SCRATCH_BYTES, quantized_bytes(1, num_blocks));
    if (!memory) return -1;
    const struct quantized one = quantized_at(memory, 1, num_blocks);
    const struct tile tile = {0, 1};
    for (int64_t t = 0; t < num_tokens; t++) {
        quantize_row(x + t * width, width, &one, tile, 0);
        for (int64_t i = t * num_ids; i < (t + 1) * num_ids; i++) {
            f8 sums;
            int8_products(w + ids[i] / 8 * num_blocks * INT8_BYTES, 1, &one, tile, &sums);
            out[i] = sums[ids[i] % 8];
        }
    }
    return 0;
}
