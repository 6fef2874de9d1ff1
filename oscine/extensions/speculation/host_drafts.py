"""Drafts of a step, made on the host from the tokens that it knows."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np

from oscine.executor.drafts import Drafts, NoDrafts, StepParts
from oscine.extensions.speculation.drafter import HostDrafter
from oscine.types import NewSequence, StepPlan


class HostDrafts(NoDrafts):
    def __init__(self, drafter: HostDrafter, parts: StepParts) -> None:
        self._drafter = drafter
        self._state, self._known, self._rules = parts.state, parts.known, parts.rules

    @contextmanager
    def drafting_with(self, drafter: HostDrafter) -> Iterator[None]:
        """Replaces the drafter for the time of the context. No sequence may be running."""
        own, self._drafter = self._drafter, drafter
        try:
            yield
        finally:
            self._drafter = own

    def before_placing(self, plan: StepPlan) -> Drafts | None:
        """Waits for the tokens of the step before, if this one may have drafts."""
        drafting = [sequence for sequence in plan.sequences if sequence.num_drafts]
        if not drafting:
            return None
        self._known.read(plan.step)
        forced = self._rules.forced([s.slot for s in drafting], [s.num_drafts for s in drafting])
        propose = self._drafter.propose
        found = {s.slot: propose(s.slot, s.num_drafts, ids) for s, ids in zip(drafting, forced, strict=True)}
        if not any(found.values()):
            return None
        self._state.put_drafts([(slot, ids) for slot, ids in found.items() if ids])
        drafts = [found.get(sequence.slot, []) for sequence in plan.sequences]
        return Drafts(
            [*map(len, drafts)], cache(lambda: np.array([id for ids in drafts for id in (0, *ids)], np.int64))
        )

    def ends(self, new: list[NewSequence]) -> None:
        """Reads the last tokens of sequences that later drafts depend on. Waits for steps that compute them.

        Ranks collect their steps at different times, but must have the same drafts.
        """
        self._known.read_all_of({sequence.slot for sequence in new if self._drafter.keeps(sequence.slot)})

    def assign(self, new: NewSequence) -> None:
        self._drafter.assign(new)

    def append(self, slot: int, token_ids: list[int]) -> None:
        self._drafter.append(slot, token_ids)
