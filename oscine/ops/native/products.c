/* Products of packed weights with tiles of activations in int8, for each kind of processor.

   Packed weights are groups of 8 rows, and a group is blocks of 32 columns. A block is 8 scales, then vectors of 32 bytes
   in which byte i has row i / 4 and column i % 4 of four columns. Four columns of activations, repeated, meet such a
   vector, and the lanes of the products are the rows. One layout serves AVX2, AVX-VNNI, AVX-512 and NEON. ik_llama.cpp
   lays out MXFP4 in the same way (MXFP4_R8, its pull requests 683 and 757).

   | | scales | vectors | a value is scale times |
   |---|---|---|---|
   | MXFP4 | E8M0 | 4: low nibbles are columns 8p .. 8p + 3, high nibbles the next four | half of an integer of -12 .. 12 |
   | int4 | E8M0 | as MXFP4 | half of an integer of -8 .. 7 |
   | int8 | bfloat16 | 8: columns 4j .. 4j + 3 | an integer of -127 .. 127 |

   x86 multiplies unsigned by signed bytes. Integers of nibbles are shifted by 12, so sums begin at minus 12 times the sum of
   the block's activations. So are those of int8, by 128, where the processor has VNNI. Without it sums of two products must
   fit 16 bits, and the sign of an int8 weight goes to the activation.

   A broadcast costs as much as a product there. So two groups meet two tokens at a time, from weights that were unpacked
   once for all tokens of the tile. Few tokens meet one group, since weights are then not written to memory and read back.
   On Zen 3, two tokens take 70 % of the time so, and four take 85 % (int8). With MXFP4 two take 96 %; more take longer. */
#include "oscine.h"

#if defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define SHIFT 12       /* of the integers of nibbles */
#define INT8_SHIFT 128 /* of int8, with VNNI */
#define FEW 4      /* most tokens that meet one group at a time: drafts, or a small batch */
#define AHEAD 2048 /* bytes that few tokens ask for early: memory gives 25 % more than to the processor's own guesses */

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define ADD_DOTS(sum, w, x) _mm256_dpbusd_epi32(sum, w, x)
#elif defined(__AVXVNNI__)
#define ADD_DOTS(sum, w, x) _mm256_dpbusd_avx_epi32(sum, w, x)
#endif

#ifndef __AVX2__
/* The integers of MXFP4, and of int4. */
static const int8_t NIBBLES[2][16] = {
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}, {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}};
#endif

/* ---- activations ---- */

size_t quantized_bytes(int64_t rows, int64_t num_blocks) {
    return rows * num_blocks * (BLOCK + sizeof(float) + sizeof(int32_t));
}

struct quantized quantized_at(void *memory, int64_t rows, int64_t num_blocks) {
    struct quantized q = {memory, (float *)((int8_t *)memory + rows * num_blocks * BLOCK), NULL, num_blocks};
    q.offsets = (int32_t *)(q.scales + rows * num_blocks);
    return q;
}

/* Rounds 32 floats of at most 127, ties to even. Returns their offset. */
INLINE int32_t round_block(const float *x, f8 factor, int8_t *to) {
#if defined(__AVX2__)
    __m256i v[4];
    for (int i = 0; i < 4; i++) v[i] = _mm256_cvtps_epi32((__m256)(load(x + LANES * i) * factor));
    const __m256i halves = _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    const __m256i bytes = _mm256_permutevar8x32_epi32(halves, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)to, bytes);
#ifdef ADD_DOTS
    const __m256i sums = ADD_DOTS(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
#else
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(SHIFT), bytes);
    __m128i sum = _mm_add_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    sum = _mm_add_epi16(sum, _mm_shuffle_epi32(sum, 0x4e));
    sum = _mm_add_epi16(sum, _mm_shuffle_epi32(sum, 0xb1));
    return _mm_cvtsi128_si32(_mm_sub_epi16(_mm_setzero_si128(), sum));
