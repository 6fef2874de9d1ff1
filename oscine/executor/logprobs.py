"""Log-probabilities as records, of sampled tokens and of prompts. Suffixes as in ops/interface.py."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from oscine.executor.slots import ColumnArray
from oscine.executor.transfer import download, upload
from oscine.ops.interface import Sampled
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
    parts = []
    for start in range(0, len(token_ids), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        logprobs_NV = head(x_NH[rows]).log_softmax(-1)
        top = logprobs_NV.topk(num_top, dim=-1)
        parts.append((logprobs_NV.gather(1, ids_N[rows, None]).squeeze(1), top.indices, top.values))
    return Sampled(ids_N, *(torch.cat(columns) for columns in zip(*parts, strict=True)))


def joined(parts: list[Sampled]) -> Sampled:
    """The rows of all parts, which have the same fields."""
    return _map(lambda columns: columns[0] if len(columns) == 1 else torch.cat(columns), parts)


def on_host(sampled: Sampled) -> Sampled:
    """See transfer.download."""
    return _map(lambda columns: download(columns[0]), [sampled])


def _map(function: Callable[[list[Tensor]], Tensor], parts: list[Sampled]) -> Sampled:
    """Field by field; an absent field stays absent."""
    ids = function([part.token_ids_N for part in parts])
    columns = (
        [column for column in field if column is not None] for field in zip(*(p[1:] for p in parts), strict=True)
    )
    return Sampled(ids, *(function(column) if column else None for column in columns))
