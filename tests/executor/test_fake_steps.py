"""The fake executor with a table of step times."""

from pathlib import Path

import pytest

from oscine.executor import fake
from oscine.executor.start.build import build_executor
from oscine.settings.config import EngineOptions, SchedulerOptions
from oscine.settings.option import OptionError
from oscine.timing.features import features_of
from oscine.timing.read import read_table
from oscine.timing.table import Header, StepPoint, write_table
from oscine.types import NewSequence, SamplingParams, ScheduledSequence, StepPlan

SAMPLING = SamplingParams(max_tokens=9)


class Time:
    """A clock that sleeping moves."""

    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def options(table: Path) -> EngineOptions:
    return EngineOptions(scheduler=SchedulerOptions(max_num_seqs=4), executor="fake", fake_steps=str(table), quiet=True)


def test_steps_take_as_long_as_the_table_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [StepPoint("decode", 3.0 + rows, rows=rows, context=10, sampled=rows) for rows in (1, 2)]
    points += [StepPoint("prompts", 40.0 * n, tokens=n, pairs=n, sequences=1, sampled=1) for n in (8, 16)]
    write_table(path := tmp_path / "table.jsonl", Header("fake", 1, 1, "none", "made up"), points)
    executor = build_executor(options(path)).executor
    monkeypatch.setattr(fake, "time", time := Time())
    prompt = ScheduledSequence(0, 0, 8, True, [[0]])
    decodes = [ScheduledSequence(0, start, 1, True, []) for start in (8, 9)]
    plans = [StepPlan(0, [NewSequence(0, [5] * 8, 8, 0, [[]], SAMPLING)], [prompt])]
    plans += [StepPlan(step, [], [decode]) for step, decode in enumerate(decodes, 1)]
    expected_s = 100.0 + sum(read_table(path, scaled=True).step_s(features_of(plan.sequences)) for plan in plans)
    executor.launch(plans[0])
    for plan in plans[1:]:  # each is launched while the one before it runs
        executor.launch(plan)
        executor.collect()
    executor.collect()
    assert time.now_s == pytest.approx(expected_s)
    assert expected_s == pytest.approx(100.0 + 0.32 + 2 * 0.004)


def test_a_table_without_the_fake_executor_is_refused() -> None:
    with pytest.raises(OptionError, match="--fake-steps must be used with --executor fake"):
        EngineOptions(fake_steps="table.jsonl")


def test_a_table_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    (file := tmp_path / "table.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"table.jsonl"):
        build_executor(options(file))
