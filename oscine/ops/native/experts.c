/* The mixture of experts with MXFP4 weights and activations in int8. Definition: ops/moe/reference.py.

   Weights are repacked once into groups of 8 rows x 32 columns: 8 scales (E8M0), then 4 vectors of 32 bytes. Byte i of
   vector p has row i / 4; its low nibble is column 8p + i % 4, its high nibble column 8p + 4 + i % 4. So a table look-up
   gives, for four columns, the operands of a dot product whose lanes are the rows. The layout is for AVX2, AVX-VNNI,
   AVX-512 and NEON alike. It follows what ik_llama.cpp does (MXFP4_R8, pull requests 683 and 757).

   Activations are quantised in blocks of 32 with one scale each. A nibble's value doubled is an integer, -12 .. 12. On
   x86 it is shifted by 12, because one operand of the product must be unsigned; 12 times the sum of the block is
   subtracted afterwards. */
#include "oscine.h"

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#define BLOCK 32
#define GROUP_BYTES (8 + 4 * BLOCK)
#define TOGETHER 4 /* tokens that one unpacked block meets */
#define PRODUCTS_PER_TASK 131072
#define SHIFT 12

/* ---- packing ---- */

struct packing {
    const uint8_t *blocks, *scales;
    uint8_t *out;
    int64_t num_rows, num_blocks, num_groups;
};

static void pack_task(void *context, int64_t i) {
    const struct packing *a = context;
    const int64_t expert = i / a->num_groups, group = i % a->num_groups;
    for (int64_t b = 0; b < a->num_blocks; b++) {
        uint8_t *out = a->out + (i * a->num_blocks + b) * GROUP_BYTES;
        memset(out, 0, GROUP_BYTES);
        for (int r = 0; r < MIN(8, a->num_rows - 8 * group); r++) {
            const int64_t at = (expert * a->num_rows + 8 * group + r) * a->num_blocks + b;
            const uint8_t *block = a->blocks + at * (BLOCK / 2);
            out[r] = a->scales[at];
            for (int column = 0; column < BLOCK; column++) {
                const int nibble = block[column / 2] >> (column % 2 * 4) & 15;
                out[8 + column / 8 * 32 + 4 * r + column % 4] |= nibble << (column % 8 / 4 * 4);
            }
        }
    }
}

/* Bytes of one matrix [N, 32 B] when it is packed. */
int64_t oscine_packed_bytes(int64_t num_rows, int64_t num_blocks) { return (num_rows + 7) / 8 * num_blocks * GROUP_BYTES; }

/* blocks [E, N, B, 16], scales [E, N, B] as published */
void oscine_pack(
    const uint8_t *blocks, const uint8_t *scales, uint8_t *out, int64_t num_experts, int64_t num_rows,
    int64_t num_blocks) {
    struct packing a = {blocks, scales, out, num_rows, num_blocks, (num_rows + 7) / 8};
    run_parallel(num_experts * a.num_groups, pack_task, &a);
}

/* ---- activations ---- */

/* Rows of B blocks: values, half of the scale of each block, and SHIFT times its sum of values. */
struct quantized {
    int8_t *values;
    float *scales;
    int32_t *offsets;
    int64_t num_blocks;
};

static size_t quantized_bytes(int64_t rows, int64_t num_blocks) {
    return rows * num_blocks * (BLOCK + sizeof(float) + sizeof(int32_t));
}

static struct quantized quantized_at(void *memory, int64_t rows, int64_t num_blocks) {
    struct quantized q = {memory, (float *)((int8_t *)memory + rows * num_blocks * BLOCK), NULL, num_blocks};
    q.offsets = (int32_t *)(q.scales + rows * num_blocks);
    return q;
}

