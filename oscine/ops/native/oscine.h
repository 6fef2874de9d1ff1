/* What all kernels for CPUs share: vectors of eight floats, the threads, and scratch memory.

   Compiled for the machine that runs them, so __AVX2__ and its like say what that machine has. Matrices are row-major.
   Shape suffixes as in ops/interface.py. */
#ifndef OSCINE_H
#define OSCINE_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef float f8_unaligned __attribute__((vector_size(32), aligned(4), may_alias));

#define LANES 8
/* The compiler takes the value for unknown, and keeps it in a register. */
#if defined(__AVX512VL__)
#define KEEP(value) __asm__("" : "+v"(value))
#elif defined(__AVX2__)
#define KEEP(value) __asm__("" : "+x"(value))
#else
#define KEEP(value)
#endif
#define REJECTED (-2) /* as in ops/packed.py */
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

static inline f8 load(const float *from) { return *(const f8_unaligned *)from; }
static inline void store(float *to, f8 value) { *(f8_unaligned *)to = value; }
/* The first `count` < LANES floats, then zeros. */
static inline f8 load_some(const float *from, int64_t count) {
    float padded[LANES] = {0};
    memcpy(padded, from, sizeof(float) * count);
    return load(padded);
}
/* The first `count` <= LANES floats. */
static inline void store_some(float *to, f8 values, int64_t count) {
    if (count == LANES)
        store(to, values);
    else
        memcpy(to, &values, sizeof(float) * count);
}
static inline f8 all(float value) { return (f8){value, value, value, value, value, value, value, value}; }
/* The maximum and the minimum are b if either is NaN. */
#if defined(__AVX2__)
static inline f8 choose8(i8 mask, f8 yes, f8 no) { return (f8)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)mask); }
static inline f8 max8(f8 a, f8 b) { return (f8)_mm256_max_ps((__m256)a, (__m256)b); }
static inline f8 min8(f8 a, f8 b) { return (f8)_mm256_min_ps((__m256)a, (__m256)b); }
#else
static inline f8 choose8(i8 mask, f8 yes, f8 no) { return (f8)((mask & (i8)yes) | (~mask & (i8)no)); }
static inline f8 max8(f8 a, f8 b) { return choose8(a > b, a, b); }
static inline f8 min8(f8 a, f8 b) { return choose8(a < b, a, b); }
#endif

static inline float of_bf16(uint16_t bits) {
    const union { uint32_t bits; float value; } wide = {(uint32_t)bits << 16};
    return wide.value;
}

/* In the order of sums8, so that a token's results do not depend on how many others are computed with it. */
static inline float sum8(f8 v) {
    v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
    v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
    return v[0] + v[4];
}

