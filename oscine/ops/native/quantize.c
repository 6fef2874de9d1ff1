/* Quantises blocks of 32 values to MXFP4, by the rule of oscine/checkpoint/quantize.py. */
#include "oscine.h"

#define BLOCK 32
#define VECTORS (BLOCK / LANES)
#define INFINITE 0x7f800000
#define BIAS 127 /* of an exponent of float32, and of E8M0 */

typedef uint16_t u16x8 __attribute__((vector_size(16), aligned(2), may_alias));

struct quantization {
    const void *values; /* float32, or bfloat16 if is_short */
    int64_t is_short, blocks, part;
    uint8_t *packed, *scales;
    double *sums; /* of each part: squares of the differences, and of the values; the first is NaN if a value is not finite */
};

struct rounded {
    f8 units[VECTORS]; /* values of E2M1 */
    double error;      /* sum of squares, of the values themselves */
};

static inline float power(int32_t exponent) { return ((union { int32_t i; float f; }){(exponent + BIAS) << 23}).f; }

static inline f8 value8(const struct quantization *a, int64_t at) {
    if (!a->is_short) return load((const float *)a->values + at);
    const u16x8 upper = *(const u16x8 *)((const uint16_t *)a->values + at);
    return (f8)(__builtin_convertvector(upper, i8) << 16);
}

static inline i8 whole8(int32_t value) { return (i8){value, value, value, value, value, value, value, value}; }

/* Values are multiples of half the power of two below them, 0.5 at least: the sum with 1.5 * 2^22 of these rounds. */
static struct rounded rounded(const f8 *v, int32_t exponent) {
    struct rounded out;
    const f8 scale = all(power(-exponent)), one = all(1.0f);
    f8 errors = all(0.0f);
    for (int n = 0; n < VECTORS; n++) {
        const f8 unit = v[n] * scale;
        const f8 large = max8((f8)((i8)unit & whole8(INFINITE)), one) * all(0x1.8p22f);
        const f8 sum = unit + large;
        out.units[n] = max8(min8(sum - large, all(6.0f)), all(-6.0f));
        errors += (unit - out.units[n]) * (unit - out.units[n]);
    }
    out.error = sum8(errors) * (double)power(exponent) * power(exponent);
    return out;
}

/* The codes of E2M1. From 1 on they are the exponent and the first bit of the fraction of a float. */
static void pack(const f8 *units, uint8_t *packed) {
    int32_t codes[BLOCK];
    for (int n = 0; n < VECTORS; n++) {
        const i8 bits = (i8)units[n] & whole8(0x7fffffff);
        const i8 few = __builtin_convertvector((f8)bits + (f8)bits, i8), many = (bits >> 22) - whole8(2 * BIAS - 2);
        const i8 code = (i8)choose8(bits < (i8)all(1.0f), (f8)few, (f8)many) | ((units[n] < all(0.0f)) & whole8(8));
        memcpy(codes + n * LANES, &code, sizeof(code));
    }
    for (int i = 0; i < BLOCK / 2; i++) packed[i] = codes[2 * i] | codes[2 * i + 1] << 4;
}

static void quantize_part(void *context, int64_t part) {
    const struct quantization *a = context;
    double *sums = a->sums + 2 * part;
    for (int64_t b = part * a->part; b < MIN(a->blocks, (part + 1) * a->part); b++) {
        f8 v[VECTORS], squares = all(0.0f);
        i8 largest = whole8(0);
        for (int n = 0; n < VECTORS; n++) {
            v[n] = value8(a, b * BLOCK + n * LANES);
            const i8 bits = (i8)v[n] & whole8(0x7fffffff);
            largest = (i8)choose8(bits > largest, (f8)bits, (f8)largest);
            squares += v[n] * v[n];
        }
        int32_t most = 0;
        for (int n = 0; n < LANES; n++) most = MAX(most, largest[n]);
        if (most >= INFINITE) {
            sums[0] = NAN;
            return;
        }
        const int32_t usual = MIN(MAX((most >> 23) - BIAS - 2, -126), 126);
        const struct rounded first = rounded(v, usual), second = rounded(v, usual + 1);
        const int better = second.error < first.error;
        pack(better ? second.units : first.units, a->packed + b * BLOCK / 2);
        a->scales[b] = usual + better + BIAS;
        sums[0] += better ? second.error : first.error;
        sums[1] += sum8(squares);
    }
}

/* `part`: blocks that a thread takes at once. `sums`: zeros, two for each part. */
int oscine_quantize(const void *values, int64_t is_short, int64_t blocks, int64_t part, uint8_t *packed, uint8_t *scales, double *sums) {
    struct quantization a = {values, is_short, blocks, part, packed, scales, sums};
    run_parallel((blocks + part - 1) / part, quantize_part, &a);
    return 0;
}