static void quantize_block(const float *x, int64_t width, const struct quantized *to, int64_t block) {
    float padded[BLOCK];
    if (width < BLOCK) {
        memset(padded, 0, sizeof padded);
        memcpy(padded, x, sizeof(float) * MAX(width, 0));
        x = padded;
    }
    f8 most = {0};
    for (int k = 0; k < BLOCK; k += LANES) most = max8(most, max8(load(x + k), -load(x + k)));
    float largest = 0.0f;
    for (int i = 0; i < LANES; i++) largest = MAX(largest, most[i]);
    const float scale = largest / 127.0f, inverse = largest > 0.0f ? 127.0f / largest : 0.0f;
    int32_t sum = 0;
    for (int k = 0; k < BLOCK; k++) {
        const int32_t value = (int32_t)lrintf(x[k] * inverse);
        to->values[block * BLOCK + k] = (int8_t)value;
        sum += value;
    }
    to->scales[block] = 0.5f * scale;
    to->offsets[block] = SHIFT * sum;
}

static void quantize_row(const float *x, int64_t width, const struct quantized *to, int64_t row) {
    for (int64_t b = 0; b < to->num_blocks; b++)
        quantize_block(x + b * BLOCK, MIN(width - b * BLOCK, BLOCK), to, row * to->num_blocks + b);
}

/* ---- products: 8 rows of weights with up to TOGETHER rows of activations ---- */

#if defined(__AVX2__)

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define DOT(sum, w, x) _mm256_dpbusd_epi32(sum, w, x)
#elif defined(__AVXVNNI__)
#define DOT(sum, w, x) _mm256_dpbusd_avx_epi32(sum, w, x)
#endif

static inline f8 dots8(const __m256i w[8], const int8_t *x, int32_t offset) {
#define FOUR(j) _mm256_set1_epi32(*(const int32_t *)(x + 4 * (j)))
#ifdef DOT
    __m256i sum = DOT(_mm256_setzero_si256(), w[0], FOUR(0));
    for (int j = 1; j < 8; j++) sum = DOT(sum, w[j], FOUR(j));
#else
    /* Sums of pairs are at most 2 * 24 * 127 = 6096, so five of them fit 16 bits. */
    __m256i low = _mm256_maddubs_epi16(w[0], FOUR(0)), high = _mm256_maddubs_epi16(w[4], FOUR(4));
    for (int j = 1; j < 4; j++) {
        low = _mm256_add_epi16(low, _mm256_maddubs_epi16(w[j], FOUR(j)));
        high = _mm256_add_epi16(high, _mm256_maddubs_epi16(w[4 + j], FOUR(4 + j)));
    }
    const __m256i ones = _mm256_set1_epi16(1);
    const __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(low, ones), _mm256_madd_epi16(high, ones));
#endif
#undef FOUR
    return (f8)_mm256_cvtepi32_ps(_mm256_sub_epi32(sum, _mm256_set1_epi32(offset)));
}

static inline __attribute__((always_inline)) void rows8(
    const uint8_t *w, const struct quantized *x, const int64_t *rows, int num_rows, f8 *out) {
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m256i values = _mm256_setr_epi8(
        12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0, 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4,
        0);
    for (int m = 0; m < num_rows; m++) out[m] = all(0.0f);
    for (int64_t b = 0; b < x->num_blocks; b++, w += GROUP_BYTES) {
        const f8 scale = (f8)_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)w)), 23);
        __m256i unpacked[8];
#pragma GCC unroll 4
        for (int p = 0; p < 4; p++) {
            const __m256i packed = _mm256_loadu_si256((const __m256i *)(w + 8 + BLOCK * p));
            unpacked[2 * p] = _mm256_shuffle_epi8(values, _mm256_and_si256(packed, nibble));
            unpacked[2 * p + 1] = _mm256_shuffle_epi8(values, _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble));
        }
#pragma GCC unroll 4
        for (int m = 0; m < num_rows; m++) {
            const int64_t block = rows[m] * x->num_blocks + b;
            out[m] += scale * all(x->scales[block]) * dots8(unpacked, x->values + block * BLOCK, x->offsets[block]);
        }
    }
}

