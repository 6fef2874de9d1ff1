import threading
from types import SimpleNamespace

import pytest

from oscine.executor import threaded
from oscine.executor.threaded import ThreadedExecutor
from oscine.types import StepPlan, StepResult
from tests.immediate import Immediate


class Gate(Immediate):
    """An executor whose step 0 runs until it is let go, and whose step 2 fails."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()
        self.steps: list[int] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self.entered.set()
        assert self.go.wait(10)
        self.steps.append(plan.step)
        if plan.step == 2:
            raise RuntimeError("out of memory")
        return StepResult(plan.step, [])


def test_a_step_says_how_long_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((10.0, 10.25))
    monkeypatch.setattr(threaded, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    gate = Gate()
    gate.go.set()
    executor = ThreadedExecutor(gate)
    executor.launch(StepPlan(0, [], []))
    assert executor.collect().seconds == 0.25


def test_launch_does_not_wait_and_an_error_belongs_to_its_step() -> None:
    gate = Gate()
    executor = ThreadedExecutor(gate)
    for step in range(3):
        executor.launch(StepPlan(step, [], []))
    assert gate.entered.wait(10)
    assert gate.steps == []
    gate.go.set()
    assert [executor.collect().step for _ in range(2)] == [0, 1]
    with pytest.raises(RuntimeError, match="out of memory"):
        executor.collect()
    assert gate.steps == [0, 1, 2]