#endif
#else
    typedef int8_t bytes8 __attribute__((vector_size(8), aligned(1), may_alias));
    const f8 shift = all(12582912.0f); /* 1.5 * 2^23: rounds to an integer */
    for (int k = 0; k < BLOCK; k += LANES) {
        const f8 scaled = max8(min8(load(x + k) * factor, all(127.0f)), all(-127.0f));
        *(bytes8 *)(to + k) = __builtin_convertvector((i8)(scaled + shift) - (i8)shift, bytes8);
    }
    return 0;
#endif
}

static void quantize_block(const float *x, const struct quantized *to, int64_t place) {
    f8 most = {0}, poison = {0}; /* NaN if a value is not finite */
    for (int k = 0; k < BLOCK; k += LANES) {
        const f8 values = load(x + k);
        most = max8(most, max8(values, -values));
        poison += values * all(0.0f);
    }
    const float scale = largest8(most) / 127.0f;
    to->offsets[place] = round_block(x, all(scale > 0.0f ? 1.0f / scale : 0.0f), to->values + place * BLOCK);
    to->scales[place] = scale + sum8(poison);
}

/* Index of block b of a row. */
INLINE int64_t place_of(const struct quantized *x, struct tile tile, int64_t row, int64_t b) {
    return tile.first * x->num_blocks + b * tile.count + row - tile.first;
}

void quantize_row(const float *x, int64_t width, const struct quantized *to, struct tile tile, int64_t row) {
    int64_t b = 0;
    for (; b < width / BLOCK; b++) quantize_block(x + b * BLOCK, to, place_of(to, tile, row, b));
    for (; b < to->num_blocks; b++) {
        float padded[BLOCK] = {0};
        memcpy(padded, x + b * BLOCK, sizeof(float) * MAX(width - b * BLOCK, 0));
        quantize_block(padded, to, place_of(to, tile, row, b));
    }
}

void copy_row(const struct quantized *x, struct tile from_tile, int64_t from, struct tile to_tile, int64_t to) {
    for (int64_t b = 0; b < x->num_blocks; b++) {
        const int64_t source = place_of(x, from_tile, from, b), place = place_of(x, to_tile, to, b);
        memcpy(x->values + place * BLOCK, x->values + source * BLOCK, BLOCK);
        x->scales[place] = x->scales[source], x->offsets[place] = x->offsets[source];
    }
}

struct tile tile_of(int64_t row, int64_t begin, int64_t end) {
    const int64_t first = begin + (row - begin) / TILE * TILE;
    return (struct tile){first, MIN(TILE, end - first)};
}

struct rows {
    const float *x;
    int64_t num_rows, width;
    struct quantized to;
};

static void row_task(void *context, int64_t row) {
    const struct rows *a = context;
    quantize_row(a->x + row * a->width, a->width, &a->to, tile_of(row, 0, a->num_rows), row);
}

int quantize_rows(const float *x, int64_t num_rows, int64_t width, struct quantized *to) {
    const int64_t num_blocks = (width + BLOCK - 1) / BLOCK;
    void *memory = scratch(SCRATCH_BYTES, quantized_bytes(num_rows, num_blocks));
    if (!memory) return -1;
    *to = quantized_at(memory, num_rows, num_blocks);
    struct rows a = {x, num_rows, width, *to};
    for_each_row(num_rows, width, row_task, &a);
    return 0;
}

/* ---- products of one block: sums[n * G + g] of G groups and N tokens, from 8 (MXFP4) or 16 vectors of each group ---- */

#if defined(__AVX2__)

typedef __m256i vector;

INLINE f8 scales_of(enum kind kind, const uint8_t *w) {
    if (kind == INT8) return (f8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)w)), 16);
    return all(0.5f) * (f8)_mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)w)), 23);
}

INLINE __m256i four(const int8_t *x) {
    int32_t bytes;
    memcpy(&bytes, x, 4);
    return _mm256_set1_epi32(bytes);
}