#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)

static inline __attribute__((always_inline)) void rows8(
    const uint8_t *w, const struct quantized *x, const int64_t *rows, int num_rows, f8 *out) {
    static const int8_t table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const int8x16_t values = vld1q_s8(table);
    for (int m = 0; m < num_rows; m++) out[m] = all(0.0f);
    for (int64_t b = 0; b < x->num_blocks; b++, w += GROUP_BYTES) {
        const uint16x8_t exponents = vmovl_u8(vld1_u8(w));
        const float32x4_t scale_low = vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(exponents)), 23));
        const float32x4_t scale_high = vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_high_u16(exponents)), 23));
        int8x16_t unpacked[8][2]; /* of four columns: rows 0-3, rows 4-7 */
        for (int p = 0; p < 4; p++)
            for (int half = 0; half < 2; half++) {
                const uint8x16_t packed = vld1q_u8(w + 8 + BLOCK * p + 16 * half);
                unpacked[2 * p][half] = vqtbl1q_s8(values, vandq_u8(packed, vdupq_n_u8(15)));
                unpacked[2 * p + 1][half] = vqtbl1q_s8(values, vshrq_n_u8(packed, 4));
            }
        for (int m = 0; m < num_rows; m++) {
            const int64_t block = rows[m] * x->num_blocks + b;
            const int8_t *from = x->values + block * BLOCK;
            int32x4_t low = vdupq_n_s32(0), high = vdupq_n_s32(0);
            for (int j = 0; j < 8; j++) {
                int32_t four;
                memcpy(&four, from + 4 * j, 4);
                const int8x16_t a = vreinterpretq_s8_s32(vdupq_n_s32(four));
                low = vdotq_s32(low, unpacked[j][0], a), high = vdotq_s32(high, unpacked[j][1], a);
            }
            float products[8];
            vst1q_f32(products, vmulq_f32(vcvtq_f32_s32(low), scale_low));
            vst1q_f32(products + 4, vmulq_f32(vcvtq_f32_s32(high), scale_high));
            out[m] += load(products) * all(x->scales[block]);
        }
    }
}

#else

