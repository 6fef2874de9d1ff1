/* The next token of each row: the most probable one, or one drawn with a temperature. Logits of whole rows are never
   stored. With a screen (screen.c), most are not computed: of each row, the exact score of a likely token is the floor, and
   exact scores are computed only of tokens whose upper bound reaches it. */
#include "oscine.h"

#define ROWS_PER_TASK 96
#define MOST_NOISE 23.0f /* the noise of the least uniform number is 22.9 */
#define LOWEST_TEMPERATURE 1e-20f /* as in ops/sample/reference.py */

typedef uint32_t u8 __attribute__((vector_size(32)));

struct choice {
    const float *x;
    const void *head;
    enum kind kind;
    struct quantized quantized; /* x, for a head in int8 */
    const float *temperatures; /* [N]; NULL: all 0 */
    const int64_t *seeds, *positions;
    const uint32_t *allowed; /* [K, words]: bit t % 32 of word t / 32 says whether token t may be chosen */
    const int32_t *allowed_rows; /* [N]: row of `allowed`, or -1; NULL: all tokens are allowed */
    int64_t num_words;
    const int64_t *tokens; /* [V]: the token of each row of the head; NULL: those from `first` on */
    const uint8_t *screen;
    const float *terms; /* of the screen */
    float *highest;     /* [N, V]: upper bounds of scores */
    float *floors;      /* [N] */
    float *best; /* [parts, N]: the highest score of a part of the vocabulary */
    int64_t *ids; /* of rows of the head, plus `first` */
    int64_t first, num_rows, vocabulary, width;
};

/* Gumbel noise by a hash of (seed, position, token): ops/sample/noise.py. */
struct noise {
    uint32_t key, second;
};

#define MIX(x) (x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16)

static uint32_t mix(uint32_t x) { return MIX(x); }

static struct noise noise_of(int64_t seed, int64_t position) {
    const uint32_t key = mix((uint32_t)position ^ mix((uint32_t)seed ^ mix((uint32_t)((uint64_t)seed >> 32))));
    return (struct noise){key, mix(key + 0x9e3779b9u)};
}

static u8 hashed(u8 tokens, struct noise noise) {
    tokens += noise.key;
    MIX(tokens);
    tokens ^= noise.second;
    return MIX(tokens);
}

static float gumbel(uint32_t hash) {
    const float uniform = ((float)hash + 0.5f) * 0x1p-32f;
    return -logf(-log1pf(-MIN(uniform, 1 - 0x1p-24f)));
}

