/* Runs kernels of oscine/ops/native on its input, for processors that the tests emulate. stdin: eight int64, then
   arrays as below; stdout: the result in float32. */
#include "oscine.h"

#include <stdio.h>

int64_t oscine_dense_bytes(int64_t num_rows, int64_t num_blocks);
void oscine_pack_dense(const uint16_t *weights, uint8_t *out, int64_t num_rows, int64_t width);
int64_t oscine_packed_bytes(int64_t num_rows, int64_t num_blocks);
int oscine_screen(const uint8_t *head, const float *dither, uint8_t *out, int64_t num_rows, int64_t num_blocks);
int oscine_choose(
    const float *x, const void *head, int64_t kind, const float *temperatures, const int64_t *seeds,
    const int64_t *positions, const uint32_t *allowed, const int32_t *allowed_rows, int64_t num_words,
    const int64_t *tokens, const uint8_t *screen, const float *dither, float *values, int64_t *ids, int64_t first,
    int64_t num_rows, int64_t vocabulary, int64_t width);
void oscine_pack(
    const uint8_t *blocks, const uint8_t *scales, uint8_t *out, int64_t num_experts, int64_t num_rows, int64_t num_blocks);

static void *take(size_t bytes) {
    void *memory = malloc(bytes + 64);
    if (!memory || fread(memory, 1, bytes, stdin) != bytes) exit(2);
    return memory;
}

/* x [T, K] float32, w [N, K] float32 or bfloat16 */
static void linear(int64_t num_tokens, int64_t num_rows, int64_t width, int64_t kind) {
    const float *x = take(4 * num_tokens * width);
    void *w = take((kind == FLOAT32 ? 4 : 2) * num_rows * width);
    float *y = malloc(4 * num_tokens * num_rows);
    if (kind == INT8) {
        uint8_t *packed = malloc(oscine_dense_bytes(num_rows, (width + BLOCK - 1) / BLOCK));
        oscine_pack_dense(w, packed, num_rows, width);
        w = packed;
    }
    if (oscine_linear(x, w, kind, NULL, y, num_tokens, num_rows, width)) exit(3);
    fwrite(y, 4, num_tokens * num_rows, stdout);
}

static uint8_t *experts(int64_t num_experts, int64_t num_rows, int64_t num_blocks) {
    const uint8_t *blocks = take(num_experts * num_rows * num_blocks * 16);
    const uint8_t *scales = take(num_experts * num_rows * num_blocks);
    uint8_t *packed = malloc(num_experts * oscine_packed_bytes(num_rows, num_blocks));
    oscine_pack(blocks, scales, packed, num_experts, num_rows, num_blocks);
    return packed;
}

/* x [T, H], ids int64 [T, K], weights [T, K], then blocks, scales and bias of gate_up and of down */
static void moe(int64_t num_tokens, int64_t width, int64_t inner, int64_t num_experts, int64_t per_token) {
    const int64_t width_blocks = (width + BLOCK - 1) / BLOCK, inner_blocks = (inner + BLOCK - 1) / BLOCK;
    const float *x = take(4 * num_tokens * width);
    const int64_t *ids = take(8 * num_tokens * per_token);
    const float *weights = take(4 * num_tokens * per_token);
    const uint8_t *gate_up = experts(num_experts, 2 * inner, width_blocks);
    const float *gate_up_bias = take(4 * num_experts * 2 * inner);
    const uint8_t *down = experts(num_experts, width, inner_blocks);
    const float *down_bias = take(4 * num_experts * width);
    float *out = malloc(4 * num_tokens * width);
    if (oscine_moe(
            x, ids, weights, gate_up, gate_up_bias, down, down_bias, out, num_tokens, width, inner, width_blocks,
            inner_blocks, num_experts, per_token, 7.0f, NULL, NULL))
        exit(3);
    fwrite(out, 4, num_tokens * width, stdout);
}

/* x [T, H] float32, head [V, H] bfloat16, dither [32 B], temperatures [T], seeds and positions int64 [T]. The scores and
   tokens of all rows, first without a screen and then with it. */
static void choose(int64_t num_tokens, int64_t num_rows, int64_t width) {
    const int64_t num_blocks = (width + BLOCK - 1) / BLOCK;
    const float *x = take(4 * num_tokens * width);
    const uint16_t *weights = take(2 * num_rows * width);
    const float *dither = take(4 * num_blocks * BLOCK), *temperatures = take(4 * num_tokens);
    const int64_t *seeds = take(8 * num_tokens), *positions = take(8 * num_tokens);
    uint8_t *head = malloc(oscine_dense_bytes(num_rows, num_blocks));
    uint8_t *screen = malloc(oscine_packed_bytes(num_rows, num_blocks));
    oscine_pack_dense(weights, head, num_rows, width);
    if (oscine_screen(head, dither, screen, num_rows, num_blocks)) exit(3);
    float *values = malloc(4 * num_tokens);
    int64_t *ids = malloc(8 * num_tokens);
    for (int i = 0; i < 2; i++) {
        if (oscine_choose(
                x, head, INT8, temperatures, seeds, positions, NULL, NULL, 0, NULL, i ? screen : NULL, dither, values, ids, 0,
                num_tokens, num_rows, width))
            exit(3);
        fwrite(values, 4, num_tokens, stdout);
        for (int64_t n = 0; n < num_tokens; n++) {
            const float id = (float)ids[n];
            fwrite(&id, 4, 1, stdout);
        }
    }
}

int main(void) {
    const int64_t *a = take(64);
    if (a[0] == 0)
        linear(a[1], a[2], a[3], a[4]);
    else if (a[0] == 2)
        choose(a[1], a[2], a[3]);
    else
        moe(a[1], a[2], a[3], a[4], a[5]);
    return 0;
}