INLINE void unpack_nibbles(enum kind kind, const uint8_t *w, vector *out) {
    const __m256i nibble = _mm256_set1_epi8(15);
    const __m128i row = kind == MXFP4 ? _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)
                                      : _mm_setr_epi8(4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19);
    const __m256i values = _mm256_broadcastsi128_si256(row);
#pragma GCC unroll 4
    for (int p = 0; p < 4; p++) {
        const __m256i packed = _mm256_loadu_si256((const __m256i *)(w + MXFP4_SCALES + BLOCK * p));
        out[2 * p] = _mm256_shuffle_epi8(values, _mm256_and_si256(packed, nibble));
        out[2 * p + 1] = _mm256_shuffle_epi8(values, _mm256_and_si256(_mm256_srli_epi16(packed, 4), nibble));
    }
}

#ifdef ADD_DOTS

#define VECTORS 8 /* of a block of any kind */

/* Shifted integers of columns 4j .. 4j + 3 at [j]. */
INLINE void unpack(enum kind kind, const uint8_t *w, vector *out) {
    if (kind != INT8) {
        unpack_nibbles(kind, w, out);
        return;
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        const __m256i values = _mm256_loadu_si256((const __m256i *)(w + INT8_SCALES + BLOCK * j));
        out[j] = _mm256_xor_si256(values, _mm256_set1_epi8((char)INT8_SHIFT));
    }
}

#define ADD_PRODUCTS(sum, w, x) sum = ADD_DOTS(sum, w, x)

#else

#define VECTORS 16

/* MXFP4 and int4: shifted integers of columns 4j .. 4j + 3 at [j]. int8: magnitudes at [j], signed at [8 + j]. */
INLINE void unpack(enum kind kind, const uint8_t *w, vector *out) {
    if (kind != INT8) {
        unpack_nibbles(kind, w, out);
        return;
    }
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        out[8 + j] = _mm256_loadu_si256((const __m256i *)(w + INT8_SCALES + BLOCK * j));
        out[j] = _mm256_abs_epi8(out[8 + j]);
    }
}

/* 16 bits wrap around on the way: the sums of the 16 columns of a half are at most 16 * 12 * 127. */
#define ADD_PRODUCTS(sum, w, x)                                       \
    do {                                                              \
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w, x));      \
        KEEP(sum);                                                    \
    } while (0)

#endif

/* Products of shifted weights, from sums that begin at `starts` of each token. */
INLINE void shifted_sums(
    const vector *w, int groups, const int8_t *x, const int32_t *starts, int tokens, __m256i *sums) {
#pragma GCC unroll 2
    for (int n = 0; n < tokens; n++)
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++) sums[n * groups + g] = _mm256_set1_epi32(starts[n]);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
        __m256i weights[2];
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++) {
            weights[g] = w[VECTORS * g + j];
            KEEP(weights[g]);
        }
#pragma GCC unroll 2
        for (int n = 0; n < tokens; n++) {
            const __m256i a = four(x + BLOCK * n + 4 * j);
#pragma GCC unroll 2
            for (int g = 0; g < groups; g++) ADD_PRODUCTS(sums[n * groups + g], weights[g], a);
        }
    }
}

#ifdef ADD_DOTS

INLINE void integer_sums(
    enum kind kind, const vector *w, int groups, const int8_t *x, const int32_t *offsets, int tokens, __m256i *sums) {
    int32_t starts[2];
    for (int n = 0; n < tokens; n++) starts[n] = -(kind == INT8 ? INT8_SHIFT : SHIFT) * offsets[n];
    shifted_sums(w, groups, x, starts, tokens, sums);
}

#else

