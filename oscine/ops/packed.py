"""The records that the preparation of a step reads and writes. Shape suffixes as in ops/interface.py.

What a step needs from the host travels as one array of int32, in the order of the fields of PackedStep. The fake
executor imports this too: torch is not loaded.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

ALIGNED = 4  # elements: 16 bytes
REJECTED = -2  # the id of a sampled token that follows a draft which was not accepted

Column = TypeVar("Column", NDArray[np.int32], "Tensor")


class PackedSizes(NamedTuple):
    tokens: int  # T
    sequences: int  # S
    logits_rows: int  # N
    sampled: int  # M

    @property
    def starts(self) -> tuple[int, ...]:
        """Where each column begins: aligned, since kernels are compiled anew for pointers that are not."""
        return _starts(self)

    @property
    def total(self) -> int:
        """Elements of the one array."""
        return self.starts[-1] + _lengths(self)[-1]


class PackedStep(NamedTuple, Generic[Column]):
    """Columns of the one array, on the host (numpy) or on the device."""

    given_T: Column  # the token's id; or -1: the one that was sampled last, or -1 - j: the j-th draft after it
    positions_T: Column  # of given ids; others follow the length of the sequence
    token_slots_T: Column  # row of the state
    slots_S: Column  # row of the state
    query_starts_S1: Column  # as in Batch
    logits_rows_N: Column  # as in Batch
    sampled_slots_M: Column  # row of the state that the m-th sampled id is for; the last row is for padding
    counts_2: Column  # as in Batch

    @classmethod
    def of(cls, flat: Column, sizes: PackedSizes) -> "PackedStep[Column]":
        """Views of an array of at least sizes.total elements."""
        spans = zip(sizes.starts, _lengths(sizes), strict=True)
        return cls(*(flat[start : start + length] for start, length in spans))


@dataclass(frozen=True, slots=True)
class BatchState:
    """What the device keeps of running sequences between steps, one row per slot."""

    tables: "Tensor"  # int32 [groups, slots, B]; page of tokens [b * P, (b + 1) * P); anything where there is none
    last_ids: "Tensor"  # int32 [slots + 1]; the token sampled last
    lens: "Tensor"  # int32 [slots + 1]; tokens of the sequence, the last sampled one included
    drafts: "Tensor"  # int32 [slots + 1, most drafts, at least 1]; what may follow the token sampled last
    page_size: int  # P, tokens


@lru_cache(1024)
def _starts(sizes: PackedSizes) -> tuple[int, ...]:
    return tuple(accumulate((-(-length // ALIGNED) * ALIGNED for length in _lengths(sizes)), initial=0))[:-1]


def _lengths(sizes: PackedSizes) -> tuple[int, ...]:
    """Of each column, in order."""
    tokens, sequences, rows, sampled = sizes
    return tokens, tokens, tokens, sequences, sequences + 1, rows, sampled, 2
