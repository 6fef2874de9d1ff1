"""Watts and host times of steps, from points that have some."""

import pytest

from oscine.timing.answer import NotMeasuredError
from oscine.timing.features import StepFeatures
from oscine.timing.nearby import host_s_of, step_joules, watts_of
from oscine.timing.read import table_of
from oscine.timing.table import Header, StepPoint

POINTS = (
    StepPoint("decode", 2.0, rows=1, context=1000, sampled=1, watts=200.0),
    StepPoint("decode", 10.0, rows=64, context=1000, sampled=64, watts=600.0),
    StepPoint("decode", 12.0, rows=64, context=2000, sampled=64, host_ms=0.5),
)


def test_busier_steps_take_more_watts() -> None:
    watts = [watts_of(POINTS)(StepFeatures(rows, rows * 1000, sampled=rows)) for rows in (1, 4, 16, 64)]
    assert watts == sorted(watts)
    assert 200.0 < watts[0] < 205.0
    assert 595.0 < watts[-1] < 600.0


def test_joules_are_watts_times_seconds() -> None:
    step = StepFeatures(64, 64_000, sampled=64)
    table = table_of(Header("m", 1, 8, "g", "here"), POINTS)
    assert step_joules(table, watts_of(POINTS), step) == pytest.approx(watts_of(POINTS)(step) * 0.010)


def test_without_watts_there_is_no_answer() -> None:
    with pytest.raises(NotMeasuredError, match="no points"):
        watts_of(POINTS[2:])(StepFeatures(1, 1000, sampled=1))


def test_the_time_of_the_host_is_that_of_near_points() -> None:
    assert host_s_of(POINTS)(StepFeatures(8, 8000, sampled=8)) == pytest.approx(5e-4)
