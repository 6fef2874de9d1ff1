"""What is kept of the running sequences between steps: their tokens and page tables, one row a slot.

Knows numpy only. A row is written when a sequence takes the slot, and grows with its plan and with what is sampled.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oscine.types import NewSequence, ScheduledSequence

IntArray = NDArray[np.int64]
PageArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PageTables:
    """Row s, column b: the page that holds tokens [b * P, (b + 1) * P) of slot s. Columns in no use hold anything."""

    full: PageArray
    sliding: PageArray


class Slots:
    def __init__(self, num_slots: int, max_model_len: int, page_size: int) -> None:
        self.page_size = page_size
        self.token_ids: NDArray[np.int32] = np.zeros((num_slots, max_model_len), np.int32)
        num_columns = -(-max_model_len // page_size)
        self.tables = PageTables(*(np.full((num_slots, num_columns), -1, np.int32) for _ in range(2)))
        self.num_prompt_tokens = [0] * num_slots
        self._num_pages = [0] * num_slots

    def place(self, new: NewSequence) -> None:
        slot = new.slot
        self.token_ids[slot, : len(new.token_ids)] = new.token_ids
        self.num_prompt_tokens[slot] = new.num_prompt_tokens
        self._num_pages[slot] = 0
        self._append(slot, new.full_pages, new.sliding_pages)

    def extend(self, sequence: ScheduledSequence) -> None:
        """Appends the pages that a plan gives."""
        if sequence.full_pages:
            self._append(sequence.slot, sequence.full_pages, sequence.sliding_pages)

    def _append(self, slot: int, full_pages: list[int], sliding_pages: list[int]) -> None:
        assert len(full_pages) == len(sliding_pages), "both groups grow together"
        start = self._num_pages[slot]
        end = start + len(full_pages)
        self.tables.full[slot, start:end] = full_pages
        self.tables.sliding[slot, start:end] = sliding_pages
        self._num_pages[slot] = end
