"""Keys and values of the fake executor: what a token leaves in a page depends on all tokens up to it, as in a model.

So a page that was lost, mixed up or damaged on its way is noticed when a sequence begins on it. Each layer of a page
has four bytes per token, or as many as there are, in the place of the first head's key. The rest of a page is empty.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from oscine.kv_group import KVGroup
from oscine.types import NewSequence, ScheduledSequence, StepPlan

_MARK_BYTES = 4

Marks = NDArray[np.uint64]


class _Slot:
    def __init__(self, new: NewSequence) -> None:
        self.tables = [list(pages) for pages in new.pages]
        self._tokens = np.array(new.token_ids, np.uint64)
        self._last = np.uint64(0)
        self.marks = np.zeros(0, np.uint64)  # of all tokens
        self.extend(self._tokens)

    def extend(self, tokens: Marks) -> None:
        """Sums with weights by position, so that order counts; they wrap around."""
        first = len(self.marks)
        weights = (np.arange(first, first + len(tokens), dtype=np.uint64) * np.uint64(2) + np.uint64(1)) ** np.uint64(3)
        sums = self._last + np.cumsum((tokens + np.uint64(1)) * (weights * np.uint64(0x9E3779B97F4A7C15)))
        if len(sums):
            self._last = sums[-1]
        self.marks = np.concatenate((self.marks, sums))


class FakePages:
    """The pages of all groups, and what each sequence put there."""

    def __init__(self, groups: Sequence[KVGroup], num_pages: Sequence[int]) -> None:
        self._groups = groups
        self.memory = [
            np.zeros((count, group.page_bytes), np.uint8) for group, count in zip(groups, num_pages, strict=True)
        ]
        for of_group in self.memory:
            of_group.fill(0)  # now, not in the middle of a step
        # [pages, layers, tokens, bytes]: the first bytes of each token's key in the first head
        self._keys = [
            of_group.reshape(len(of_group), len(group.layers), 2, group.heads_per_rank, group.page_size, -1)[:, :, 0, 0]
            for group, of_group in zip(groups, self.memory, strict=True)
        ]
        self._slots: dict[int, _Slot] = {}

    def run(self, plan: StepPlan, sampled: dict[int, int]) -> dict[int, str]:
        """Writes the pages of a step. Returns errors by slot, of new sequences whose cached pages are not theirs."""
        errors = {}
        for new in plan.new:
            self._slots[new.slot] = slot = _Slot(new)
            if not self._holds(slot, new.num_cached_tokens):
                errors[new.slot] = "a cached page does not hold what it should"
        for sequence in plan.sequences:
            slot = self._slots[sequence.slot]
            for table, pages in zip(slot.tables, sequence.pages, strict=bool(sequence.pages)):
                table += pages
            self._write(slot, sequence)
            if sequence.sample:
                slot.extend(np.array([sampled[sequence.slot]], np.uint64))
        return errors

    def _write(self, slot: _Slot, sequence: ScheduledSequence) -> None:
        positions = np.arange(sequence.start, sequence.start + sequence.num_tokens)
        for keys, table, group in zip(self._keys, slot.tables, self._groups, strict=True):
            pages = np.array(table)[positions // group.page_size]
            marks = _bytes(slot.marks[positions], keys.shape[-1])
            size = marks.shape[-1]
            keys[pages, :, positions % group.page_size, :size] = marks[:, None]

    def _holds(self, slot: _Slot, num_cached: int) -> bool:
        for keys, table, group in zip(self._keys, slot.tables, self._groups, strict=True):
            positions = np.arange(group.first_needed(len(table)) * group.page_size, num_cached)
            pages = np.array(table, np.int64)[positions // group.page_size]
            marks = _bytes(slot.marks[positions], keys.shape[-1])
            size = marks.shape[-1]
            if (keys[pages, :, positions % group.page_size, :size] != marks[:, None]).any():
                return False
        return True


def _bytes(marks: Marks, most: int) -> NDArray[np.uint8]:
    """[tokens, bytes]: the upper ones."""
    return marks.view(np.uint8).reshape(-1, 8)[:, -min(_MARK_BYTES, most) :]