/* Logits [rows, count] of the rows of a tile and of `count` tokens from `first` on. `first` is a multiple of 8. */
static void part_of_logits(const struct choice *a, struct tile rows, int64_t first, int64_t count, float *logits) {
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

/* The largest logit, and in *id its token: the lowest one if several are equal. If a logit is NaN, NaN is returned. *id
   is -1 then, and if all logits are -inf. */
static float most_probable(const float *logits, int64_t count, int64_t first, int64_t *id) {
    float best = -INFINITY;
    *id = -1;
    for (int64_t v = 0; v < count; v++)
        if (!(logits[v] <= best)) {
            best = logits[v], *id = first + v;
            if (isnan(best)) return *id = -1, best;
        }
    return best;
}

/* The largest value of logits / temperature + noise, and in *id its token. NaN counts as -inf. A cheap upper bound of the
   noise sorts out most tokens; the noise itself is only computed for tokens that may beat the best so far. The noise is
   that of `tokens` [count] if they are given, else that of the ids. */
static float drawn(
    const float *logits, int64_t count, int64_t first, const int64_t *tokens, float temperature, struct noise noise,
    int64_t *id) {
    const f8 heat = all(MAX(temperature, LOWEST_TEMPERATURE));
    const u8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    float best = -INFINITY;
    *id = -1;
    for (int64_t v = 0; v < count; v += LANES) {
        const int64_t lanes_used = MIN(LANES, count - v);
        const f8 scaled = (lanes_used == LANES ? load(logits + v) : load_some(logits + v, lanes_used)) / heat;
        u8 hash = lanes + (uint32_t)(first + v);
        for (int64_t i = 0; tokens && i < lanes_used; i++) hash[i] = (uint32_t)tokens[v + i];
        hash = hashed(hash, noise);
        const f8 floor = __builtin_convertvector((i8)(hash >> 8), f8) * all(0x1p-24f); /* of the uniform number */
        const i8 may_win = floor < exp8(scaled - all(best)) * all(1.001f);
        for (int64_t i = 0; i < lanes_used; i++) {
            if (!may_win[i]) continue;
            const float score = scaled[i] + gumbel(hash[i]);
            if (score > best) best = score, *id = first + v + i;
        }
    }
    return best;
}

/* The best score of some logits of row `at`, the first of which is of row `first` of the head. */
static float best_of(const struct choice *a, int64_t at, const float *logits, int64_t first, int64_t count, int64_t *id) {
    const float temperature = a->temperatures ? a->temperatures[at] : 0.0f;
    if (!(temperature > 0.0f)) return most_probable(logits, count, a->first + first, id);
    const struct noise noise = noise_of(a->seeds[at], a->positions[at]);
    return drawn(logits, count, a->first + first, a->tokens ? a->tokens + first : NULL, temperature, noise, id);
}

/* The mask of a row; NULL: all tokens are allowed. */
static const uint32_t *mask_of(const struct choice *a, int64_t row) {
    return a->allowed_rows && a->allowed_rows[row] >= 0 ? a->allowed + a->allowed_rows[row] * a->num_words : NULL;
}

static int is_allowed(const struct choice *a, const uint32_t *mask, int64_t token) {
    return token / 32 < a->num_words && (mask[token / 32] >> token % 32 & 1);
}

/* Whether a row of the tile may have one of these tokens. */
static int any_allowed(const struct choice *a, struct tile rows, int64_t token, int64_t count) {
    for (int64_t r = rows.first; r < rows.first + rows.count; r++) {
        const uint32_t *mask = mask_of(a, r);
        if (!mask) return 1;
        for (int64_t v = 0; v < count; v++)
            if (is_allowed(a, mask, token + v)) return 1;
    }
    return 0;
}

static void choice_task(void *context, int64_t i) {
    const struct choice *a = context;
    const int64_t first = i * ROWS_PER_TASK, count = MIN(ROWS_PER_TASK, a->vocabulary - first);
    float logits[TILE * ROWS_PER_TASK];
    for (int64_t n = 0; n < a->num_rows; n += TILE) {
        const struct tile rows = tile_of(n, 0, a->num_rows);
        const int is_used = any_allowed(a, rows, a->first + first, count);
        if (is_used) part_of_logits(a, rows, first, count, logits); /* else these rows of the head are not read */
        for (int64_t r = 0; r < rows.count; r++) {
            float *row = logits + r * count;
            const int64_t at = n + r;
            const uint32_t *mask = mask_of(a, at);
            for (int64_t v = 0; mask && v < count; v++)
                if (!is_used || !is_allowed(a, mask, a->first + first + v)) row[v] = -INFINITY;
            float *best = a->best + i * a->num_rows + at;
            int64_t *id = a->ids + i * a->num_rows + at;
            *best = best_of(a, at, row, first, count, id);
        }
    }
}

/* Upper bounds of the noise. -log(v) is one, for the uniform number v. The bits of a float, as an integer, are its binary
   logarithm to 0.09, from below. Where v is small but above 2^-16, the bound is at most 0.06 above the noise. */
static f8 most_noise(u8 hash) {
    const f8 uniform = __builtin_convertvector((i8)(hash >> 8), f8) * all(0x1p-24f);
    const f8 logarithm = __builtin_convertvector((i8)uniform, f8) * all(0x1p-23f) - all(127.0f);
    return min8(all(1e-3f) - logarithm * all(0.6931472f), all(MOST_NOISE));
}

/* Upper bounds of the scores of a part; in best and ids, the highest lower bound of a logit, with an upper bound of the noise:
   it only selects a token. */
static void screen_task(void *context, int64_t i) {
    const struct choice *a = context;
    const int64_t first = i * ROWS_PER_TASK, last = MIN(first + ROWS_PER_TASK, a->vocabulary);
    const u8 lanes = {0, 1, 2, 3, 4, 5, 6, 7};
    float *best = a->best + i * a->num_rows;
    int64_t *ids = a->ids + i * a->num_rows;
    struct noise noises[SCREENED];
    for (int64_t n = 0; n < a->num_rows; n++) {
        best[n] = -INFINITY, ids[n] = -1;
        if (a->temperatures) noises[n] = noise_of(a->seeds[n], a->positions[n]);
    }
    for (int64_t v = first; v < last; v += LANES) {
        f8 logits[SCREENED], bounds[SCREENED];
        const uint8_t *group = a->screen + v / LANES * a->quantized.num_blocks * MXFP4_BYTES;
        screen_logits(group, &a->quantized, a->num_rows, a->terms, logits, bounds);
        for (int64_t n = 0; n < a->num_rows; n++) {
            f8 high = logits[n] + bounds[n], low = logits[n] - bounds[n];
            if (a->temperatures && a->temperatures[n] > 0.0f) {
                const f8 heat = all(MAX(a->temperatures[n], LOWEST_TEMPERATURE));
                const u8 tokens = lanes + (uint32_t)(a->first + v);
                const f8 noise = most_noise(hashed(tokens, noises[n]));
                high = high / heat + noise, low = low / heat + noise;
            }
            store_some(a->highest + n * a->vocabulary + v, high, MIN(LANES, last - v));
            for (int64_t lane = 0; lane < MIN(LANES, last - v); lane++)
                if (low[lane] > best[n]) best[n] = low[lane], ids[n] = v + lane;
        }
    }
}

/* The best exact score of some rows of the head, all of one group of 8. */
static float exact_best(const struct choice *a, int64_t row, int64_t first, int64_t count, int64_t *id) {
    f8 logits[SCREENED];
    float of_row[LANES];
    const uint8_t *group = (const uint8_t *)a->head + first / LANES * a->quantized.num_blocks * INT8_BYTES;
    int8_products(group, 1, &a->quantized, tile_of(0, 0, a->num_rows), logits);
    store(of_row, logits[row]);
    return best_of(a, row, of_row + first % LANES, first, count, id);
}

static void decide_task(void *context, int64_t i) {
    const struct choice *a = context;
    const int64_t first = i * ROWS_PER_TASK, last = MIN(first + ROWS_PER_TASK, a->vocabulary);
    for (int64_t n = 0; n < a->num_rows; n++) {
        const float *highest = a->highest + n * a->vocabulary;
        float *best = a->best + i * a->num_rows + n;
        int64_t *best_id = a->ids + i * a->num_rows + n;
        *best = -INFINITY, *best_id = -1;
        for (int64_t v = first; v < last; v += LANES) {
            const int64_t count = MIN(LANES, last - v);
            int reaches = 0;
            for (int64_t lane = 0; lane < count; lane++) reaches |= highest[v + lane] >= a->floors[n];
            if (!reaches) continue;
            int64_t id;
            const float score = exact_best(a, n, v, count, &id);
            if (score > *best) *best = score, *best_id = id;
        }
    }
}

/* The best of the parts of a row; the first of equals. */
static void settle(const struct choice *a, int64_t parts, int64_t row, float *value, int64_t *id) {
    *value = -INFINITY, *id = -1;
    for (int64_t i = 0; i < parts; i++) {
        const float found = a->best[i * a->num_rows + row];
        if (found <= *value) continue;
        *value = found, *id = a->ids[i * a->num_rows + row];
        if (isnan(found)) break;
    }
}

/* The same as without a screen, but for errors beyond its bounds. Returns 1, or 0 if activations or
   all bounds are not finite, or -1 without memory. */
static int screened(struct choice *a, const float *dither, int64_t parts, float *values, int64_t *ids) {
    a->floors = scratch(SCRATCH_SCORES, sizeof(float) * SCREENED + screen_terms_bytes(&a->quantized, a->num_rows));
    a->highest = scratch(SCRATCH_ROWS, sizeof(float) * a->num_rows * a->vocabulary);
    if (!a->floors || !a->highest) return -1;
    a->terms = a->floors + SCREENED;
    if (!screen_terms(&a->quantized, a->num_rows, dither, a->floors + SCREENED)) return 0;
    run_parallel(parts, screen_task, a);
    for (int64_t n = 0; n < a->num_rows; n++) {
        int64_t likely;
        settle(a, parts, n, values + n, &likely);
        if (likely < 0) return 0;
        a->floors[n] = exact_best(a, n, likely, 1, ids + n);
    }
    run_parallel(parts, decide_task, a);
    for (int64_t n = 0; n < a->num_rows; n++) {
        const int64_t likely = ids[n];
        settle(a, parts, n, values + n, ids + n);
        if (!(values[n] >= a->floors[n])) values[n] = a->floors[n], ids[n] = likely; /* its error is beyond the bound */
    }
    return 1;
}

/* x [N, H] and head [V, H] of any kind, whose tokens begin at `first` -> values [N]: the best scores; ids [N]: their
   tokens, or -1 for a row without one. Temperatures, seeds and positions [N] may be NULL: then the most probable tokens
   are chosen. So may allowed [K, num_words] and allowed_rows [N]: then all tokens are allowed. tokens [V]: the token of each
   row of the head, or NULL; if given, `first` is 0, there are no masks, and a row of x without a choice gets tokens[0], not -1.
   screen, dither: of oscine_screen, or NULL. Returns -1 if memory runs out. */
int oscine_choose(
    const float *x, const void *head, int64_t kind, const float *temperatures, const int64_t *seeds,
    const int64_t *positions, const uint32_t *allowed, const int32_t *allowed_rows, int64_t num_words,
    const int64_t *tokens, const uint8_t *screen, const float *dither, float *values, int64_t *ids, int64_t first,
    int64_t num_rows, int64_t vocabulary, int64_t width) {
    const int64_t parts = (vocabulary + ROWS_PER_TASK - 1) / ROWS_PER_TASK;
    struct choice a = {
        .x = x, .head = head, .kind = kind, .temperatures = temperatures, .seeds = seeds, .positions = positions,
        .allowed = allowed, .allowed_rows = allowed_rows, .num_words = num_words, .tokens = tokens, .first = first,
        .num_rows = num_rows, .vocabulary = vocabulary, .width = width, .screen = screen};
    a.best = scratch(SCRATCH_X, sizeof(float) * parts * num_rows);
    a.ids = scratch(SCRATCH_Y, sizeof(int64_t) * parts * num_rows);
    if (!a.best || !a.ids || (kind == INT8 && quantize_rows(x, num_rows, width, &a.quantized))) return -1;
    int is_plain = !tokens && num_rows > 0 && num_rows <= SCREENED;
    for (int64_t n = 0; allowed_rows && n < num_rows; n++) is_plain &= allowed_rows[n] < 0;
    const int found = screen && is_plain ? screened(&a, dither, parts, values, ids) : 0;
    if (found) return found < 0 ? -1 : 0;
    run_parallel(parts, choice_task, &a);
    for (int64_t n = 0; n < num_rows; n++) {
        settle(&a, parts, n, values + n, ids + n);
        if (tokens) ids[n] = tokens[MAX(ids[n], 0)];
    }
    return 0;
}
