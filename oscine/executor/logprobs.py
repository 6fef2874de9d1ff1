"""Log-probabilities as records, of sampled tokens and of prompts. Suffixes as in ops/interface.py."""

import torch
from torch import Tensor

from oscine.ops.interface import Sampled
from oscine.types import TokenLogprobs

_ROWS_AT_ONCE = 64  # bounds the log-softmax of a long prompt over a large vocabulary


def records(sampled: Sampled, num_top: list[int]) -> list[TokenLogprobs]:
    """One record a row; row i with its num_top[i] most probable tokens (at most those that were asked of the op)."""
    assert sampled.logprobs_N is not None
    assert sampled.top_ids_NK is not None
    assert sampled.top_logprobs_NK is not None
    top_ids, top_values = sampled.top_ids_NK.tolist(), sampled.top_logprobs_NK.tolist()
    return [
        TokenLogprobs(token_id, value, tuple(zip(ids[: max(k, 0)], values[: max(k, 0)], strict=True)))
        for token_id, value, ids, values, k in zip(
            sampled.token_ids_N.tolist(), sampled.logprobs_N.tolist(), top_ids, top_values, num_top, strict=True
        )
    ]


def of_tokens(logits_NV: Tensor, token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
    """The records of given tokens, one a row."""
    found: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), _ROWS_AT_ONCE):
        logprobs_NV = logits_NV[start : start + _ROWS_AT_ONCE].log_softmax(-1)
        ids_N = torch.tensor(token_ids[start : start + _ROWS_AT_ONCE], device=logits_NV.device)
        chosen_N = logprobs_NV.gather(1, ids_N[:, None]).squeeze(1)
        top = logprobs_NV.topk(num_top, dim=-1)
        found += records(Sampled(ids_N, chosen_N, top.indices, top.values), [num_top] * len(ids_N))
    return found
