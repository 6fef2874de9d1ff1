"""The production loop over a cohort, and steps of it that are made at once because they only count."""

from typing import Any

from oscine.engine.core.loop import EngineLoop, count_steps
from oscine.engine.core.scheduler import ScheduledStep
from oscine.extensions.plan.clock.agenda import NS
from oscine.extensions.plan.engine.cohort import CohortScheduler, CohortStep
from oscine.extensions.plan.engine.timed import TimedExecutor
from oscine.timing.features import StepFeatures
from oscine.types import GenerationOutput, StepResult


class CohortLoop(EngineLoop):
    """Does what its parent does. It needs a TimedExecutor and a CohortScheduler, and takes no extensions."""

    _executor: TimedExecutor
    _scheduler: CohortScheduler

    def __init__(self, executor: TimedExecutor, *arguments: Any, **options: Any) -> None:
        super().__init__(executor, *arguments, **options)
        assert isinstance(self._scheduler, CohortScheduler)
        assert not self.extensions
        self._still: tuple[int, int] | None = None  # see _state, if the last step did nothing but count

    def jump(self, until_ns: int) -> int:
        """Makes all steps that only count and that begin before `until_ns` at once. Returns their number."""
        count = self._num_quiet()
        if count <= 1:
            return 0
        scheduler, rows = self._scheduler, self._scheduler.steady
        first = scheduler.tick + 1
        step = StepFeatures(rows, scheduler.offsets + rows * first, sampled=rows)
        ends_ns = self._executor.repeat(count, until_ns, step)
        scheduler.pass_ticks(len(ends_ns), len(self._launched))
        counters, num_tokens = self.counters, len(ends_ns) * rows
        count_steps(counters, rows, len(ends_ns))
        counters.generated_tokens += num_tokens
        counters.inter_tokens += num_tokens
        total_s, last_s, streaming = counters.inter_token_s, self._committed_s, self._num_streaming
        for end_ns in ends_ns:  # as _note_time adds them up
            now_s = end_ns * NS
            total_s += (now_s - last_s) * streaming
            last_s = now_s
        counters.inter_token_s, self._committed_s = total_s, last_s
        return len(ends_ns)

    def _num_quiet(self) -> int:
        """How many of the next steps do nothing but count, at least."""
        scheduler = self._scheduler
        if scheduler.others or not scheduler.steady or self._news or self._pending.waiting():
            return 0
        if scheduler.waiting and self._still != self._state:
            return 0  # a request may start. If none did in a step that only counted, none will in the next one
        ahead, flight = len(self._launched), scheduler.flight
        if ahead != self._max_launched - 1 or (flight is not None and (flight.requests or flight.left)):
            return 0
        return scheduler.num_quiet(ahead)

    def _commit(self, done: tuple[ScheduledStep, StepResult] | None) -> list[GenerationOutput]:
        if done is None:
            return super()._commit(done)
        step, result = done
        assert isinstance(step, CohortStep)
        self._scheduler.unfold(step, result)
        news = super()._commit(done)
        self._scheduler.fold(step)
        only_counts = not (step.requests or news) and self._scheduler.only_counts
        self._still = self._state if only_counts else None
        return news

    @property
    def _state(self) -> tuple[int, int]:
        """Changes when a request comes or leaves its slot."""
        return self.counters.requests, self._scheduler.num_vacated
