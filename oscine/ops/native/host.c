/* Experts as a host function of a CUDA stream: the driver calls it from a thread of its own, without Python. */
#include "oscine.h"

/* The arguments of oscine_moe. */
struct host_moe {
    const float *x;
    int64_t *ids;
    const float *weights;
    const uint8_t *gate_up;
    const float *gate_up_bias;
    const uint8_t *down;
    const float *down_bias;
    float *out;
    int64_t num_tokens, width, inner, width_blocks, inner_blocks, num_experts, per_token;
    float limit;
};

/* A rehearsed step has undefined ids. If memory runs out, results are NaN, and the sequences end with an error. */
void oscine_host_moe(void *context) {
    const struct host_moe *a = context;
    for (int64_t i = 0; i < a->num_tokens * a->per_token; i++)
        if (a->ids[i] < 0 || a->ids[i] >= a->num_experts) a->ids[i] = 0;
    const int status = oscine_moe(
        a->x, a->ids, a->weights, a->gate_up, a->gate_up_bias, a->down, a->down_bias, a->out, a->num_tokens, a->width,
        a->inner, a->width_blocks, a->inner_blocks, a->num_experts, a->per_token, a->limit, NULL, NULL);
    if (status)
        for (int64_t i = 0; i < a->num_tokens * a->width; i++) a->out[i] = NAN;
}
