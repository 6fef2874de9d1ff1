"""An executor for tests: a plan runs when it is launched, and every sequence can be placed at once."""

from collections import deque

from oscine.types import SamplingParams, StepPlan, StepResult


class Immediate:
    def __init__(self) -> None:
        self._results: deque[StepResult] = deque()

    def execute(self, plan: StepPlan) -> StepResult:
        raise NotImplementedError

    def prepare(self, sampling: SamplingParams) -> bool:
        return True

    def launch(self, plan: StepPlan) -> None:
        self._results.append(self.execute(plan))

    def collect(self) -> StepResult:
        return self._results.popleft()
