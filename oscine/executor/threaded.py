"""Runs an executor in a thread of its own, so that the next step is scheduled while one runs (torch frees the GIL)."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from oscine.types import Executor, SamplingParams, StepPlan, StepResult


class ThreadedExecutor:
    """An AsyncExecutor over an Executor. What a step raises comes out of the collect() of that step."""

    def __init__(self, executor: Executor) -> None:
        self._execute = executor.execute
        self._prepare = getattr(executor, "prepare", None)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="executor")
        self._steps: deque[Future[StepResult]] = deque()

    def prepare(self, sampling: SamplingParams) -> bool:
        return self._prepare is None or self._prepare(sampling)

    def launch(self, plan: StepPlan) -> None:
        self._steps.append(self._thread.submit(self._execute, plan))

    def collect(self) -> StepResult:
        return self._steps.popleft().result()
