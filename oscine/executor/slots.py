"""What the host knows of the running sequences: the tokens they came with, and how many pages they have.

Knows no device: page tables and sampled tokens are there. A row is written when a sequence takes the slot.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from oscine.types import NewSequence, ScheduledSequence

IntArray = NDArray[np.int64]
ColumnArray = NDArray[np.int32]


@dataclass(slots=True)
class PageUpdates:
    """Entries of the page tables that a plan writes, column by column."""

    slots: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    full: list[int] = field(default_factory=list)
    sliding: list[int] = field(default_factory=list)

    def as_array(self) -> ColumnArray:
        """[4, entries]"""
        return np.array((self.slots, self.columns, self.full, self.sliding), np.int32)


class Slots:
    def __init__(self, num_slots: int) -> None:
        self.num_given = np.zeros(num_slots, np.int64)  # tokens known when the sequence took the slot
        self.num_prompt_tokens = [0] * num_slots
        self._given: list[ColumnArray] = [np.empty(0, np.int32)] * num_slots
        self._num_pages = [0] * num_slots

    def assign(self, new: NewSequence, updates: PageUpdates) -> None:
        slot = new.slot
        self._given[slot] = np.array(new.token_ids, np.int32)
        self.num_given[slot] = len(new.token_ids)
        self.num_prompt_tokens[slot] = new.num_prompt_tokens
        self._num_pages[slot] = 0
        self._append(slot, new.full_pages, new.sliding_pages, updates)

    def extend(self, sequence: ScheduledSequence, updates: PageUpdates) -> None:
        """Appends the pages that a plan gives."""
        if sequence.full_pages:
            self._append(sequence.slot, sequence.full_pages, sequence.sliding_pages, updates)

    def given(self, slot: int, start: int, end: int) -> ColumnArray:
        """Tokens at positions start .. end - 1, which the sequence must have come with."""
        assert end <= self.num_given[slot], "a token that only the device knows"
        return self._given[slot][start:end]

    def _append(self, slot: int, full_pages: list[int], sliding_pages: list[int], updates: PageUpdates) -> None:
        assert len(full_pages) == len(sliding_pages), "both groups grow together"
        start = self._num_pages[slot]
        self._num_pages[slot] = end = start + len(full_pages)
        updates.slots += [slot] * len(full_pages)
        updates.columns += range(start, end)
        updates.full += full_pages
        updates.sliding += sliding_pages