/* Sums of two products are at most 2 * 127 * 127, so they fit 16 bits. */
INLINE void int8_block(const vector *w, int groups, const int8_t *x, int tokens, __m256i *sums) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++)
#pragma GCC unroll 2
        for (int n = 0; n < tokens; n++) {
            const __m256i a = four(x + BLOCK * n + 4 * j);
#pragma GCC unroll 2
            for (int g = 0; g < groups; g++) {
                const __m256i signed_ = _mm256_sign_epi8(a, w[VECTORS * g + 8 + j]);
                const int i = n * groups + g;
                const __m256i pairs = _mm256_maddubs_epi16(w[VECTORS * g + j], signed_);
                const __m256i sum = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
                sums[i] = j ? _mm256_add_epi32(sums[i], sum) : sum;
                KEEP(sums[i]);
            }
        }
}

INLINE void integer_sums(
    enum kind kind, const vector *w, int groups, const int8_t *x, const int32_t *offsets, int tokens, __m256i *sums) {
    if (kind == INT8) {
        int8_block(w, groups, x, tokens, sums);
        return;
    }
    shifted_sums(w, groups, x, offsets, tokens, sums);
#pragma GCC unroll 4
    for (int i = 0; i < groups * tokens; i++) sums[i] = _mm256_madd_epi16(sums[i], _mm256_set1_epi16(1));
}

#endif

INLINE void block_sums(
    enum kind kind, const vector *w, int groups, const int8_t *x, const int32_t *offsets, int tokens, f8 *out) {
    __m256i sums[4];
    integer_sums(kind, w, groups, x, offsets, tokens, sums);
#pragma GCC unroll 4
    for (int i = 0; i < groups * tokens; i++) out[i] = (f8)_mm256_cvtepi32_ps(sums[i]);
}

#elif defined(__ARM_NEON) && defined(__ARM_FEATURE_DOTPROD)

#define VECTORS 8

typedef struct {
    int8x16_t low, high; /* rows 0-3, rows 4-7 */
} vector;

INLINE f8 joined(float32x4_t low, float32x4_t high) {
    float lanes[LANES];
    vst1q_f32(lanes, low);
    vst1q_f32(lanes + 4, high);
    return load(lanes);
}

INLINE f8 scales_of(enum kind kind, const uint8_t *w) {
    if (kind == INT8) {
        const uint16x8_t bits = vreinterpretq_u16_u8(vld1q_u8(w));
        return joined(
            vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(bits), 16)),
            vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(bits), 16)));
    }
    const uint16x8_t exponents = vmovl_u8(vld1_u8(w));
    return all(0.5f) * joined(
                           vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(exponents)), 23)),
                           vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_high_u16(exponents)), 23)));
}

INLINE void unpack(enum kind kind, const uint8_t *w, vector *out) {
    const int8x16_t values = vld1q_s8(NIBBLES[kind == INT4]);
    if (kind != INT8)
        for (int p = 0; p < 4; p++) {
            const uint8x16_t low = vld1q_u8(w + MXFP4_SCALES + BLOCK * p), high = vld1q_u8(w + MXFP4_SCALES + BLOCK * p + 16);
            out[2 * p].low = vqtbl1q_s8(values, vandq_u8(low, vdupq_n_u8(15)));
            out[2 * p].high = vqtbl1q_s8(values, vandq_u8(high, vdupq_n_u8(15)));
            out[2 * p + 1].low = vqtbl1q_s8(values, vshrq_n_u8(low, 4));
            out[2 * p + 1].high = vqtbl1q_s8(values, vshrq_n_u8(high, 4));
        }
    else
        for (int j = 0; j < 8; j++) {
            out[j].low = vld1q_s8((const int8_t *)w + INT8_SCALES + BLOCK * j);
            out[j].high = vld1q_s8((const int8_t *)w + INT8_SCALES + BLOCK * j + 16);
        }
}

