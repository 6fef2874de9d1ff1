"""What rank 0 sends to the other ranks in each step: its plan, the allowed tokens and the forced tokens."""

from typing import Any

import numpy as np
import torch
from msgspec import msgpack

from oscine.executor.batch.copies import staging
from oscine.executor.sampling.headers import CandidateSet
from oscine.executor.sampling.rules import Masks
from oscine.types import StepPlan

encode_plan = msgpack.Encoder().encode
decode_plan = msgpack.Decoder(StepPlan).decode
encode_forced = msgpack.Encoder().encode  # of Rules.forced
decode_forced = msgpack.Decoder(list[list[int]]).decode

_FREE, _FEW, _MASKS = range(3)
_HEAD = 3  # numbers of 8 bytes


def encode_rules(allowed: Masks | CandidateSet | None) -> tuple[Any, ...]:
    """Buffers of one message: what it is, its rows, their numbers, and which rows they are."""
    match allowed:
        case CandidateSet(rows_K, ids_KA):
            return np.array([_FEW, *ids_KA.shape]), ids_KA, rows_K
        case Masks(masks_KW, row_N):
            return np.array([_MASKS, *masks_KW.shape]), masks_KW.numpy(), row_N
        case _:
            return (np.array([_FREE, 0, 0]),)


def decode_rules(message: bytearray, device: torch.device) -> Masks | CandidateSet | None:
    """`device`: the one that masks are for."""
    kind, *shape = np.frombuffer(message, np.int64, _HEAD).tolist()
    if kind == _FREE:
        return None
    numbers, dtype = shape[0] * shape[1], np.dtype(np.int64 if kind == _FEW else np.int32)
    start = _HEAD * 8 + numbers * dtype.itemsize
    table = np.frombuffer(message, dtype, numbers, _HEAD * 8).reshape(shape)
    rows = np.frombuffer(message, dtype, offset=start)
    if kind == _FEW:
        return CandidateSet(rows, table)
    masks_KW = staging(table.shape, device)
    masks_KW.numpy()[:] = table
    return Masks(masks_KW, rows)