static inline float largest8(f8 v) {
    v = max8(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
    v = max8(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
    return MAX(v[0], v[1]);
}

/* The sums of eight vectors, one per lane. */
static inline f8 sums8(const f8 *v) {
#define PAIRS(a, b) \
    (__builtin_shufflevector(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + __builtin_shufflevector(a, b, 1, 3, 9, 11, 5, 7, 13, 15))
    const f8 low = PAIRS(PAIRS(v[0], v[1]), PAIRS(v[2], v[3])), high = PAIRS(PAIRS(v[4], v[5]), PAIRS(v[6], v[7]));
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 8, 9, 10, 11) +
           __builtin_shufflevector(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
#undef PAIRS
}

/* e^x, to 2 units in the last place; 0 below -87. Cephes' polynomial on [-ln 2 / 2, ln 2 / 2], times a power of two. */
static inline f8 exp8(f8 x) {
    const i8 small = x < all(-87.0f);
    x = min8(max8(x, all(-87.0f)), all(88.0f));
    const f8 shifted = x * all(1.44269504f) + all(12582912.0f); /* 1.5 * 2^23: rounds to an integer */
    const f8 n = shifted - all(12582912.0f);
    const f8 r = (x - n * all(0.693359375f)) + n * all(2.12194440e-4f);
    f8 y = all(1.9875691500e-4f);
    y = y * r + all(1.3981999507e-3f);
    y = y * r + all(8.3334519073e-3f);
    y = y * r + all(4.1665795894e-2f);
    y = y * r + all(1.6666665459e-1f);
    y = y * r + all(5.0000001201e-1f);
    y = y * r * r + r + all(1.0f);
    const i8 power = ((i8)shifted << 23) + (i8)all(1.0f);
    return choose8(small, all(0.0f), y * (f8)power);
}

/* Runs task(context, i) for i = 0 .. count - 1, in any order, on all threads; returns when all are done. */
typedef void (*Task)(void *context, int64_t i);
void run_parallel(int64_t count, Task task, void *context);
/* The same for tasks that pass over a row of floats: on this thread alone while that takes less time than asking another. */
static inline void for_each_row(int64_t count, int64_t width, Task task, void *context) {
    if (count * width >= 16384)
        run_parallel(count, task, context);
    else
        for (int64_t i = 0; i < count; i++) task(context, i);
}

/* Memory of this thread until it asks for the same slot again, aligned to 64 bytes. NULL if there is none. */
enum { SCRATCH_X, SCRATCH_Y, SCRATCH_ROWS, SCRATCH_SCORES, SCRATCH_BYTES, SCRATCH_SLOTS };
void *scratch(int slot, size_t bytes);
/* A step reads megabytes at many addresses, which is 10 % faster with pages of 2 MiB. */
void ask_for_large_pages(void *memory, size_t bytes);

/* ---- packed weights and activations in int8 (products.c) ---- */

#define BLOCK 32 /* columns that share a scale, of weights and of activations */
#define TILE 64  /* most rows of activations in a tile: what meets all weights of a task, which stay in the cache */
#define MXFP4_SCALES 8
#define MXFP4_BYTES (MXFP4_SCALES + 4 * BLOCK) /* of 8 rows x 32 columns */
#define INT8_SCALES 16
#define INT8_BYTES (INT8_SCALES + 8 * BLOCK)

/* Rows of B blocks: value = scale * integer of -127 .. 127. An offset, for x86, is the sum of a block's integers. Without
   VNNI it is two integers of 16 bits: -12 times the sum of columns 4j and 4j + 1, and that of columns 4j + 2 and 4j + 3. A
   block with a value that is not finite has the scale NaN. Rows are stored in tiles: the first block of all rows of a tile,
   then the second block of all rows, and so on. */
struct quantized {
    int8_t *values;
    float *scales;
    int32_t *offsets;
    int64_t num_blocks;
};
struct tile {
    int64_t first, count;
};
size_t quantized_bytes(int64_t rows, int64_t num_blocks);
struct quantized quantized_at(void *memory, int64_t rows, int64_t num_blocks);
/* The tile of a row among rows begin .. end - 1. A tile begins at `begin`. */
struct tile tile_of(int64_t row, int64_t begin, int64_t end);
/* Quantises one row x [K] into its tile; columns beyond K become zeros. */
void quantize_row(const float *x, int64_t width, const struct quantized *to, struct tile tile, int64_t row);
/* Copies a quantised row to another row of the same matrix. */
void copy_row(const struct quantized *x, struct tile from_tile, int64_t from, struct tile to_tile, int64_t to);
/* Quantises the rows of x [N, K] on all threads, into SCRATCH_BYTES. Returns -1 if memory runs out. */
int quantize_rows(const float *x, int64_t num_rows, int64_t width, struct quantized *to);

/* Products of one or two consecutive groups of 8 rows of weights with a tile: out[n * groups + g], a lane per row. */
void mxfp4_products(const uint8_t *w, int64_t groups, const struct quantized *x, struct tile tile, f8 *out);
void int8_products(const uint8_t *w, int64_t groups, const struct quantized *x, struct tile tile, f8 *out);

/* ---- the screen of the head (screen.c) ---- */

#define SCREENED 2 /* most rows of activations: with more, arithmetic takes longer than reading int8 */

/* What the bounds of all logits need of the activations: two numbers of each block of each row, in the order of blocks.
   Returns 0 if activations are not finite or too large, else 1. */
size_t screen_terms_bytes(const struct quantized *x, int64_t num_rows);
int screen_terms(const struct quantized *x, int64_t num_rows, const float *dither, float *terms);
/* Logits of a group of 8 rows of the screen for each row of activations, and how far from the exact ones they may be. */
void screen_logits(
    const uint8_t *w, const struct quantized *x, int64_t num_rows, const float *terms, f8 *logits, f8 *bounds);
/* The same, with the squares of the standard deviations of the errors (products.c). */
void screen_products(
    const uint8_t *w, const struct quantized *x, int64_t num_rows, const float *terms, f8 *logits, f8 *squares);

/* ---- dense products ---- */

enum kind { FLOAT32, INT8, BFLOAT16, MXFP4, INT4 }; /* of weights; the first three are listed in ops/native/weights.py, too */
static inline size_t size_of(enum kind kind) { return kind == BFLOAT16 ? 2 : 4; }

/* y[t, n] = x[t] . w[n] + bias[n] for rows first .. last - 1 of w [N, K], FLOAT32 or BFLOAT16; bias may be NULL. */
void linear_rows(
    const float *x, const void *w, enum kind kind, const float *bias, float *y, int64_t num_tokens, int64_t width,
    int64_t stride_y, int64_t first, int64_t last);
/* The same for a tile, whose first row is y, and groups of packed rows. */
void int8_rows(
    const struct quantized *x, struct tile tile, const uint8_t *w, const float *bias, float *y, int64_t stride_y,
    int64_t num_rows, int64_t first_group, int64_t last_group);
/* The same for all N rows, on all threads, and weights of any of the first three kinds; y is [T, N]. Returns -1 without
   memory. */
int oscine_linear(
    const float *x, const void *w, int64_t kind, const float *bias, float *y, int64_t num_tokens, int64_t num_rows,
    int64_t width);
int int8_linear(
    const float *x, const uint8_t *w, const float *bias, float *y, int64_t num_tokens, int64_t num_rows, int64_t width);

/* The sum of the parts of x [T, J, H] and of residual [T, H], which may be NULL, and its RMSNorm. Returns 0. */
int oscine_rms_norm(
    const float *x, int64_t num_parts, const float *residual, const float *weight, float eps, float *y, float *sum,
    int64_t num_tokens, int64_t width);

/* The experts of one layer: x [T, H], ids and weights [T, K] -> out [T, H]. Returns -1 without memory.
   added [T * K, 2I], by pair t * K + k, is added to the first product; kept [T * K, I] gets its activations. Both may be
   NULL. */
int oscine_moe(
    const float *x, const int64_t *ids, const float *weights, const uint8_t *gate_up, const float *gate_up_bias,
    const uint8_t *down, const float *down_bias, float *out, int64_t num_tokens, int64_t width, int64_t inner,
    int64_t width_blocks, int64_t inner_blocks, int64_t num_experts, int64_t per_token, float limit, const float *added,
    float *kept);

#endif
