"""The sampled tokens that the host has counted.

With drafts, how many tokens a step gives is known only once it is read. So positions are known late, too.
"""

from collections import deque
from collections.abc import Callable
from functools import cache

from oscine.executor.batch.slots import IntArray, Rows, Slots
from oscine.executor.batch.step_arrays import StepArrays
from oscine.executor.launched import LaunchedStep


class KnownTokens:
    def __init__(self, slots: Slots, append: Callable[[int, list[int]], None]) -> None:
        """`append` is told the tokens of each slot when they are read."""
        self._slots, self._append = slots, append
        self._unread: deque[LaunchedStep] = deque()

    def add(self, launched: LaunchedStep) -> None:
        self._unread.append(launched)

    def read(self, end: int) -> None:
        """Counts the tokens of launched steps with numbers below `end`, in order. Waits for them."""
        while self._unread and self._unread[0].number < end:
            launched = self._unread.popleft()
            rows, ids_N = launched.rows, launched.token_ids()
            rows.positions()  # from now on unknown but for the cache
            is_new_N = (ids_N >= 0) & (launched.owners_N == self._slots.owners[rows.slots_N])
            slots = rows.slots_N[is_new_N].tolist()
            by_slot: dict[int, list[int]] = {}
            for slot, token in zip(slots, ids_N[is_new_N].tolist(), strict=True):
                by_slot.setdefault(slot, []).append(token)
            for slot, tokens in by_slot.items():
                self._slots.num_known[slot] += len(tokens)
                self._append(slot, tokens)

    def read_all_of(self, slots: set[int]) -> None:
        """Up to the last launched step that has one of these slots."""
        ends = [step.number + 1 for step in self._unread if not slots.isdisjoint(step.rows.slots_N.tolist())]
        self.read(max(ends, default=0))

    def rows(self, number: int, step: StepArrays, drafts: Callable[[], IntArray] | None) -> Rows:
        """Of step `number`, where sequences may have drafts. `drafts`: the ids, per row of `step`; may wait."""
        slots_N, places_N = step.slots_S[step.samples_S], step.places_S[step.samples_S]

        def positions() -> IntArray:
            self.read(number)
            found_N: IntArray = self._slots.num_known[slots_N] + places_N
            return found_N

        def ids() -> IntArray:
            found_N: IntArray = places_N if drafts is None else drafts()[step.samples_S]
            return found_N

        return Rows(slots_N, places_N, cache(positions), ids)
