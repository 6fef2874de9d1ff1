"""What the host knows of the running sequences: the tokens they came with, and how many pages they have.

Knows no device: page tables and sampled tokens are there. A row is written when a sequence takes the slot.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oscine.types import NewSequence, ScheduledSequence

IntArray = NDArray[np.int64]
ColumnArray = NDArray[np.int32]


PageEntries = list[list[int]]  # of the page tables that a plan writes: their slots, columns, and pages per group


class Rows(NamedTuple):
    """The rows of a step that sample a token. Rows of a sequence follow one another: see StepArrays."""

    slots_N: IntArray
    places_N: IntArray  # 0, or which draft the row computes
    positions: Callable[[], IntArray]  # [N], of the tokens that are sampled; may wait for the step before
    drafts: Callable[[], IntArray]  # [N], ids of the drafts; anything in rows without one; may wait

    @property
    def have_drafts(self) -> bool:
        return bool(self.places_N.any())


class Slots:
    def __init__(self, num_slots: int) -> None:
        self.num_given = np.zeros(num_slots, np.int64)  # tokens known when the sequence took the slot
        self.num_known = np.zeros(num_slots, np.int64)  # tokens known here by now
        self.owners = np.zeros(num_slots, np.int64)  # a number for each sequence
        self.num_prompt_tokens = [0] * num_slots
        self._given: list[ColumnArray] = [np.empty(0, np.int32)] * num_slots
        self.num_pages = np.zeros(num_slots, np.int64)  # in the page table of each group

    def assign(self, new: NewSequence, entries: PageEntries) -> None:
        slot = new.slot
        self._given[slot] = np.array(new.token_ids, np.int32)
        self.num_given[slot] = self.num_known[slot] = len(new.token_ids)
        self.owners[slot] += 1
        self.num_prompt_tokens[slot] = new.num_prompt_tokens
        self.num_pages[slot] = 0
        self._append(slot, new.pages, entries)

    def extend(self, sequence: ScheduledSequence, entries: PageEntries) -> None:
        """Appends the pages that a plan gives."""
        if sequence.pages:
            self._append(sequence.slot, sequence.pages, entries)

    def given(self, slot: int, start: int, end: int) -> ColumnArray:
        """Tokens at positions start .. end - 1, which the sequence must have come with."""
        assert end <= self.num_given[slot], "a token that only the device knows"
        return self._given[slot][start:end]

    def _append(self, slot: int, pages: list[list[int]], entries: PageEntries) -> None:
        start = int(self.num_pages[slot])
        self.num_pages[slot] = end = start + len(pages[0])
        for values, added in zip(entries, ([slot] * (end - start), range(start, end), *pages), strict=True):
            values += added
