/* A screen of the head: 4 bits of each weight say which tokens may be the best; the logits of these are computed from the
   head in int8. docs/decisions/0057-a-screen-of-the-head-on-cpus.md.

   Each column has a number from 0 to 1, drawn once: the dither. It is added to the weights, in units of the scale, before
   they are rounded down to int4. So a weight is scale * (integer + 1/2 - dither + error), and the errors are uniform from
   -1/2 to 1/2 and independent from column to column, whatever the weights are. A logit is then known up to BOUND standard
   deviations of the sum of errors:

       sum over blocks b of s_b x_b (integers)  +  sum of s_b shift_b  +-  BOUND sqrt(sum of s_b^2 squares_b)

   where s_b is the row's scale of 32 columns, shift_b is x . (1/2 - dither) over these, and squares_b is x . x / 12. */
#include "oscine.h"

#define BOUND (7.0f * 1.001f) /* standard deviations, and what rounding adds */
#define MOST 7                /* largest magnitude of a weight in units of its scale: with the dither it still fits int4 */
#define ROWS_PER_GROUP 8
/* Squares of products of scales must neither be 0 nor infinite. Smaller scales count as the least ones. */
#define LEAST_SCALE 0x1p-26f
#define MOST_SCALE 0x1p26f

/* ---- packing ---- */

struct screen_packing {
    const uint8_t *head;
    const float *dither; /* of 32 columns of each block */
    uint8_t *out;
    int64_t num_blocks;
    _Atomic int failed;
};

static inline float of_exponent(int32_t exponent) {
    return ((union { int32_t bits; float value; }){exponent << 23}).value;
}

static inline int32_t bits_of(float value) { return ((union { float value; int32_t bits; }){value}).bits; }

/* A block of 8 rows. Returns whether its weights are finite, and not too large. */
static int screen_block(const uint8_t *in, const float *dither, uint8_t *out) {
    const int8_t *values = (const int8_t *)in + INT8_SCALES;
    int32_t most[BLOCK] = {0};
    float factors[BLOCK], dithers[BLOCK];
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < BLOCK; i++) most[i] = MAX(most[i], abs(values[BLOCK * j + i]));
    for (int r = 0; r < ROWS_PER_GROUP; r++) {
        uint16_t half;
        memcpy(&half, in + 2 * r, 2);
        const float scale = of_bf16(half);
        const int32_t largest = MAX(MAX(most[4 * r], most[4 * r + 1]), MAX(most[4 * r + 2], most[4 * r + 3]));
        const float least = (float)largest * scale / MOST;
        if (!(least <= MOST_SCALE)) return 0;
        /* Of the next power of two, with the bias of float32. */
        const int32_t exponent = (bits_of(MAX(least, LEAST_SCALE)) + 0x7fffff) >> 23;
        out[r] = (uint8_t)(exponent + 1);
        for (int c = 0; c < 4; c++) factors[4 * r + c] = scale / of_exponent(exponent);
    }
    for (int j = 0; j < 8; j++) {
        uint8_t codes[BLOCK], *to = out + MXFP4_SCALES + BLOCK * (j / 2);
        for (int i = 0; i < BLOCK; i++) dithers[i] = dither[4 * j + i % 4] + 8.0f;
        for (int i = 0; i < BLOCK; i++) codes[i] = (uint8_t)((float)values[BLOCK * j + i] * factors[i] + dithers[i]);
        for (int i = 0; i < BLOCK; i++) to[i] = j % 2 ? to[i] | (uint8_t)(codes[i] << 4) : codes[i];
    }
    return 1;
}

static void screen_task(void *context, int64_t group) {
    struct screen_packing *a = context;
    for (int64_t b = 0; b < a->num_blocks; b++) {
        const int64_t at = group * a->num_blocks + b;
        if (!screen_block(a->head + at * INT8_BYTES, a->dither + b * BLOCK, a->out + at * MXFP4_BYTES)) a->failed = 1;
    }
}

/* head: packed int8 [N, 32 B]. dither [32 B]. out: as packed MXFP4 [N, 32 B]. Returns REJECTED if a weight is not finite or
   too large. */
int oscine_screen(const uint8_t *head, const float *dither, uint8_t *out, int64_t num_rows, int64_t num_blocks) {
    struct screen_packing a = {head, dither, out, num_blocks, 0};
    ask_for_large_pages(out, (num_rows + 7) / 8 * num_blocks * MXFP4_BYTES);
    run_parallel((num_rows + 7) / 8, screen_task, &a);
    return a.failed ? REJECTED : 0;
}

/* ---- bounds of logits ---- */

size_t screen_terms_bytes(const struct quantized *x, int64_t num_rows) {
    return 2 * sizeof(float) * num_rows * x->num_blocks;
}

int screen_terms(const struct quantized *x, int64_t num_rows, const float *dither, float *terms) {
    int usable = 1;
    for (int64_t n = 0; n < num_rows; n++)
        for (int64_t b = 0; b < x->num_blocks; b++) {
            const int64_t place = b * num_rows + n;
            const int8_t *values = x->values + place * BLOCK;
            float shift = 0.0f;
            int32_t squares = 0;
            for (int k = 0; k < BLOCK; k++) {
                shift += (float)values[k] * (0.5f - dither[b * BLOCK + k]);
                squares += (int32_t)values[k] * values[k];
            }
            const float scale = x->scales[place], bounded = MAX(scale, LEAST_SCALE);
            usable &= scale <= MOST_SCALE;
            terms[2 * place] = scale * shift;
            terms[2 * place + 1] = bounded * bounded * (float)squares / 12.0f;
        }
    return usable;
}

void screen_logits(
    const uint8_t *w, const struct quantized *x, int64_t num_rows, const float *terms, f8 *logits, f8 *bounds) {
    screen_products(w, x, num_rows, terms, logits, bounds);
    for (int64_t n = 0; n < num_rows; n++)
        for (int r = 0; r < LANES; r++) bounds[n][r] = BOUND * sqrtf(bounds[n][r]);
}
