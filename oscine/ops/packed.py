"""The records that the preparation of a step reads and writes. Shape suffixes as in ops/interface.py.

What a step needs from the host travels as one array of int32, in the order of the fields of PackedStep.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

ALIGNED = 4  # elements: 16 bytes

Column = TypeVar("Column", NDArray[np.int32], Tensor)


class PackedSizes(NamedTuple):
    tokens: int  # T
    sequences: int  # S
    logits_rows: int  # N
    sampled: int  # M

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each column begins: aligned, since kernels are compiled anew for pointers that are not."""
        return tuple(accumulate((-(-length // ALIGNED) * ALIGNED for length in _lengths(self)), initial=0))[:-1]

    @property
    def total(self) -> int:
        """Elements of the one array."""
        return self.starts[-1] + _lengths(self)[-1]


class PackedStep(NamedTuple, Generic[Column]):
    """Columns of the one array, on the host (numpy) or on the device."""

    given_T: Column  # the token's id, or -1: the one that was sampled last in its row of the state
    positions_T: Column
    token_slots_T: Column  # row of the state
    slots_S: Column  # row of the state
    context_lens_S: Column  # as in Batch
    query_starts_S1: Column  # as in Batch
    logits_rows_N: Column  # as in Batch
    sampled_slots_M: Column  # where the m-th sampled id is written back; the last row of last_ids is for padding

    @classmethod
    def of(cls, flat: Column, sizes: PackedSizes) -> "PackedStep[Column]":
        """Views of an array of at least sizes.total elements."""
        spans = zip(sizes.starts, _lengths(sizes), strict=True)
        return cls(*(flat[start : start + length] for start, length in spans))


@dataclass(frozen=True, slots=True)
class BatchState:
    """What the device keeps of running sequences between steps, one row a slot."""

    tables: Tensor  # int32 [groups, slots, B]; page of tokens [b * P, (b + 1) * P); anything where there is none
    last_ids: Tensor  # int32 [slots + 1]; the token sampled last
    page_size: int  # P, tokens


def _lengths(sizes: PackedSizes) -> tuple[int, ...]:
    """Of each column, in order."""
    tokens, sequences, rows, sampled = sizes
    return tokens, tokens, tokens, sequences, sequences, sequences + 1, rows, sampled
