"""Runs an executor in a thread of its own, so that the next step is scheduled while one runs (torch frees the GIL)."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from oscine.types import Executor, SamplingParams, StepPlan, StepResult


class ThreadedExecutor:
    """An Executor over one whose launch takes as long as the step. What a step raises comes out of its collect()."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="executor")
        self._steps: deque[Future[StepResult]] = deque()

    def prepare(self, sampling: SamplingParams) -> bool:
        return self._executor.prepare(sampling)

    def launch(self, plan: StepPlan) -> None:
        self._steps.append(self._thread.submit(self._run, plan))

    def collect(self) -> StepResult:
        return self._steps.popleft().result()

    def call(self, function: Callable[[], None]) -> None:
        """Calls a function in the thread, after all launched steps, and waits for its return."""
        self._thread.submit(function).result()

    def _run(self, plan: StepPlan) -> StepResult:
        began_s = time.perf_counter()
        self._executor.launch(plan)
        result = self._executor.collect()
        return replace(result, seconds=time.perf_counter() - began_s)
