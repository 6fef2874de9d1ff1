"""Watts of steps, from points that have some."""

import pytest

from oscine.timing.answer import NotMeasuredError
from oscine.timing.energy import Power, step_joules
from oscine.timing.features import StepFeatures
from oscine.timing.read import table_of
from oscine.timing.table import Header, StepPoint

POINTS = (
    StepPoint("decode", 2.0, rows=1, context=1000, sampled=1, watts=200.0),
    StepPoint("decode", 10.0, rows=64, context=1000, sampled=64, watts=600.0),
    StepPoint("decode", 12.0, rows=64, context=2000, sampled=64),
)


def test_busier_steps_take_more_watts() -> None:
    power = Power(POINTS)
    watts = [power.watts(StepFeatures(rows, rows * 1000, 1000, sampled=rows)) for rows in (1, 4, 16, 64)]
    assert watts == sorted(watts)
    assert 200.0 < watts[0] < 205.0
    assert 595.0 < watts[-1] < 600.0


def test_joules_are_watts_times_seconds() -> None:
    step = StepFeatures(64, 64_000, 1000, sampled=64)
    table = table_of(Header("m", 1, 8, "g", "here"), POINTS)
    assert step_joules(table, Power(POINTS), step) == pytest.approx(Power(POINTS).watts(step) * 0.010)


def test_without_watts_there_is_no_answer() -> None:
    with pytest.raises(NotMeasuredError, match="no watts"):
        Power(POINTS[2:]).watts(StepFeatures(1, 1000, 1000, sampled=1))
