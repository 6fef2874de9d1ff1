"""Sampling: adjustments of the logits, truncation, and a choice that depends on (seed, position, logits) alone.

    bias -> repetition, frequency, presence penalties -> allowed tokens
         -> temperature -> top_k -> top_p -> min_p -> choice

Each truncation renormalises the result of the one before: top_p counts probability among the top_k. min_p is relative
to the most probable token. The choice is argmax(logit + g) with g Gumbel noise, which draws from the softmax; the noise
is a hash (noise.py), so nothing else in the batch can change it. Temperature 0 takes the argmax; a batch of such rows
is neither sorted nor hashed. Ties go to the lowest id. A logit of -inf, or NaN in a row with noise, is never chosen
while another remains. Where none remains, as after weights that are NaN, the id is -1.
"""

import torch
from torch import Tensor

from oscine.ops.interface import Sampled, SamplingBatch
from oscine.ops.sample.noise import gumbel

LOWEST_TEMPERATURE = 1e-20  # above 0; keeps logits / temperature finite, and is greedy but for exact ties


def sample(logits_NV: Tensor, sampling: SamplingBatch) -> Sampled:
    """logits [N, V] float32, not written; log-probabilities are those of these logits, before any adjustment."""
    adjusted_NV = restrict(penalize(add_bias(logits_NV, sampling), sampling), sampling)
    _, ids_N = best(adjusted_NV, sampling, 0)
    return with_logprobs(ids_N, logits_NV, sampling.num_logprobs)


def best(logits_NV: Tensor, sampling: SamplingBatch, first: int) -> tuple[Tensor, Tensor]:
    """The choice among the tokens of a part of the vocabulary, which begins with token `first`.

    Returns (scores float32 [N], ids int64 [N] in the whole vocabulary). Of all parts, the one with the highest score
    has the token that would be chosen from all logits. Rows of a part are not truncated.
    """
    scores_NV = logits_NV if sampling.greedy else _scores(logits_NV, sampling, first)
    values_N, ids_N = scores_NV.max(-1)
    return values_N, (ids_N + first).masked_fill(~(values_N > -torch.inf), -1)


def with_logprobs(ids_N: Tensor, logits_NV: Tensor, num_top: int | None) -> Sampled:
    """Chosen tokens with their log-probabilities and the `num_top` highest ones; None: without any."""
    if num_top is None:
        return Sampled(ids_N)
    logprobs_NV = logits_NV.log_softmax(-1)
    chosen_N = logprobs_NV.gather(1, ids_N.clamp(min=0)[:, None]).squeeze(1)
    top = logprobs_NV.topk(num_top, dim=-1)
    return Sampled(ids_N, chosen_N, top.indices, top.values)


def add_bias(logits_NV: Tensor, sampling: SamplingBatch) -> Tensor:
    if sampling.bias_rows is None:
        return logits_NV
    assert sampling.bias_ids is not None
    assert sampling.bias_values is not None
    return logits_NV.index_put((sampling.bias_rows, sampling.bias_ids), sampling.bias_values, accumulate=True)


def penalize(logits_NV: Tensor, sampling: SamplingBatch) -> Tensor:
    if sampling.repetition_N is None:
        return logits_NV
    assert sampling.output_counts_NV is not None
    assert sampling.prompt_mask_NV is not None
    assert sampling.frequency_N is not None
    assert sampling.presence_N is not None
    generated_NV = sampling.output_counts_NV > 0
    repetition_N1 = sampling.repetition_N[:, None]
    repeated_NV = torch.where(logits_NV > 0, logits_NV / repetition_N1, logits_NV * repetition_N1)
    logits_NV = torch.where(generated_NV | sampling.prompt_mask_NV, repeated_NV, logits_NV)
    penalty_NV = sampling.frequency_N[:, None] * sampling.output_counts_NV
    return logits_NV - penalty_NV - sampling.presence_N[:, None] * generated_NV


def restrict(logits_NV: Tensor, sampling: SamplingBatch) -> Tensor:
    """-inf for tokens that are not allowed."""
    if sampling.allowed_KW is None:
        return logits_NV
    assert sampling.allowed_row_N is not None
    token_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    words_KV = sampling.allowed_KW[:, token_V >> 5]
    allowed_KV = (words_KV >> (token_V & 31)) & 1 == 1
    row_N = sampling.allowed_row_N.long()
    allowed_NV = allowed_KV[row_N.clamp(min=0)] | (row_N < 0)[:, None]
    return logits_NV.masked_fill(~allowed_NV, -torch.inf)


def _scores(logits_NV: Tensor, sampling: SamplingBatch, first: int) -> Tensor:
    temperature_N1 = sampling.temperature_N[:, None]
    greedy_N1 = temperature_N1 == 0
    scaled_NV = logits_NV / temperature_N1.masked_fill(greedy_N1, 1.0).clamp(min=LOWEST_TEMPERATURE)
    scaled_NV = scaled_NV.masked_fill(scaled_NV.isnan(), -torch.inf)
    kept_NV = _truncate(scaled_NV, sampling) if sampling.truncated else scaled_NV
    noise_NV = gumbel(sampling.seed_N, sampling.position_N, logits_NV.shape[1], first)
    return torch.where(greedy_N1, logits_NV, kept_NV + noise_NV)


def _truncate(logits_NV: Tensor, sampling: SamplingBatch) -> Tensor:
    """-inf for every token that top_k, top_p or min_p cuts off; the most probable token always stays."""
    sorted_NV, order_NV = logits_NV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    top_k_N1, top_p_N1 = sampling.top_k_N[:, None], sampling.top_p_N[:, None]
    keep_NV = (rank_V < top_k_N1) | (top_k_N1 == 0)
    probability_NV = sorted_NV.masked_fill(~keep_NV, -torch.inf).softmax(-1)
    before_NV = probability_NV.cumsum(-1) - probability_NV
    keep_NV &= (before_NV < top_p_N1) | (top_p_N1 >= 1)
    keep_NV &= probability_NV >= sampling.min_p_N[:, None] * probability_NV[:, :1]
    keep_NV |= rank_V == 0
    return logits_NV.masked_fill(~torch.empty_like(keep_NV).scatter_(1, order_NV, keep_NV), -torch.inf)
