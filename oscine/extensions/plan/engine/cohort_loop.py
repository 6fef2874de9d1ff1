"""The production loop over a cohort, and steps of it that are made at once because they only count."""

from typing import Any

import numpy as np

from oscine.engine.core.loop import EngineLoop, count_steps
from oscine.engine.core.request import Request
from oscine.engine.core.scheduler import ScheduledStep
from oscine.extensions.plan.clock.agenda import NS
from oscine.extensions.plan.engine.cohort import PAGE_EVENT, CohortScheduler, CohortStep
from oscine.extensions.plan.engine.timed import Ahead, FloatArray, TimedExecutor
from oscine.timing.features import StepFeatures
from oscine.types import GenerationOutput, ScheduledSequence, StepResult


class CohortLoop(EngineLoop):
    """Does what its parent does. It needs a TimedExecutor and a CohortScheduler, and takes no extensions."""

    _executor: TimedExecutor
    _scheduler: CohortScheduler

    def __init__(self, executor: TimedExecutor, *arguments: Any, **options: Any) -> None:
        super().__init__(executor, *arguments, **options)
        assert isinstance(self._scheduler, CohortScheduler)
        assert not self.extensions
        self._still: tuple[int, int] | None = None  # see _state, if the last step did nothing but count
        self._ahead = Ahead([], np.zeros(0), [])  # steps that were foreseen
        self._waited_s = np.zeros(0)  # EngineStats.inter_token_s after each of them
        self._num_made = 0  # of these

    def jump(self, until_ns: int) -> int:
        """Makes all steps at once that begin before `until_ns` and that end or admit no request. Returns their number.

        It makes none where there is only one.
        """
        count = self.num_quiet()
        ends_ns = self.foresee(count, until_ns) if count > 1 else []
        self.make(len(ends_ns))
        return len(ends_ns)

    def foresee(self, count: int, until_ns: int) -> list[int]:
        """When the steps of jump() will end, up to `count`, which num_quiet() has given; `make` makes them."""
        if self._executor.first_end_ns >= until_ns:
            return []
        scheduler, rows = self._scheduler, self._scheduler.steady
        first = scheduler.tick + 1
        step = StepFeatures(rows, scheduler.offsets + rows * first, sampled=rows)
        ahead = self._executor.foresee(count, until_ns, step)
        if not scheduler.have_pages(len(ahead.ends_ns)):
            ahead = self._executor.foresee(scheduler.num_before_touch, until_ns, step)
        self._ahead, self._num_made = ahead, 0
        if ahead.ends_ns:
            self._waited_s = self._add_waits(ahead.ends_s)
        return ahead.ends_ns

    def make(self, count: int) -> None:
        """The next `count` steps that were foreseen."""
        if not count:
            return
        scheduler, ahead, counters = self._scheduler, self._ahead, self.counters
        self._num_made += count
        last = self._num_made - 1
        scheduler.pass_ticks(count, len(self._launched))
        self._executor.move_on(ahead, last)
        rows = scheduler.steady
        count_steps(counters, rows, count)
        counters.generated_tokens += count * rows
        counters.inter_tokens += count * rows
        counters.inter_token_s, self._committed_s = float(self._waited_s[last]), ahead.ends_ns[last] * NS

    def _add_waits(self, ends_s: FloatArray) -> FloatArray:
        """EngineStats.inter_token_s after each of these steps, as _note_time adds it up: one after the other."""
        sums_s = np.empty(len(ends_s) + 1)
        sums_s[0], sums_s[1] = self.counters.inter_token_s, ends_s[0] - self._committed_s
        np.subtract(ends_s[1:], ends_s[:-1], out=sums_s[2:])
        sums_s[1:] *= self._num_streaming
        return sums_s.cumsum()[1:]

    def num_quiet(self) -> int:
        """How many of the next steps end and admit no request, at least."""
        scheduler = self._scheduler
        if scheduler.others or not scheduler.steady or self._news or self._pending.waiting():
            return 0
        is_waited_for = bool(scheduler.waiting)
        if is_waited_for and self._still != self._state:
            return 0  # a request may start. If none did in a step that only counted, none will in the next one
        ahead, flight = len(self._launched), scheduler.flight
        if ahead != self._max_launched - 1 or (flight is not None and (flight.requests or flight.left)):
            return 0
        return scheduler.num_quiet(ahead, past_pages=not is_waited_for)

    def _advance(
        self, request: Request, sequence: ScheduledSequence, result: StepResult, i: int, news: list[GenerationOutput]
    ) -> None:
        if sequence is PAGE_EVENT:
            self._scheduler.commit_pages([request])
        else:
            super()._advance(request, sequence, result, i, news)

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
