/* The mixture of experts with MXFP4 weights and activations in int8. Definition: ops/moe/reference.py. Layout of the
   weights: products.c. */
#include "oscine.h"

#define PRODUCTS_PER_TASK 262144

/* ---- packing ---- */

struct packing {
    const uint8_t *blocks, *scales;
    uint8_t *out;
    int64_t num_rows, num_blocks, num_groups;
};

/* The four lower nibbles of a word, as the low nibbles of its bytes. */
static inline uint32_t spread(uint32_t word) {
    word = (word | word << 8) & 0x00ff00ff;
    return (word | word << 4) & 0x0f0f0f0f;
}

static void pack_task(void *context, int64_t i) {
    const struct packing *a = context;
    const int64_t expert = i / a->num_groups, group = i % a->num_groups;
    for (int64_t b = 0; b < a->num_blocks; b++) {
        uint8_t *out = a->out + (i * a->num_blocks + b) * MXFP4_BYTES;
        memset(out, 0, MXFP4_BYTES);
        for (int r = 0; r < MIN(8, a->num_rows - 8 * group); r++) {
            const int64_t at = (expert * a->num_rows + 8 * group + r) * a->num_blocks + b;
            uint32_t columns[4]; /* eight each, as little-endian machines read them */
            memcpy(columns, a->blocks + at * (BLOCK / 2), sizeof columns);
            out[r] = a->scales[at];
            for (int p = 0; p < 4; p++) {
                const uint32_t packed = spread(columns[p] & 0xffff) | spread(columns[p] >> 16) << 4;
                memcpy(out + MXFP4_SCALES + 32 * p + 4 * r, &packed, sizeof packed);
            }
        }
    }
}

/* Bytes of one packed matrix [N, 32 B]. */
int64_t oscine_packed_bytes(int64_t num_rows, int64_t num_blocks) { return (num_rows + 7) / 8 * num_blocks * MXFP4_BYTES; }

/* blocks [E, N, B, 16], scales [E, N, B] as published */
void oscine_pack(
    const uint8_t *blocks, const uint8_t *scales, uint8_t *out, int64_t num_experts, int64_t num_rows,
    int64_t num_blocks) {
    struct packing a = {blocks, scales, out, num_rows, num_blocks, (num_rows + 7) / 8};
    ask_for_large_pages(out, num_experts * oscine_packed_bytes(num_rows, num_blocks));
    run_parallel(num_experts * a.num_groups, pack_task, &a);
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
    int64_t *pairs, *owners, *experts; /* [T * K], by expert: index in [T, K], its token, its expert */
    int64_t *places;                   /* [T, K]: where it is in `pairs` */
    int64_t *active;         /* experts with pairs */
    int64_t num_active, groups_per_task;
    float limit;
    const float *added; /* [T * K, 2I] by pair, to the first product; NULL: nothing */
    float *kept;        /* [T * K, I] by pair: gets the activations; NULL: they are not kept */
};

/* Index of a pair among the pairs of its expert. */
static struct tile tile_of_pair(const struct moe *a, int64_t p) {
    const int64_t e = a->experts[p];
    return tile_of(p, a->starts[e], a->starts[e + 1]);
}

static void quantize_token(void *context, int64_t t) {
    const struct moe *a = context;
    const int64_t *places = a->places + t * a->per_token;
    const struct tile tile = tile_of_pair(a, places[0]);
    quantize_row(a->x + t * a->width, a->width, &a->tokens, tile, places[0]);
    for (int64_t k = 1; k < a->per_token; k++)
        copy_row(&a->tokens, tile, places[0], tile_of_pair(a, places[k]), places[k]);
}

static void quantize_hidden(void *context, int64_t p) {
    const struct moe *a = context;
    if (a->kept) memcpy(a->kept + a->pairs[p] * a->inner, a->hidden + p * a->inner, sizeof(float) * a->inner);
    quantize_row(a->hidden + p * a->inner, a->inner, &a->activated, tile_of_pair(a, p), p);
}