INLINE void block_sums(
    enum kind kind, const vector *w, int groups, const int8_t *x, const int32_t *offsets, int tokens, f8 *out) {
    (void)kind, (void)offsets;
    for (int n = 0; n < tokens; n++) {
        const int8x16_t a[2] = {vld1q_s8(x + BLOCK * n), vld1q_s8(x + BLOCK * n + 16)};
        for (int g = 0; g < groups; g++) {
            const vector *v = w + VECTORS * g;
            int32x4_t low = vdupq_n_s32(0), high = vdupq_n_s32(0);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
#define LANE(j) \
    low = vdotq_laneq_s32(low, v[4 * half + j].low, a[half], j), high = vdotq_laneq_s32(high, v[4 * half + j].high, a[half], j)
                LANE(0), LANE(1), LANE(2), LANE(3);
#undef LANE
            }
            out[n * groups + g] = joined(vcvtq_f32_s32(low), vcvtq_f32_s32(high));
        }
    }
}

#else

#define VECTORS 8

typedef struct {
    int8_t bytes[BLOCK];
} vector;

INLINE f8 scales_of(enum kind kind, const uint8_t *w) {
    i8 bits;
    for (int r = 0; r < 8; r++) {
        uint16_t half;
        memcpy(&half, w + 2 * r, 2);
        bits[r] = kind == INT8 ? (int32_t)((uint32_t)half << 16) : (int32_t)((uint32_t)w[r] << 23);
    }
    return kind == INT8 ? (f8)bits : all(0.5f) * (f8)bits;
}

INLINE void unpack(enum kind kind, const uint8_t *w, vector *out) {
    for (int j = 0; j < 8; j++)
        for (int i = 0; i < BLOCK; i++)
            out[j].bytes[i] = kind == INT8 ? (int8_t)w[INT8_SCALES + BLOCK * j + i]
                                           : NIBBLES[kind == INT4][w[MXFP4_SCALES + BLOCK * (j / 2) + i] >> (j % 2 * 4) & 15];
}

INLINE void block_sums(
    enum kind kind, const vector *w, int groups, const int8_t *x, const int32_t *offsets, int tokens, f8 *out) {
    (void)kind, (void)offsets;
    for (int n = 0; n < tokens; n++)
        for (int g = 0; g < groups; g++) {
            int32_t sums[8] = {0};
            for (int j = 0; j < 8; j++)
                for (int i = 0; i < BLOCK; i++)
                    sums[i / 4] += w[VECTORS * g + j].bytes[i] * x[BLOCK * n + 4 * j + i % 4];
            for (int r = 0; r < 8; r++) out[n * groups + g][r] = (float)sums[r];
        }
}

#endif

/* ---- products of whole rows ---- */

INLINE void take_block(
    enum kind kind, const vector *w, const f8 *scales, int groups, const struct quantized *x, int64_t place, int tokens,
    f8 *out) {
    f8 sums[4];
    block_sums(kind, w, groups, x->values + place * BLOCK, x->offsets + place, tokens, sums);
#pragma GCC unroll 2
    for (int n = 0; n < tokens; n++)
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++)
            out[n * groups + g] += scales[g] * (all(x->scales[place + n]) * sums[n * groups + g]);
}

INLINE void meet_tile(
    enum kind kind, const uint8_t *w, int groups, const struct quantized *x, struct tile tile, f8 *out) {
    const int64_t bytes = kind == INT8 ? INT8_BYTES : MXFP4_BYTES, group_bytes = bytes * x->num_blocks;
    for (int64_t i = 0; i < tile.count * groups; i++) out[i] = all(0.0f);
    for (int64_t b = 0; b < x->num_blocks; b++, w += bytes) {
        const int64_t place = tile.first * x->num_blocks + b * tile.count;
        vector unpacked[2 * VECTORS];
        f8 scales[2];
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++) {
            unpack(kind, w + g * group_bytes, unpacked + VECTORS * g);
            scales[g] = scales_of(kind, w + g * group_bytes);
        }
        int64_t n = 0;
        for (; n + 2 <= tile.count; n += 2) take_block(kind, unpacked, scales, groups, x, place + n, 2, out + n * groups);
        if (n < tile.count) take_block(kind, unpacked, scales, groups, x, place + n, 1, out + n * groups);
    }
}

