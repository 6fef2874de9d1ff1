"""An executor that computes nothing: a step takes the time that a table says."""

from bisect import bisect_left
from collections import deque
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from oscine.extensions.plan.clock.agenda import NS, Clock, ns_of
from oscine.extensions.plan.engine.cohort import CohortPlan
from oscine.extensions.plan.engine.drafts import Drafts
from oscine.timing.features import StepFeatures, features_of
from oscine.timing.table import StepTable
from oscine.types import SamplingParams, StepPlan, StepResult

_AT_ONCE = 1 << 12  # steps
FloatArray = npt.NDArray[np.float64]


class Ahead(NamedTuple):
    """Steps to come."""

    ends_ns: list[int]  # when the loop will have collected a step in each of its own
    ends_s: FloatArray  # the same in seconds
    frees_ns: list[int]  # when the step will have ended that it launches


class TimedExecutor:
    """An Executor under a virtual clock, for EngineLoop and for CohortLoop. `collect` moves the clock of its engine.

    A step begins when it is launched, or when the step before it ends. Sampled tokens are all 0. Steps with drafts are
    made one by one.
    """

    def __init__(self, clock: Clock, table: StepTable, drafts: Drafts | None = None) -> None:
        self._clock, self._table, self._drafts = clock, table, drafts
        self._free_ns = 0
        self._launched: deque[tuple[StepPlan, int]] = deque()  # plans, and when they end
        # Rows and drafts of a decode step -> a cell of the table: from which context up to which; nanoseconds in it.
        self._cells: dict[tuple[int, int], tuple[int, int, float, float]] = {}

    def prepare(self, sampling: SamplingParams) -> bool:
        return True

    def launch(self, plan: StepPlan) -> None:
        step = _features(plan) if self._drafts is None else self._drafts.launch(plan)
        self._free_ns = max(self._free_ns, self._clock.ns) + self._duration_ns(step)
        self._launched.append((plan, self._free_ns))

    def collect(self) -> StepResult:
        plan, end_ns = self._launched.popleft()
        self._clock.ns = max(self._clock.ns, end_ns)
        if self._drafts is not None:
            return self._drafts.collect(plan)
        return StepResult(plan.step, [[0] if sequence.sample else [] for sequence in plan.sequences])

    @property
    def first_end_ns(self) -> int:
        """The next step of the loop does not end before this time."""
        return self._launched[0][1] if self._launched else self._clock.ns

    def foresee(self, count: int, until_ns: int, step: StepFeatures) -> Ahead:
        """When up to `count` steps of the loop will end that begin before `until_ns`, of decodes alone.

        `step`: the first of them; each has `decode_rows` tokens of context more than the one before. A step that is in
        flight is collected by the first, and the last one is in flight then.
        """
        rows, context, free_ns = step.decode_rows, step.decode_context, max(self._free_ns, self._clock.ns)
        # Of the steps that are launched, one after the other; a step in flight ends before them.
        flying_ns = [self._launched[0][1]] if self._launched else []
        ends = [np.array(flying_ns, np.int64)]
        frees_ns: list[int] = []
        while len(frees_ns) < count and (free_ns < until_ns or len(frees_ns) <= len(flying_ns)):
            _, last, base_ns, per_token_ns = self._cell(step, context)
            first_ns = round(base_ns + per_token_ns * context)
            in_cell, in_time = (last - context) // rows + 1, (until_ns - free_ns) // max(first_ns, 1) + 2
            num_steps = min(count - len(frees_ns), in_cell, max(in_time, 1), _AT_ONCE)
            contexts = np.arange(context, context + num_steps * rows, rows)
            lengths_ns = np.rint(base_ns + per_token_ns * contexts).astype(np.int64)
            ends.append(lengths_ns.cumsum() + free_ns)
            frees_ns += ends[-1].tolist()
            free_ns, context = frees_ns[-1], context + num_steps * rows
        ends_ns = [*flying_ns, *frees_ns]
        begun = min(1 + bisect_left(ends_ns, until_ns), len(frees_ns))
        return Ahead(ends_ns[:begun], np.concatenate(ends)[:begun] * np.float64(NS), frees_ns[:begun])

    def move_on(self, ahead: Ahead, place: int) -> None:
        """All steps that were foreseen up to this one have been made."""
        self._clock.ns, self._free_ns = ahead.ends_ns[place], ahead.frees_ns[place]
        if self._launched:
            self._launched[0] = self._launched[0][0], self._free_ns

    def _duration_ns(self, step: StepFeatures) -> int:
        if not step.is_decode:
            return ns_of(self._table.step_s(step))
        _, _, base_ns, per_token_ns = self._cell(step, step.decode_context)
        return round(base_ns + per_token_ns * step.decode_context)

    def _cell(self, step: StepFeatures, context: int) -> tuple[int, int, float, float]:
        """Of a step of decodes with this context. A step of as many rows often has the cell of the last one."""
        size = step.decode_rows, step.drafts
        known = self._cells.get(size)
        if known is None or not known[0] <= context <= known[1]:
            cell = self._table.cell(step._replace(decode_context=context))
            known = context, cell.last_context, cell.base_s / NS, cell.per_token_s / NS
            self._cells[size] = known
        return known


def _features(plan: StepPlan) -> StepFeatures:
    found = features_of(plan.sequences)
    if not isinstance(plan, CohortPlan) or not plan.steady:
        return found
    rows, context, tokens, pairs, chunks, sampled, drafts = found
    return StepFeatures(
        rows + plan.steady, context + plan.context, tokens, pairs, chunks, sampled + plan.steady, drafts
    )
