"""Log-probabilities as records, of sampled tokens and of prompts. Suffixes as in ops/interface.py."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from oscine.executor.batch.copies import download, upload
from oscine.executor.batch.slots import ColumnArray
from oscine.ops.interface import Sampled
from oscine.ops.sample.reference import with_logprobs
from oscine.types import TokenLogprobs

ROWS_AT_ONCE = 64  # bounds the logits of a long prompt over a large vocabulary


def records(sampled: Sampled, num_top: list[int]) -> list[TokenLogprobs]:
    """One record per row; row i has its num_top[i] most probable tokens (at most as many as the op computed)."""
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


def of_tokens(head: Callable[[Tensor], Tensor], x_NH: Tensor, token_ids: ColumnArray, num_top: int) -> Sampled:
    """Log-probabilities of given tokens as if they had been sampled, one per row of x_NH, the head's input; on its
    device."""
    ids_N = upload(token_ids.astype(np.int64), x_NH.device)
    pieces = [slice(start, start + ROWS_AT_ONCE) for start in range(0, len(token_ids), ROWS_AT_ONCE)]
    return joined([with_logprobs(ids_N[rows], head(x_NH[rows]), num_top) for rows in pieces])


def joined(parts: list[Sampled]) -> Sampled:
    """The rows of all parts, which have the same fields."""
    if len(parts) == 1:
        return parts[0]
    return Sampled._make(None if field[0] is None else torch.cat(field) for field in zip(*parts, strict=True))


def on_host(sampled: Sampled) -> Sampled:
    """See transfer.download."""
    return Sampled._make(None if field is None else download(field) for field in sampled)
