/* What a step does beside its layers: tokens and places from the state of the sequences, embeddings, the way back. */
#include "oscine.h"

/* Definition: ops/step/reference.py. Columns of the packed step, with `columns` pages in a row of tables [G, R, B] and
   `most_drafts` in a row of drafts -> ids, positions [T], lengths [S], rows [N], page_tables [G, S, B], places [G, T]. Of a
   page table, only the columns that its sequence has reached are written: a row may have thousands. */
int oscine_prepare_step(
    const int32_t *given, const int32_t *positions, const int32_t *token_slots, const int32_t *slots,
    const int32_t *query_starts, const int32_t *wanted_rows, const int32_t *tables, const int32_t *last_ids,
    const int32_t *lens, const int32_t *drafts, int64_t most_drafts, int64_t num_tokens, int64_t num_sequences,
    int64_t num_wanted, int64_t num_groups, int64_t table_rows, int64_t columns, int64_t page_size, int64_t *ids,
    int64_t *wide_positions, int32_t *context_lens, int64_t *rows, int32_t *page_tables, int64_t *places) {
    for (int64_t t = 0; t < num_tokens; t++) {
        const int64_t slot = token_slots[t], place = -1 - (int64_t)given[t];
        if (place < 0) {
            ids[t] = given[t];
            wide_positions[t] = positions[t];
        } else {
            ids[t] = place ? drafts[slot * most_drafts + place - 1] : last_ids[slot];
            wide_positions[t] = lens[slot] - 1 + place;
        }
    }
    for (int64_t s = 0; s < num_sequences; s++) context_lens[s] = (int32_t)wide_positions[query_starts[s + 1] - 1] + 1;
    for (int64_t n = 0; n < num_wanted; n++) rows[n] = wanted_rows[n];
    for (int64_t g = 0; g < num_groups; g++, tables += table_rows * columns) {
        for (int64_t s = 0; s < num_sequences; s++, page_tables += columns) {
            const int64_t used = (context_lens[s] + page_size - 1) / page_size;
            memcpy(page_tables, tables + slots[s] * columns, sizeof(int32_t) * used);
        }
        for (int64_t t = 0; t < num_tokens; t++) {
            const int64_t page = tables[token_slots[t] * columns + wide_positions[t] / page_size];
            *places++ = page * page_size + wide_positions[t] % page_size;
        }
    }
    return 0;
}

/* Definition: ops/step/reference.py. The row `padding` of last_ids and lens is left alone. */
int oscine_accept(
    const int32_t *given, const int32_t *rows, const int32_t *slots, const int64_t *tokens, const int64_t *positions,
    const int64_t *ids, int64_t count, int64_t padding, int32_t *last_ids, int32_t *lens, int64_t *accepted_ids) {
    int accepts = 0;
    for (int64_t m = 0; m < count; m++) {
        const int64_t row = rows[m], token = tokens[row];
        if (given[row] < -1) accepts = accepts && m && ids[m - 1] == token;
        else accepts = 1;
        accepted_ids[m] = accepts ? ids[m] : REJECTED;
        if (!accepts) continue;
        if (slots[m] != padding) {
            last_ids[slots[m]] = (int32_t)MAX(ids[m], 0);
            lens[slots[m]] = (int32_t)positions[row] + 2;
        }
    }
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
