"""Own runs that validate tables of steps: where they come from, and what is calculated of them."""

import json
from pathlib import Path

import pytest

from oscine.extensions.plan.foreign.ops import DATA
from oscine.extensions.plan.validate.own_runs import Off, OwnRun, lines, offs, passes_s, read_runs
from oscine.timing.answer import Cell
from oscine.timing.features import StepFeatures
from oscine.timing.read import read_table
from oscine.timing.table import Header, StepTable

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "h200.jsonl"
STEP_S, TOKEN_S = 0.01, 1e-5


class Linear:
    def cell(self, step: StepFeatures, *, scaled: bool = False) -> Cell:
        return Cell(STEP_S + TOKEN_S * step.prompt_tokens, 0.0)


def run(requests: int, prompt: int, answer: int, tpot_ms: float = 1.0, tokens_per_s: float = 1.0) -> OwnRun:
    about = "abc", "2026-11-25", "near", "made up"
    return OwnRun("120b", "gpu", 1, requests, prompt, answer, 2048, tpot_ms, tokens_per_s, None, *about)


def test_each_run_is_a_line_of_the_results() -> None:
    known = {}
    for text in RESULTS.read_text("utf-8").splitlines():
        line = json.loads(text)
        if {line.get("kv_cache_dtype", "auto"), line.get("activation_dtype", "auto")} != {"auto"}:
            continue
        load = line["model"], line["gpu"], line["concurrency"], line["isl"], line["osl"]
        known[*load, line["commit"], line["date"][:10]] = line
    runs = read_runs()
    assert len(runs) > 20
    for one in runs:
        load = one.model, one.gpu, one.requests, one.prompt, one.answer
        line = known[*load, one.commit, one.date]
        assert (one.tpot_ms, one.tokens_per_s) == (line["decode_step_ms"], line["output_tok_s"])
        assert one.ttft_ms == line.get("first_token_ms")
        assert line.get("num_gpus", 1) == line.get("tensor_parallel_size", 1) == one.tensor_parallel_size


def test_no_table_is_older_than_a_run() -> None:
    for path in (DATA / "steps").glob("*.jsonl"):
        header = read_table(path).header
        assert all(one.date < header.date[:10] and one.commit != header.commit for one in read_runs())


@pytest.mark.parametrize("requests", [1, 2])
def test_passes_take_the_sum_of_their_steps(requests: int) -> None:
    table = StepTable(
        Header("120b", 36, 2880, "gpu", "made up", kv_tokens=1 << 20, max_model_len=8192, max_num_batched_tokens=2048),
        Linear(),
    )
    first_s, all_s = passes_s(table, run(requests, 512, 11))
    assert first_s == pytest.approx(STEP_S + TOKEN_S * 512 * requests)
    assert all_s == pytest.approx(first_s + 10 * STEP_S)


def test_the_tables_meet_runs_with_their_kernels() -> None:
    found = [*offs(one for one in read_runs() if one.kernels == "near" and one.requests == 1)]
    assert len(found) == 3
    for off in found:
        assert off.tpot is not None
        assert off.throughput is not None
        assert abs(off.tpot) < 0.05
        assert abs(off.throughput) < 0.10


def test_lines_have_the_means_of_what_was_answered() -> None:
    off = [Off(run(1, 8, 4), 0.02, -0.04), Off(run(2, 8, 4), -0.04, 0.04), Off(run(3, 8, 4), note="too large")]
    *_, refused, mean = lines(off)
    assert refused.endswith("too large")
    assert "TPOT 3.0 % over 2 (must 5), throughput 4.0 % over 2 (must 10), TTFT not measured" in mean
    assert mean.endswith("1 of 3 runs not in the tables")