/* The same for one group and few tokens, whose sums stay in registers. Those of a token are `stride` apart. */
INLINE void meet_few(
    enum kind kind, const uint8_t *w, const struct quantized *x, struct tile tile, int tokens, f8 *out, int64_t stride) {
    const int64_t bytes = kind == INT8 ? INT8_BYTES : MXFP4_BYTES;
    f8 sums[FEW];
    for (int n = 0; n < tokens; n++) sums[n] = all(0.0f);
    for (int64_t b = 0; b < x->num_blocks; b++, w += bytes) {
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(w + AHEAD + line);
        const int64_t place = tile.first * x->num_blocks + b * tokens;
        vector unpacked[VECTORS];
        unpack(kind, w, unpacked);
        const f8 scales = scales_of(kind, w);
#pragma GCC unroll 2
        for (int n = 0; n < tokens; n += 2)
            take_block(kind, unpacked, &scales, 1, x, place + n, MIN(2, tokens - n), sums + n);
    }
    for (int n = 0; n < tokens; n++) out[n * stride] = sums[n];
}

#define PRODUCTS(name, kind, few)                                                                       \
    void name(const uint8_t *w, int64_t groups, const struct quantized *x, struct tile tile, f8 *out) { \
        const int64_t group_bytes = (kind == INT8 ? INT8_BYTES : MXFP4_BYTES) * x->num_blocks;          \
        if (tile.count > few && groups == 2)                                                            \
            meet_tile(kind, w, 2, x, tile, out);                                                        \
        else if (tile.count > few)                                                                      \
            meet_tile(kind, w, 1, x, tile, out);                                                        \
        else                                                                                            \
            for (int64_t g = 0; g < groups; g++, w += group_bytes) {                                    \
                if (tile.count == 1) meet_few(kind, w, x, tile, 1, out + g, groups);                    \
                if (tile.count == 2) meet_few(kind, w, x, tile, 2, out + g, groups);                    \
                if (few > 2 && tile.count == 3) meet_few(kind, w, x, tile, 3, out + g, groups);         \
                if (few > 2 && tile.count == 4) meet_few(kind, w, x, tile, 4, out + g, groups);         \
            }                                                                                           \
    }

PRODUCTS(mxfp4_products, MXFP4, 2)
PRODUCTS(int8_products, INT8, 4)

/* ---- logits of a screen (screen.c), and the squares of the standard deviations of their errors ---- */

INLINE void meet_screen(const uint8_t *w, const struct quantized *x, int tokens, const float *terms, f8 *logits, f8 *squares) {
    for (int n = 0; n < tokens; n++) logits[n] = squares[n] = all(0.0f);
    for (int64_t b = 0; b < x->num_blocks; b++, w += MXFP4_BYTES) {
        for (int64_t line = 0; line < MXFP4_BYTES; line += 64) __builtin_prefetch(w + AHEAD + line);
        vector unpacked[VECTORS];
        unpack(INT4, w, unpacked);
        const f8 scales = scales_of(INT4, w), squared = scales * scales;
        const int64_t place = b * tokens;
        f8 sums[SCREENED];
        block_sums(INT4, unpacked, 1, x->values + place * BLOCK, x->offsets + place, tokens, sums);
#pragma GCC unroll 2
        for (int n = 0; n < tokens; n++) {
            logits[n] += scales * (all(x->scales[place + n]) * sums[n] + all(terms[2 * (place + n)]));
            squares[n] += squared * all(terms[2 * (place + n) + 1]);
        }
    }
}

void screen_products(
    const uint8_t *w, const struct quantized *x, int64_t num_rows, const float *terms, f8 *logits, f8 *squares) {
    if (num_rows == 1)
        meet_screen(w, x, 1, terms, logits, squares);
    else
        meet_screen(w, x, 2, terms, logits, squares);
}