/* (up + 1) * gate * sigmoid(1.702 gate) of eight interleaved pairs */
static inline f8 swiglu(f8 first, f8 second, float limit) {
    f8 gate = __builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14);
    f8 up = __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15);
    gate = min8(all(limit), gate); /* NaN stays NaN */
    up = max8(all(-limit), min8(all(limit), up));
    return (up + all(1.0f)) * gate / (all(1.0f) + exp8(gate * all(-1.702f)));
}

/* Uses the sums of a tile of pairs of expert e, for the rows from 8 * group on of its matrix. */
typedef void (*Take)(const struct moe *a, int64_t e, int64_t group, int64_t groups, struct tile tile, const f8 *sums);

static void take_gate_up(const struct moe *a, int64_t e, int64_t group, int64_t groups, struct tile tile, const f8 *sums) {
    const int64_t rows = MIN(8 * groups, 2 * a->inner - 8 * group);
    const float *bias = a->gate_up_bias + e * 2 * a->inner + 8 * group;
    const f8 first = rows < LANES ? load_some(bias, rows) : load(bias);
    const f8 second = rows < 2 * LANES ? load_some(bias + LANES, MAX(rows - LANES, 0)) : load(bias + LANES);
    for (int64_t n = 0; n < tile.count; n++) {
        const f8 *sum = sums + n * groups;
        f8 low = sum[0] + first, high = sum[groups - 1] + second;
        if (a->added) {
            const float *more = a->added + a->pairs[tile.first + n] * 2 * a->inner + 8 * group;
            low += rows < LANES ? load_some(more, rows) : load(more);
            high += rows < 2 * LANES ? load_some(more + LANES, MAX(rows - LANES, 0)) : load(more + LANES);
        }
        const f8 values = swiglu(low, high, a->limit);
        store_some(a->hidden + (tile.first + n) * a->inner + 4 * group, values, rows / 2);
    }
}

/* to += weight * (sums + bias), of up to 8 rows */
static inline void add_rows(float *to, const float *bias, int64_t rows, f8 sums, float weight) {
    if (rows == LANES)
        store(to, load(to) + all(weight) * (sums + load(bias)));
    else
        for (int64_t r = 0; r < rows; r++) to[r] += weight * (sums[r] + bias[r]);
}

static void take_down(const struct moe *a, int64_t e, int64_t group, int64_t groups, struct tile tile, const f8 *sums) {
    const int64_t rows = MIN(8 * groups, a->width - 8 * group);
    const float *bias = a->down_bias + e * a->width + 8 * group;
    for (int64_t n = 0; n < tile.count; n++) {
        float *to = a->out + a->owners[tile.first + n] * a->width + 8 * group;
        const float weight = a->weights[a->pairs[tile.first + n]];
        for (int64_t g = 0; g < groups; g++)
            add_rows(to + 8 * g, bias + 8 * g, MIN(8, rows - 8 * g), sums[n * groups + g], weight);
    }
}

/* The products of groups first .. last - 1 of expert e with all its pairs. */
static void meet_pairs(
    const struct moe *a, int64_t e, const uint8_t *w, const struct quantized *x, int64_t first, int64_t last, Take take) {
    for (int64_t p = a->starts[e]; p < a->starts[e + 1]; p += TILE)
        for (int64_t group = first; group < last; group += 2) {
            const struct tile tile = tile_of_pair(a, p);
            const int64_t groups = MIN(2, last - group);
            f8 sums[2 * TILE];
            mxfp4_products(w + group * x->num_blocks * MXFP4_BYTES, groups, x, tile, sums);
            take(a, e, group, groups, tile, sums);
        }
}

static void gate_up_task(void *context, int64_t i) {
    const struct moe *a = context;
    const int64_t num_groups = (2 * a->inner + 7) / 8, per_expert = (num_groups + a->groups_per_task - 1) / a->groups_per_task;
    const int64_t e = a->active[i / per_expert], first = i % per_expert * a->groups_per_task;
    const uint8_t *w = a->gate_up + e * oscine_packed_bytes(2 * a->inner, a->tokens.num_blocks);
    meet_pairs(a, e, w, &a->tokens, first, MIN(first + a->groups_per_task, num_groups), take_gate_up);
}

