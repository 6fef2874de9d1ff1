"""A plan as the tensors of one model step.

Knows the layout of ops.interface.Batch and of the slots; nothing of models, sampling or requests. Shape suffixes as in
ops/interface.py.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oscine.executor.slots import IntArray, PageArray, Slots
from oscine.ops.interface import Batch, PageGroup
from oscine.types import ScheduledSequence


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The sequences of a plan, column by column."""

    slots_S: IntArray
    starts_S: IntArray  # position of the first token
    ends_S: IntArray  # position after the last token: tokens in the cache after this step
    query_starts_S1: IntArray  # as in Batch

    @classmethod
    def of(cls, sequences: list[ScheduledSequence]) -> "StepArrays":
        slots_S, starts_S, lens_S = np.array([(s.slot, s.start, s.num_tokens) for s in sequences], np.int64).T
        query_starts_S1 = np.zeros(len(sequences) + 1, np.int64)
        np.cumsum(lens_S, out=query_starts_S1[1:])
        return cls(slots_S, starts_S, starts_S + lens_S, query_starts_S1)


def build_batch(step: StepArrays, slots: Slots, logits_rows_N: IntArray, device: torch.device) -> Batch:
    """`logits_rows_N`: the tokens of the step, counted from 0, whose logits are wanted."""
    lens_S = step.ends_S - step.starts_S
    max_query_len = int(lens_S.max())
    if max_query_len == 1:
        positions_T, slots_T = step.starts_S, step.slots_S
    else:
        shifts_S = step.starts_S - step.query_starts_S1[:-1]
        positions_T = np.arange(step.query_starts_S1[-1]) + shifts_S.repeat(lens_S)
        slots_T = step.slots_S.repeat(lens_S)
    max_context_len = int(step.ends_S.max())
    num_columns = -(-max_context_len // slots.page_size)
    pages_T, offsets_T = np.divmod(positions_T, slots.page_size)

    def put(array: NDArray[np.generic], dtype: type[np.generic] = np.int64) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype)).to(device, non_blocking=True)

    def group(table: PageArray) -> PageGroup:
        slot_mapping_T = table[slots_T, pages_T].astype(np.int64) * slots.page_size + offsets_T
        return PageGroup(put(table[step.slots_S, :num_columns], np.int32), put(slot_mapping_T))

    return Batch(
        token_ids_T=put(slots.token_ids[slots_T, positions_T]),
        positions_T=put(positions_T),
        query_starts_S1=put(step.query_starts_S1, np.int32),
        context_lens_S=put(step.ends_S, np.int32),
        full=group(slots.tables.full),
        sliding=group(slots.tables.sliding),
        logits_rows_N=put(logits_rows_N),
        max_query_len=max_query_len,
        max_context_len=max_context_len,
    )
