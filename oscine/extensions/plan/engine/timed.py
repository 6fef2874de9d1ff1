"""An executor that computes nothing: a step takes the time that a table says."""

from collections import deque

from oscine.extensions.plan.clock.agenda import NS, Clock, ns_of
from oscine.extensions.plan.engine.cohort import CohortPlan
from oscine.timing.features import StepFeatures, features_of
from oscine.timing.table import StepTable
from oscine.types import SamplingParams, StepPlan, StepResult


class TimedExecutor:
    """An Executor under a virtual clock, for EngineLoop and for CohortLoop. `collect` moves the clock of its engine.

    A step begins when it is launched, or when the step before it ends. Sampled tokens are all 0.
    """

    def __init__(self, clock: Clock, table: StepTable) -> None:
        self._clock, self._table = clock, table
        self._free_ns = 0
        self._launched: deque[tuple[StepPlan, int]] = deque()  # plans, and when they end
        # Rows of a decode step -> a cell of the table: from which context up to which, and nanoseconds in it.
        self._cells: dict[int, tuple[int, int, float, float]] = {}

    def prepare(self, sampling: SamplingParams) -> bool:
        return True

    def launch(self, plan: StepPlan) -> None:
        self._free_ns = max(self._free_ns, self._clock.ns) + self._duration_ns(_features(plan))
        self._launched.append((plan, self._free_ns))

    def collect(self) -> StepResult:
        plan, end_ns = self._launched.popleft()
        self._clock.ns = max(self._clock.ns, end_ns)
        return StepResult(plan.step, [[0] if sequence.sample else [] for sequence in plan.sequences])

    def repeat(self, count: int, until_ns: int, step: StepFeatures) -> list[int]:
        """Up to `count` steps of the loop that begin before `until_ns`, of decodes alone. Moves the clock.

        `step`: the first of them; each has `decode_rows` tokens of context more than the one before. A step that is in
        flight is collected by the first, and the last one is in flight then. Returns when each of the steps of the loop
        ended.
        """
        now_ns, free_ns, rows, context = self._clock.ns, self._free_ns, step.decode_rows, step.decode_context
        plan, flying_ns = self._launched.popleft() if self._launched else (None, 0)
        _, last, base_ns, per_token_ns = self._cell(step)
        ends_ns: list[int] = []
        while len(ends_ns) < count and now_ns < until_ns:
            if context > last:
                _, last, base_ns, per_token_ns = self._cell(step._replace(decode_context=context))
            free_ns = (free_ns if free_ns > now_ns else now_ns) + round(base_ns + per_token_ns * context)
            context += rows
            end_ns = free_ns
            if plan is not None:
                end_ns, flying_ns = flying_ns, free_ns
            if end_ns > now_ns:
                now_ns = end_ns
            ends_ns.append(now_ns)
        if plan is not None:
            self._launched.append((plan, flying_ns))
        self._clock.ns, self._free_ns = now_ns, free_ns
        return ends_ns

    def _duration_ns(self, step: StepFeatures) -> int:
        if not step.is_decode:
            return ns_of(self._table.step_s(step))
        _, _, base_ns, per_token_ns = self._cell(step)
        return round(base_ns + per_token_ns * step.decode_context)

    def _cell(self, step: StepFeatures) -> tuple[int, int, float, float]:
        """Of a step of decodes. A step of as many rows often has the cell of the last one."""
        known = self._cells.get(step.decode_rows)
        if known is None or not known[0] <= step.decode_context <= known[1]:
            cell = self._table.cell(step)
            known = step.decode_context, cell.last_context, cell.base_s / NS, cell.per_token_s / NS
            self._cells[step.decode_rows] = known
        return known


def _features(plan: StepPlan) -> StepFeatures:
    found = features_of(plan.sequences)
    if not isinstance(plan, CohortPlan) or not plan.steady:
        return found
    return found._replace(
        decode_rows=found.decode_rows + plan.steady,
        decode_context=found.decode_context + plan.context,
        sampled=found.sampled + plan.steady,
    )