static void down_task(void *context, int64_t i) {
    const struct moe *a = context;
    const int64_t first = i * a->groups_per_task, last = MIN(first + a->groups_per_task, (a->width + 7) / 8);
    for (int64_t t = 0; t < a->num_tokens; t++)
        memset(a->out + t * a->width + 8 * first, 0, sizeof(float) * (MIN(8 * last, a->width) - 8 * first));
    for (int64_t n = 0; n < a->num_active; n++) {
        const int64_t e = a->active[n];
        const uint8_t *w = a->down + e * oscine_packed_bytes(a->width, a->activated.num_blocks);
        meet_pairs(a, e, w, &a->activated, first, last, take_down);
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
        a->pairs[at] = i, a->owners[at] = i / a->per_token, a->experts[at] = ids[i], a->places[i] = at;
    }
    for (int64_t e = a->num_experts; e > 0; e--) a->starts[e] = a->starts[e - 1];
    a->starts[0] = 0;
}

/* An even number. */
static int64_t groups_per_task(int64_t num_blocks, int64_t num_pairs, int64_t num_active) {
    const int64_t products = 16 * BLOCK * num_blocks * MAX(1, num_pairs / MAX(1, num_active));
    return 2 * MAX(1, PRODUCTS_PER_TASK / products);
}

int oscine_moe(
    const float *x, const int64_t *ids, const float *weights, const uint8_t *gate_up, const float *gate_up_bias,
    const uint8_t *down, const float *down_bias, float *out, int64_t num_tokens, int64_t width, int64_t inner,
    int64_t width_blocks, int64_t inner_blocks, int64_t num_experts, int64_t per_token, float limit, const float *added,
    float *kept) {
    const int64_t num_pairs = num_tokens * per_token;
    struct moe a = {
        .x = x, .weights = weights, .gate_up = gate_up, .down = down, .gate_up_bias = gate_up_bias, .down_bias = down_bias,
        .out = out, .num_tokens = num_tokens, .width = width, .inner = inner, .num_experts = num_experts,
        .per_token = per_token, .limit = limit, .added = added, .kept = kept};
    void *tokens = scratch(SCRATCH_X, quantized_bytes(num_pairs, width_blocks));
    void *activated = scratch(SCRATCH_Y, quantized_bytes(num_pairs, inner_blocks));
    a.hidden = scratch(SCRATCH_ROWS, sizeof(float) * num_pairs * inner);
    a.starts = scratch(SCRATCH_SCORES, sizeof(int64_t) * (2 * num_experts + 1 + 4 * num_pairs));
    if (!tokens || !activated || !a.hidden || !a.starts) return -1;
    a.tokens = quantized_at(tokens, num_pairs, width_blocks);
    a.activated = quantized_at(activated, num_pairs, inner_blocks);
    a.active = a.starts + num_experts + 1, a.pairs = a.active + num_experts;
    a.owners = a.pairs + num_pairs, a.experts = a.owners + num_pairs, a.places = a.experts + num_pairs;
    group_pairs(&a, ids);
    for_each_row(num_tokens, width, quantize_token, &a);
    a.groups_per_task = groups_per_task(width_blocks, num_pairs, a.num_active);
    const int64_t gate_up_groups = (2 * inner + 7) / 8;
    run_parallel(a.num_active * ((gate_up_groups + a.groups_per_task - 1) / a.groups_per_task), gate_up_task, &a);
    for_each_row(num_pairs, inner, quantize_hidden, &a);
    a.groups_per_task = groups_per_task(inner_blocks, num_pairs, 1);
    run_parallel(((width + 7) / 8 + a.groups_per_task - 1) / a.groups_per_task, down_task, &a);
    return 0;
}
