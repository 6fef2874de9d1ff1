"""Drafts of a simulated engine: which ones a step verifies, which of them are accepted, and what such steps take.

There is a draft wherever the scheduler has room for one. Each is accepted with the same probability if all before it
are. A head has no drafts for a sequence in the first step after plain ones, as in HeadDrafts.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from random import Random
from typing import NamedTuple

from oscine.timing.features import StepFeatures, features_of
from oscine.timing.table import StepTable
from oscine.types import TIMED_CONTEXT, DecodeTimes, StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class Drafting:
    """Of all engines of a role. The policy of drafts reads it as it reads a BuiltExecutor."""

    max_drafts: int  # of a sequence in a step
    decode_times: Mapping[int, DecodeTimes]  # by number of sequences
    has_head: bool
    acceptance: float  # the probability that a draft is accepted
    seed: int

    def drafts(self, number: int) -> "Drafts":
        """`number`: of the engine."""
        return Drafts(self.acceptance, Random(f"{self.seed} {number}"), has_head=self.has_head)


class _Launched(NamedTuple):
    """A step in flight."""

    counts: list[int]  # drafts of each sequence
    accepted: dict[int, int]  # by slot, of sequences with accepted drafts; those that left their slot are taken out


class Drafts:
    """Of the steps of one engine."""

    def __init__(self, acceptance: float, random: Random, *, has_head: bool) -> None:
        self._acceptance, self._random, self._has_head = acceptance, random, has_head
        self._behind: set[int] = set()  # slots whose last step did not fill the head's layer
        self._launched: deque[_Launched] = deque()

    def launch(self, plan: StepPlan) -> StepFeatures:
        """Draws what the step accepts. Returns its features.

        The plan does not know yet what the steps in flight accept, and `start` counts none of it.
        """
        counts = self._counts(plan)
        early = 0
        for new in plan.new:
            for step in self._launched:
                step.accepted.pop(new.slot, None)
        for step in self._launched:
            for sequence, num_drafts in zip(plan.sequences, counts, strict=True):
                early += step.accepted.get(sequence.slot, 0) * (1 + num_drafts)
        drawn = ((one.slot, self._draw(n)) for one, n in zip(plan.sequences, counts, strict=True) if n)
        self._launched.append(_Launched(counts, {slot: accepted for slot, accepted in drawn if accepted}))
        found = features_of(plan.sequences, counts)
        return found._replace(decode_context=found.decode_context + early)

    def collect(self, plan: StepPlan) -> StepResult:
        """The result of the oldest step in flight. Tokens are all 0."""
        counts, accepted = self._launched.popleft()
        ids = [[0] * (1 + accepted.get(one.slot, 0)) if one.sample else [] for one in plan.sequences]
        return StepResult(plan.step, ids, num_drafted=counts if any(counts) else None)

    def _counts(self, plan: StepPlan) -> list[int]:
        sequences = plan.sequences
        if not self._has_head:
            return [one.num_drafts for one in sequences]
        counts = [0 if one.slot in self._behind else one.num_drafts for one in sequences]
        is_plain = not plan.new and all(one.num_tokens == 1 and not one.num_drafts for one in sequences)
        slots = {one.slot for one in sequences}
        self._behind = self._behind | slots if is_plain else self._behind - slots
        return counts

    def _draw(self, num_drafts: int) -> int:
        """How many drafts are accepted."""
        random, acceptance = self._random.random, self._acceptance
        return next((i for i in range(num_drafts) if random() >= acceptance), num_drafts)


def decode_times(table: StepTable, method: str) -> dict[int, DecodeTimes]:
    """What an engine measures at its start, from the steps of a table that verify drafts of this method.

    Steps that may have drafts, and have none, take as long as plain ones. Raises ValueError for a table without drafts,
    or with those of another method.
    """
    header = table.header
    what, how = f"{header.model} on {header.gpu}", "`oscine profile` with --speculative-config measures them"
    seconds: dict[int, dict[int, float]] = {}
    for point in sorted(table.points, key=lambda one: one.context, reverse=True):  # the least context counts
        if point.kind == "verify" and not point.held_out:
            sequences = point.rows - point.drafts
            seconds.setdefault(sequences, {})[point.drafts // sequences] = point.ms / 1e3
    if not seconds:
        raise ValueError(f"the step times of {what} have no steps that verify drafts: {how}")
    if header.drafts_by not in ("", method):
        raise ValueError(f"the step times of {what} have drafts of {header.drafts_by}, not of {method}: {how}")
    return {size: _times(table, size, seconds[size]) for size in sorted(seconds)}


def _times(table: StepTable, sequences: int, verifying: Mapping[int, float]) -> DecodeTimes:
    """`verifying`: seconds by the number of drafts of each sequence."""
    plain = table.step_s(StepFeatures(sequences, sequences * (TIMED_CONTEXT + 1), sampled=sequences))
    known: Sequence[int] = [*takewhile(verifying.__contains__, count(1))]
    return DecodeTimes(plain, (plain, *(verifying[drafts] for drafts in known)))
