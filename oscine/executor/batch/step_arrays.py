"""A plan as the one array that a step needs from the host.

Knows the layout of ops.step.PackedStep and of the slots; nothing of models, sampling or requests. Shape suffixes as in
ops/interface.py.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oscine.executor.batch.slots import ColumnArray, IntArray, Slots
from oscine.ops.packed import PackedSizes, PackedStep
from oscine.types import ScheduledSequence

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The sequences of a batch, column by column.

    A sequence of the plan that verifies k drafts is 1 + k sequences here, of one token each: the token that it sampled
    last, then its drafts. While the host does not know how many drafts of the step before were accepted, positions
    are lower bounds; the device knows better.
    """

    slots_S: IntArray
    starts_S: IntArray  # position of the first token
    lens_S: IntArray  # tokens
    samples_S: BoolArray  # whether a token is sampled
    places_S: IntArray  # 0, or which draft it is: 1, 2, ...
    ends_S: IntArray  # position after the last token: tokens in the cache after this step
    query_starts_S1: IntArray  # as in Batch

    @classmethod
    def of(cls, sequences: list[ScheduledSequence], num_drafts: list[int] | None = None) -> "StepArrays":
        """`num_drafts`: per sequence, what it verifies; None: nothing."""
        columns = np.array([(s.slot, s.start, s.num_tokens, s.sample) for s in sequences], np.int64).T
        if num_drafts is None:
            return cls.of_columns(columns[0], columns[1], columns[2], columns[3].astype(np.bool_))
        counts = np.array(num_drafts, np.int64) + 1
        columns = columns.repeat(counts, axis=1)
        places_S = np.arange(columns.shape[1]) - (counts.cumsum() - counts).repeat(counts)
        return cls.of_columns(columns[0], columns[1] + places_S, columns[2], columns[3].astype(np.bool_), places_S)

    @classmethod
    def of_columns(
        cls,
        slots_S: IntArray,
        starts_S: IntArray,
        lens_S: IntArray,
        samples_S: BoolArray,
        places_S: IntArray | None = None,
    ) -> "StepArrays":
        query_starts_S1 = np.zeros(len(lens_S) + 1, np.int64)
        np.cumsum(lens_S, out=query_starts_S1[1:])
        if places_S is None:
            places_S = np.zeros(len(lens_S), np.int64)
        return cls(slots_S, starts_S, lens_S, samples_S, places_S, starts_S + lens_S, query_starts_S1)

    @classmethod
    def of_padding(cls, padding_slot: int) -> "StepArrays":
        """One token of no sequence."""
        zero = np.zeros(1, np.int64)
        return cls.of_columns(zero + padding_slot, zero, zero + 1, np.zeros(1, np.bool_))

    @property
    def num_tokens(self) -> int:
        return int(self.query_starts_S1[-1])

    @property
    def num_decodes(self) -> int:
        """Leading sequences with one token each."""
        others = self.lens_S != 1
        return int(others.argmax()) if others.any() else len(others)

    @property
    def sampled_rows(self) -> IntArray:
        """[M]: the tokens after which one is sampled, counted from 0."""
        rows_M: IntArray = self.query_starts_S1[1:][self.samples_S] - 1
        return rows_M

    def filled(self, num_tokens: int, num_sequences: int, padding_slot: int) -> "StepArrays":
        """With a sequence of the padding slot that has all tokens up to `num_tokens`, and then empty ones.

        There must be fewer sequences than `num_sequences`, and no more tokens than `num_tokens`.
        """
        zeros = np.zeros(num_sequences - len(self.slots_S), np.int64)
        lens = zeros.copy()
        lens[0] = num_tokens - self.num_tokens
        return StepArrays.of_columns(
            np.concatenate((self.slots_S, zeros + padding_slot)),
            np.concatenate((self.starts_S, zeros)),
            np.concatenate((self.lens_S, lens)),
            np.concatenate((self.samples_S, zeros.astype(np.bool_))),
            np.concatenate((self.places_S, zeros)),
        )

    def padded(self, size: int) -> "StepArrays":
        """With copies of the first sequence, which sample nothing, up to `size` sequences."""
        rows = np.zeros(size, np.int64)
        rows[: len(self.slots_S)] = np.arange(len(self.slots_S))
        samples_S = self.samples_S[rows]
        samples_S[len(self.slots_S) :] = False
        columns = self.slots_S[rows], self.starts_S[rows], self.lens_S[rows]
        return StepArrays.of_columns(*columns, samples_S, self.places_S[rows])


def pack(
    step: StepArrays, slots: Slots, rows_N: IntArray, sampled_slots_M: IntArray
) -> tuple[ColumnArray, PackedSizes]:
    """`rows_N`: the tokens of the step, counted from 0, whose logits are wanted. `sampled_slots_M`: see PackedStep."""
    query_starts_S1 = step.query_starts_S1
    sizes = PackedSizes(int(query_starts_S1[-1]), len(step.slots_S), len(rows_N), len(sampled_slots_M))
    flat = np.empty(sizes.total, np.int32)
    packed = PackedStep.of(flat, sizes)
    shifts_S = step.starts_S - query_starts_S1[:-1]
    packed.positions_T[:] = np.arange(sizes.tokens) + shifts_S.repeat(step.lens_S)
    packed.token_slots_T[:] = step.slots_S.repeat(step.lens_S)
    packed.slots_S[:] = step.slots_S
    packed.query_starts_S1[:] = query_starts_S1
    packed.logits_rows_N[:] = rows_N
    packed.sampled_slots_M[:] = sampled_slots_M
    packed.counts_2[:] = step.num_decodes, np.count_nonzero(step.lens_S)
    packed.given_T.fill(-1)
    is_draft_S = step.places_S > 0
    packed.given_T[query_starts_S1[:-1][is_draft_S]] -= step.places_S[is_draft_S].astype(np.int32)
    for i in (step.starts_S < slots.num_given[step.slots_S]).nonzero()[0].tolist():
        start = int(step.starts_S[i])
        tokens = slots.given(int(step.slots_S[i]), start, start + int(step.lens_S[i]))
        packed.given_T[query_starts_S1[i] : query_starts_S1[i + 1]] = tokens
    return flat, sizes