static void rows8(const uint8_t *w, const struct quantized *x, const int64_t *rows, int num_rows, f8 *out) {
    static const int8_t table[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    for (int m = 0; m < num_rows; m++) out[m] = all(0.0f);
    for (int64_t b = 0; b < x->num_blocks; b++, w += GROUP_BYTES)
        for (int r = 0; r < 8; r++) {
            const union { uint32_t bits; float value; } scale = {(uint32_t)w[r] << 23};
            for (int m = 0; m < num_rows; m++) {
                const int64_t block = rows[m] * x->num_blocks + b;
                int32_t sum = 0;
                for (int column = 0; column < BLOCK; column++) {
                    const uint8_t packed = w[8 + column / 8 * 32 + 4 * r + column % 4];
                    sum += table[packed >> (column % 8 / 4 * 4) & 15] * x->values[block * BLOCK + column];
                }
                out[m][r] += scale.value * x->scales[block] * (float)sum;
            }
        }
}

#endif

static void product(const uint8_t *w, const struct quantized *x, const int64_t *rows, int64_t num_rows, f8 *out) {
    if (num_rows == TOGETHER)
        rows8(w, x, rows, TOGETHER, out);
    else
        for (int64_t m = 0; m < num_rows; m++) rows8(w, x, rows + m, 1, out + m);
}

/* ---- one layer's experts ---- */

struct moe {
    const float *x, *weights; /* [T, H], [T, K] */
    const uint8_t *gate_up, *down;
    const float *gate_up_bias, *down_bias; /* [E, 2I], [E, H] */
    float *hidden, *out;                   /* [T * K, I], [T, H] */
    struct quantized tokens, activated;
    int64_t num_tokens, width, inner, num_experts, per_token;
    int64_t *starts;         /* [E + 1]: pairs of an expert in `pairs` */
    int64_t *pairs, *owners; /* [T * K]: index in [T, K], and its token */
    int64_t *active;         /* experts with pairs */
    int64_t num_active, groups_per_task;
    float limit;
};

static void quantize_token(void *context, int64_t t) {
    const struct moe *a = context;
    quantize_row(a->x + t * a->width, a->width, &a->tokens, t);
}

static void quantize_hidden(void *context, int64_t i) {
    const struct moe *a = context;
    quantize_row(a->hidden + i * a->inner, a->inner, &a->activated, i);
}

/* (up + 1) * gate * sigmoid(1.702 gate) of four interleaved pairs */
static inline void swiglu(f8 gate_up, float limit, int64_t count, float *out) {
    f8 gate = __builtin_shufflevector(gate_up, gate_up, 0, 2, 4, 6, 0, 2, 4, 6);
    f8 up = __builtin_shufflevector(gate_up, gate_up, 1, 3, 5, 7, 1, 3, 5, 7);
    gate = min8(gate, all(limit));
    up = max8(min8(up, all(limit)), all(-limit));
    const f8 value = (up + all(1.0f)) * gate / (all(1.0f) + exp8(gate * all(-1.702f)));
    for (int64_t i = 0; i < MIN(count, 4); i++) out[i] = value[i];
}

static void gate_up_task(void *context, int64_t i) {
    const struct moe *a = context;
    const int64_t num_groups = (2 * a->inner + 7) / 8, per_expert = (num_groups + a->groups_per_task - 1) / a->groups_per_task;
    const int64_t e = a->active[i / per_expert], first = i % per_expert * a->groups_per_task;
    const uint8_t *w = a->gate_up + e * oscine_packed_bytes(2 * a->inner, a->tokens.num_blocks);
    for (int64_t group = first; group < MIN(first + a->groups_per_task, num_groups); group++) {
        const int64_t rows = MIN(8, 2 * a->inner - 8 * group);
        float bias[8] = {0};
        memcpy(bias, a->gate_up_bias + e * 2 * a->inner + 8 * group, sizeof(float) * rows);
        for (int64_t p = a->starts[e]; p < a->starts[e + 1]; p += TOGETHER) {
            const int64_t count = MIN(TOGETHER, a->starts[e + 1] - p);
            f8 out[TOGETHER];
            product(w + group * a->tokens.num_blocks * GROUP_BYTES, &a->tokens, a->owners + p, count, out);
            for (int64_t m = 0; m < count; m++)
                swiglu(out[m] + load(bias), a->limit, rows / 2, a->hidden + (p + m) * a->inner + 4 * group);
        }
    }
}

static void down_task(void *context, int64_t i) {
    const struct moe *a = context;
    const int64_t num_groups = (a->width + 7) / 8, first = i * a->groups_per_task;
    const int64_t last = MIN(first + a->groups_per_task, num_groups), num_blocks = a->activated.num_blocks;
    for (int64_t t = 0; t < a->num_tokens; t++)
        memset(a->out + t * a->width + 8 * first, 0, sizeof(float) * (MIN(8 * last, a->width) - 8 * first));
    for (int64_t n = 0; n < a->num_active; n++) {
        const int64_t e = a->active[n];
        const uint8_t *w = a->down + e * oscine_packed_bytes(a->width, num_blocks);
        for (int64_t group = first; group < last; group++)
            for (int64_t p = a->starts[e]; p < a->starts[e + 1]; p += TOGETHER) {
                const int64_t count = MIN(TOGETHER, a->starts[e + 1] - p), rows = MIN(8, a->width - 8 * group);
                int64_t places[TOGETHER];
                f8 out[TOGETHER];
                for (int64_t m = 0; m < count; m++) places[m] = p + m;
                product(w + group * num_blocks * GROUP_BYTES, &a->activated, places, count, out);
                for (int64_t m = 0; m < count; m++) {
                    float *to = a->out + a->owners[p + m] * a->width + 8 * group;
                    for (int64_t r = 0; r < rows; r++)
                        to[r] += a->weights[a->pairs[p + m]] * (out[m][r] + a->down_bias[e * a->width + 8 * group + r]);
                }
            }
    }
}

/* Sorts the pairs of token and expert by expert. */
static void group_pairs(struct moe *a, const int64_t *ids) {
    const int64_t num_pairs = a->num_tokens * a->per_token;
    memset(a->starts, 0, sizeof(int64_t) * (a->num_experts + 1));
    for (int64_t i = 0; i < num_pairs; i++) a->starts[ids[i] + 1]++;
    for (int64_t e = 0; e < a->num_experts; e++) {
        if (a->starts[e + 1]) a->active[a->num_active++] = e;
        a->starts[e + 1] += a->starts[e];
    }
    for (int64_t i = 0; i < num_pairs; i++) {
        const int64_t at = a->starts[ids[i]]++;
        a->pairs[at] = i, a->owners[at] = i / a->per_token;
    }
    for (int64_t e = a->num_experts; e > 0; e--) a->starts[e] = a->starts[e - 1];
    a->starts[0] = 0;
}

static int64_t groups_per_task(int64_t num_blocks, int64_t num_pairs, int64_t num_active) {
    const int64_t products = 8 * BLOCK * num_blocks * MAX(1, num_pairs / MAX(1, num_active));
    return MAX(1, PRODUCTS_PER_TASK / products);
}

int oscine_moe(
    const float *x, const int64_t *ids, const float *weights, const uint8_t *gate_up, const float *gate_up_bias,
    const uint8_t *down, const float *down_bias, float *out, int64_t num_tokens, int64_t width, int64_t inner,
    int64_t width_blocks, int64_t inner_blocks, int64_t num_experts, int64_t per_token, float limit) {
    const int64_t num_pairs = num_tokens * per_token;
    struct moe a = {
        .x = x, .weights = weights, .gate_up = gate_up, .down = down, .gate_up_bias = gate_up_bias, .down_bias = down_bias,
        .out = out, .num_tokens = num_tokens, .width = width, .inner = inner, .num_experts = num_experts,
        .per_token = per_token, .limit = limit};
    void *tokens = scratch(SCRATCH_X, quantized_bytes(num_tokens, width_blocks));
    void *activated = scratch(SCRATCH_Y, quantized_bytes(num_pairs, inner_blocks));
    a.hidden = scratch(SCRATCH_ROWS, sizeof(float) * num_pairs * inner);
    a.starts = scratch(SCRATCH_SCORES, sizeof(int64_t) * (2 * num_experts + 1 + 2 * num_pairs));
    if (!tokens || !activated || !a.hidden || !a.starts) return -1;
    a.tokens = quantized_at(tokens, num_tokens, width_blocks);
    a.activated = quantized_at(activated, num_pairs, inner_blocks);
    a.active = a.starts + num_experts + 1, a.pairs = a.active + num_experts, a.owners = a.pairs + num_pairs;
    group_pairs(&a, ids);
    run_parallel(num_tokens, quantize_token, &a);
    a.groups_per_task = groups_per_task(width_blocks, num_pairs, a.num_active);
    const int64_t gate_up_groups = (2 * inner + 7) / 8;
    run_parallel(a.num_active * ((gate_up_groups + a.groups_per_task - 1) / a.groups_per_task), gate_up_task, &a);
    run_parallel(num_pairs, quantize_hidden, &a);
    a.groups_per_task = groups_per_task(inner_blocks, num_pairs, 1);
    run_parallel(((width + 7) / 8 + a.groups_per_task - 1) / a.groups_per_task, down_task, &a);
    return 0;
}
