"""Comparison of simulated with measured servers: the file, the simulation, the printed lines."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from oscine.extensions.plan.validate import served_runs
from oscine.extensions.plan.validate.served_runs import Off, ServedRun, lines, offs, read_runs, simulated
from oscine.timing.table import Header, StepTable
from tests.extensions.plan.fleets import Linear

ROW_S, TOKEN_S = 0.001, 1e-5
HEADER = Header("120b", 36, 2880, "gpu", "made up", kv_tokens=1 << 20, max_model_len=8192, max_num_batched_tokens=2048)
TABLE = StepTable(HEADER, Linear(0, row_ns=1_000_000, token_ns=10_000))
ABOUT = 1.0, 1.0, 1.0, "abc", "2026-11-30", "A"


def run(users: int | None, rate: float | None, burst: int, requests: int) -> ServedRun:
    return ServedRun("120b", "gpu", 1, users, rate, burst, 512, 11, 0.0, 3, requests, *ABOUT)


def test_one_user_after_the_other_has_steps_of_one_row() -> None:
    found = simulated(TABLE, run(1, None, 1, 4))
    assert found.tpot.median == pytest.approx(ROW_S)
    assert found.ttft.p90 == pytest.approx(512 * TOKEN_S, rel=0.05)
    assert found.output_tok_s == pytest.approx(11 / (512 * TOKEN_S + 10 * ROW_S), rel=0.05)


def test_a_burst_of_requests_decodes_together() -> None:
    found = simulated(TABLE, run(None, 0.5, 4, 8))
    assert found.tpot.median == pytest.approx(4 * ROW_S)
    assert found.ttft.p90 == pytest.approx(4 * 512 * TOKEN_S, rel=0.05)
    assert found.num_completed == 8


def test_a_trace_has_its_own_times_and_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_runs, "DATA", tmp_path)
    lines = [{"timestamp": 1000 * i, "input_length": 512, "output_length": 11, "hash_ids": [i]} for i in range(4)]
    (tmp_path / "some.jsonl").write_text("\n".join(map(json.dumps, lines)))
    one = replace(run(None, None, 1, 4), prompt=1, answer=1, trace="some.jsonl", trace_speed=0.5)
    found = simulated(TABLE, one)
    assert found.duration_s == pytest.approx(6 + 512 * TOKEN_S + 10 * ROW_S, rel=1e-3)
    assert found.tpot.median == pytest.approx(ROW_S)
    assert str(one) == "120b some.jsonl at 0.5"


def test_mean_errors_are_within_the_musts() -> None:
    """Of all servers, and by model and number of GPUs but for what docs/planning-tables.md names."""
    runs = read_runs()
    assert {one.machine for one in runs} == {*"ABCDEFGI"}
    assert {one.tensor_parallel_size for one in runs} == {1, 2}
    found = [*offs(runs)]
    assert not [str(one.run) for one in found if one.tpot is None], "not in the tables"
    groups = {(one.run.model, one.run.tensor_parallel_size) for one in found}
    for group in (None, *groups):
        own = [one for one in found if group in (None, (one.run.model, one.run.tensor_parallel_size))]
        for name, most in (("tpot", 0.05), ("throughput", 0.10), ("ttft", 0.15)):
            if name == "ttft" and group == ("120b", 2):
                most = 0.19
            errors = [abs(getattr(one, name)) for one in own]
            assert sum(errors) / len(errors) < most, (group, name)


def test_lines_have_means_by_model_and_of_all() -> None:
    two = replace(run(None, 8.0, 16, 8), tensor_parallel_size=2)
    *_, single, both, everything = lines([Off(run(4, None, 1, 4), 0.02, 0.0, 0.1), Off(two, -0.04, 0.0, 0.2), Off(two)])
    assert "TPOT 2.0 % over 1 (must 5)" in single
    assert "TTFT 20.0 % over 1 (must 15)" in both
    assert "TPOT 3.0 % over 2 (must 5)" in everything
    assert str(two) == "120b TP2 8/s, bursts of 16, 512/11"
