"""The measures of `oscine bench serve`, from times that were written down."""

import math
from array import array
from dataclasses import replace

import pytest

from oscine.extensions.bench.serve import report, row
from oscine.extensions.bench.serve.answer import Record
from oscine.extensions.bench.serve.arrival import Arrival
from oscine.extensions.bench.serve.measure import Measures, measure
from oscine.extensions.bench.serve.run import Measured


def record(
    sent_s: float, *events_s: float, tokens: int | None = None, error: str = "", due_s: float | None = None
) -> Record:
    num_tokens = len(events_s) if tokens is None else tokens
    times_s = sent_s if due_s is None else due_s, sent_s, array("d", events_s)
    return Record(*times_s, 100, num_tokens, 25, True, error, sent_s + 0.25)


# Three answers: 4 tokens in 4 events, 6 tokens in 3 events, 5 tokens in one event; and a failure.
RECORDS = [
    record(10.0, 10.5, 10.6, 10.7, 11.1),
    record(10.0, 11.0, 11.5, 12.0, tokens=6, due_s=9.9),
    record(11.0, 13.0, tokens=5),
    record(9.0, 9.5, error="503: busy"),
]


@pytest.fixture
def found() -> Measures:
    return measure(RECORDS, {"ttft": 1.5, "tpot": 0.3})


def test_rates_are_those_of_completed_requests_over_the_whole_time(found: Measures) -> None:
    assert (found.num_completed, found.num_failed, dict(found.errors)) == (3, 1, {"503: busy": 1})
    assert found.duration_s == pytest.approx(4.0), "from the first request, which failed, to the last token"
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens, found.num_events) == (300, 75, 15, 8)
    assert found.output_tok_s == pytest.approx(15 / 4)
    assert found.prompt_tok_s == pytest.approx(300 / 4)
    assert found.requests_per_s == pytest.approx(3 / 4)
    assert found.mean_under_way == pytest.approx((1.1 + 2.0 + 2.0) / 4)


def test_an_answer_that_ends_after_its_last_text() -> None:
    found = measure([replace(record(1.0, 2.0, 3.0, tokens=5), ended_s=6.0)])
    assert (found.e2el.mean, found.tpot.mean, found.duration_s) == (5.0, 1.0, 5.0)
    assert found.mean_under_way == 1.0


def test_latencies(found: Measures) -> None:
    assert found.first_event.mean == pytest.approx(0.25)
    assert found.ttft.mean == pytest.approx((0.5 + 1.0 + 2.0) / 3)
    assert (found.ttft.median, found.ttft.p90) == (pytest.approx(1.0), pytest.approx(1.8))
    assert found.e2el.mean == pytest.approx((1.1 + 2.0 + 2.0) / 3)
    # An answer in one event has no time per token.
    assert found.tpot.mean == pytest.approx((0.6 / 3 + 1.0 / 5) / 2)
    assert found.tok_s_user == pytest.approx(5.0)
    assert found.itl.mean == pytest.approx((0.1 + 0.1 + 0.4 + 0.5 + 0.5) / 5)
    assert found.itl.median == pytest.approx(0.4)
    assert found.late.mean == pytest.approx(0.1 / 4)


@pytest.mark.parametrize(
    ("limits_s", "good"),
    [
        ({"ttft": 0.6}, 1),
        ({"ttft": 1.0}, 2),
        ({"ttft": 5.0, "tpot": 0.1}, 1),
        ({"e2el": 1.99}, 1),
        ({"ttft": 5, "tpot": 5, "e2el": 5}, 3),
    ],
)
def test_goodput_counts_requests_within_all_limits(limits_s: dict[str, float], good: int) -> None:
    found = measure(RECORDS, limits_s)
    assert found.num_good == good
    assert found.goodput == pytest.approx(good / 4)


def test_without_limits_there_is_no_goodput() -> None:
    assert measure(RECORDS).goodput is None


def test_when_all_requests_fail_nothing_is_claimed() -> None:
    found = measure([record(1.0, error="refused")], {"ttft": 1.0})
    assert (found.num_completed, found.num_failed, found.output_tok_s, found.num_good) == (0, 1, 0.0, 0)
    assert math.isnan(found.ttft.mean)
    (first, *others) = report.page(Measured(found, Arrival(1), None, 0.0), 1)
    assert "0 completed, 1 failed" in first
    assert others == ["failed 1 times: refused"]


def test_a_row_has_the_keys_and_units_of_inference_x(found: Measures) -> None:
    measured = Measured(found, Arrival(concurrency=8), 60.0, 0.1)
    one = row.row_of(measured, "m", {"isl": 100, "osl": 5}, 2, {"hw": "h200", "tp": 1})
    assert (one["hw"], one["tp"], one["model"], one["isl"], one["osl"], one["conc"]) == ("h200", 1, "m", 100, 5, 8)
    assert one["tput_per_gpu"] == pytest.approx(315 / 4 / 2)
    assert one["output_tput_per_gpu"] == pytest.approx(15 / 4 / 2)
    assert one["input_tput_per_gpu"] == pytest.approx(300 / 4 / 2)
    for name in ("first_event", "ttft", "tpot", "itl", "e2el"):
        for statistic in ("mean", "median", "p90", "p99", "std"):
            assert one[f"{statistic}_{name}"] == getattr(getattr(found, name), statistic), "seconds"
    assert one["median_intvty"] == pytest.approx(5.0)
    assert one["power_valid"]
    assert one["joules_per_output_token"] == pytest.approx(60 / 15)
    assert one["avg_power_w"] == pytest.approx(60 / 4 / 2)
    columns = dict(zip(report.columns(2), report.cells(measured, 2), strict=True))
    assert (columns["J/token"], columns["per GPU"]) == ("4", "1.9")
    assert len(report.columns(None)) == len(report.cells(measured, None)) == len(report.COLUMNS) - 1
    assert "per GPU" not in report.columns(None)
    assert report.cells(replace(measured, energy_j=None), 2)[-1] == "-"


def test_what_is_unknown_is_null_in_a_row() -> None:
    measured = Measured(measure([record(1.0, 2.0)]), Arrival(rate=2.0), None, 0.1)
    one = row.row_of(measured, "m", {}, 1, {})
    assert one["median_tpot"] is None
    assert one["conc"] is None
    assert one["rate"] == 2.0
    assert not one["power_valid"]
    assert "median_intvty" not in one


def test_doubts_are_said() -> None:
    records = [record(2.0, 3.0, due_s=1.0)]
    records[0].has_usage = False
    text = "\n".join(report.page(Measured(measure(records), Arrival(rate=1.0), None, 0.95), 1))
    assert "counts no tokens" in text
    assert "95% of a core" in text
    assert "sent late: 1,000 ms" in text
