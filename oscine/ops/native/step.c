/* What a step does beside its layers: tokens and places from the state of the sequences, embeddings, the way back. */
#include "oscine.h"

/* Definition: ops/step/reference.py. Columns of the packed step, with `columns` pages in a row of tables [G, R, B] ->
   ids, positions [T], rows [N], page_tables [G, S, B], places [G, T]. */
int oscine_prepare_step(
    const int32_t *given, const int32_t *positions, const int32_t *token_slots, const int32_t *slots,
    const int32_t *wanted_rows, const int32_t *tables, const int32_t *last_ids, int64_t num_tokens,
    int64_t num_sequences, int64_t num_wanted, int64_t num_groups, int64_t table_rows, int64_t columns,
    int64_t page_size, int64_t *ids, int64_t *wide_positions, int64_t *rows, int32_t *page_tables, int64_t *places) {
    for (int64_t t = 0; t < num_tokens; t++) {
        ids[t] = given[t] < 0 ? last_ids[token_slots[t]] : given[t];
        wide_positions[t] = positions[t];
    }
    for (int64_t n = 0; n < num_wanted; n++) rows[n] = wanted_rows[n];
    for (int64_t g = 0; g < num_groups; g++, tables += table_rows * columns) {
        for (int64_t s = 0; s < num_sequences; s++, page_tables += columns)
            memcpy(page_tables, tables + slots[s] * columns, sizeof(int32_t) * columns);
        for (int64_t t = 0; t < num_tokens; t++) {
            const int64_t page = tables[token_slots[t] * columns + positions[t] / page_size];
            *places++ = page * page_size + positions[t] % page_size;
        }
    }
    return 0;
}

/* last_ids[slot] = id, or 0 where there is none. */
int oscine_write_back(int32_t *last_ids, const int32_t *slots, const int64_t *ids, int64_t count) {
    for (int64_t m = 0; m < count; m++) last_ids[slots[m]] = (int32_t)MAX(ids[m], 0);
    return 0;
}

/* Rows of a table [V, H], FLOAT32 or BFLOAT16 -> out [T, H]. Returns -2 for an id that the table lacks. */
int oscine_embed(
    const int64_t *ids, const void *table, int64_t kind, float *out, int64_t num_tokens, int64_t vocabulary,
    int64_t width) {
    for (int64_t t = 0; t < num_tokens; t++, out += width) {
        if (ids[t] < 0 || ids[t] >= vocabulary) return -2;
        if (kind == FLOAT32) {
            memcpy(out, (const float *)table + ids[t] * width, sizeof(float) * width);
            continue;
        }
        const uint16_t *row = (const uint16_t *)table + ids[t] * width;
        for (int64_t k = 0; k < width; k++) {
            const uint32_t bits = (uint32_t)row[k] << 16;
            memcpy(out + k, &bits, sizeof bits);
        }
    }
    return 0;
}
