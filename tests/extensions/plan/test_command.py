"""`oscine simulate`: what it prints and writes, and its errors of one line."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oscine.cli import main
from oscine.timing.table import Header, StepPoint, write_table

FILE = """
models:
  - name: m
    model: openai/gpt-oss-20b
    engine: {max-num-seqs: 16}
    aggregated: {gpus: 1, replicas: 2}
"""
HEADER = Header("gpt-oss-20b", 24, 2880, "NVIDIA H100", "made up", kv_tokens=200_000, max_num_batched_tokens=2048)


def points() -> list[StepPoint]:
    found = [StepPoint("decode", 2 + rows / 32, rows=rows, context=1024, sampled=rows) for rows in (1, 16)]
    found += [StepPoint("prompts", 2 + n / 50, tokens=n, pairs=n * n, sequences=1, sampled=1) for n in (16, 2048)]
    for rows in (1, 16):
        for n in (16, 2048):
            pairs, chosen = n * n, rows + 1
            found.append(
                StepPoint(
                    "mixed", 3 + n / 50, rows=rows, context=1024, tokens=n, pairs=pairs, sequences=1, sampled=chosen
                )
            )
    return found


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    deployment, table = tmp_path / "deployment.yaml", tmp_path / "table.jsonl"
    deployment.write_text(FILE)
    write_table(table, HEADER, points())
    return deployment, table


def simulated(files: tuple[Path, Path], *options: str) -> int:
    deployment, table = files
    return main(["simulate", str(deployment), "--steps", str(table), "--scaled", *options])


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_is_that_of_a_measurement_and_says_that_it_is_none(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.jsonl"
    load = ("--users", "8", "--isl", "300", "--osl", "50", "--requests", "24", "--label", "hw=h100")
    for seed in ("1", "1", "2"):
        assert simulated(files, *load, "--spread", "0.5", "--seed", seed, "--output", str(output)) == 0
    first, again, other = rows(output)
    assert first == again != other
    assert (first["simulated"], first["completed"], first["failed"], first["conc"]) == (True, 24, 0, 8)
    assert (first["tp"], first["hw"], first["isl"], first["osl"]) == (2, "h100", 300, 50)
    assert 0 < first["median_tpot"] < first["median_ttft"] < first["median_e2el"]
    assert first["median_itl"] is None
    printed = capsys.readouterr().out
    assert "24 completed, 0 failed" in printed
    assert "ITL" not in printed


def test_what_came_from_prefill_replicas_was_not_found_in_caches(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    split = "prefill: {gpus: 1}\n    decode: {gpus: 1}\n    remote-prefill: {min-tokens: 64}"
    files[0].write_text(FILE.replace("aggregated: {gpus: 1, replicas: 2}", split))
    load = ("--users", "4", "--isl", "640", "--osl", "20", "--requests", "12")
    assert simulated(files, *load) == 0
    printed = capsys.readouterr().out
    assert "cached" not in printed
    found = re.search(r"^(.*)% of prompt tokens were found in caches, (.*)% came from prefill replicas;", printed, re.M)
    assert found is not None, printed
    assert float(found[1]) == 0
    assert float(found[2]) == 90, "9 of 10 pages"
    assert simulated(files, *load, "--shared-prefix", "640") == 0
    shared = re.search(r"^(.*)% of prompt tokens were found in caches", capsys.readouterr().out, re.M)
    assert shared is not None
    assert 30 < float(shared[1]) < 60, "all prompts but the first few find the half that they share"


def test_a_trace_and_a_rate_are_loads_too(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"timestamp": 0, "input_length": 1000, "output_length": 20, "hash_ids": [1, 2]}
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"{json.dumps(line)}\n{json.dumps(line | {'timestamp': 4000})}\n")
    assert simulated(files, "--trace", str(trace), "--until", "100") == 0
    assert "hit rates are lower bounds" in (printed := capsys.readouterr().out)
    assert "2 completed" in printed
    assert simulated(files, "--rate", "5", "--requests", "20", "--failures", "1", "--start-time", "1") == 0
    assert "aggregated: 1 replicas" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--users", "0"), "--users must be positive"),
        (("--users", "1", "--failures", "soon"), "--failures must be seconds"),
        (("--users", "1", "--failures", "1", "1e9"), "must be from 0 to below 1,000,000,000 seconds, not '1e9'\n"),
        (("--users", "1", "--failures", "nan"), "--failures must be from 0 to"),
        (("--users", "1", "--osl", "140000"), "--isl must be at most 131,072 tokens together with --osl, for m, not"),
        (("--users", "1", "--turns", "100000"), "--turns must be at most 102 with these lengths: m takes 131,072"),
        (("--users", "1", "--served", "x"), "--served must be one of m"),
        (("--users", "1", "--burst", "2"), "--burst needs --rate"),
        (("--trace", "none.jsonl"), "oscine: error: none.jsonl: No such file or directory"),
        (("--users", "1", "--steps", "h200"), "--steps must be a file of `oscine profile`, or GPU/KERNELS"),
        (("--users", "1", "--rate", "1"), "not allowed with argument"),
        (("--users", "1", "--until", "0.000001"), "no request succeeded"),
        (
            ("--rate", "1e-9", "--requests", "9"),
            "--rate must be such that the load takes less than 1,000,000,000 seconds",
        ),
        (("--users", "1", "--turns", "2", "--think", "1e9"), "--think must be such that the load takes less than"),
    ],
)
def test_a_bad_option_is_an_error_of_one_line(
    files: tuple[Path, Path], options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulated(files, *options) != 0
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_trace_of_centuries_is_refused(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = {"timestamp": 0, "input_length": 100, "output_length": 2, "hash_ids": [1]}
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"{json.dumps(line)}\n{json.dumps(line | {'timestamp': 10**13})}\n")
    assert simulated(files, "--trace", str(trace)) == 2
    assert "--trace-speed must be such that the load takes less than 1,000,000,000 s" in capsys.readouterr().err


def test_lengths_are_within_those_of_the_role(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    deployment, _ = files
    deployment.write_text(FILE.replace("16}", "16, max-model-len: 512}"))
    assert simulated(files, "--users", "1", "--isl", "500", "--osl", "12", "--requests", "1") == 0
    assert simulated(files, "--users", "1", "--isl", "500", "--osl", "13") == 2
    assert "--isl must be at most 512 tokens together with --osl, for m, not 513\n" in capsys.readouterr().err


def test_a_table_of_a_model_of_other_sizes_is_refused(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, table = files
    write_table(table, replace(HEADER, model="oscine-nano", layers=6, hidden=256, gpu="cpu"), points())
    assert simulated(files, "--users", "1") == 2
    wanted = "openai/gpt-oss-20b (24 layers, hidden size 2880)"
    found = "oscine-nano (6 layers, hidden size 256)"
    said = f"oscine: error: --steps must be of the model {wanted}; {table} is of {found}\n"
    assert capsys.readouterr().err == said


def test_requests_under_way_at_the_end_are_counted_as_unfinished(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "rows.jsonl"
    load = ("--users", "8", "--isl", "300", "--osl", "50", "--until", "0.3", "--output", str(output))
    assert simulated(files, *load) == 0
    (row,) = rows(output)
    assert row["completed"] > 0
    assert row["unfinished"] == 8, "in a closed loop each user has a request"
    assert "8 requests were unfinished" in capsys.readouterr().out


def test_a_row_says_that_its_step_times_are_scaled(files: tuple[Path, Path], tmp_path: Path) -> None:
    """The table's own class is measured; 60,000 tokens are beyond it."""
    output = tmp_path / "rows.jsonl"
    for isl in ("1000", "60000"):
        load = ("--users", "1", "--isl", isl, "--osl", "20", "--requests", "1", "--output", str(output))
        assert simulated(files, *load) == 0
    within, beyond = (row["step_times"][0] for row in rows(output))
    assert "scaled" not in within
    assert "scaled, beyond the measured steps by up to" in beyond


def test_a_step_that_was_not_measured_ends_the_simulation(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    deployment, table = files
    assert main(["simulate", str(deployment), "--steps", str(table), "--users", "2", "--isl", "60000"]) == 1
    error = capsys.readouterr().err
    assert "what was measured: " in error
    assert "tokens of 1 prompt; --scaled extrapolates" in error


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("kv-offload-bytes: 1GiB, kv-offload-dir: pages", "--kv-offload-dir is not simulated"),
        ("experts-on-host: auto", "--experts-on-host is not simulated"),
    ],
)
def test_what_is_not_simulated_is_refused(
    files: tuple[Path, Path], more: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files[0].write_text(FILE.replace("max-num-seqs: 16", f"max-num-seqs: 16, {more}"))
    assert simulated(files, "--users", "1") == 2
    assert message in capsys.readouterr().err


def test_the_memory_of_a_gpu_gives_the_size_of_the_cache(files: tuple[Path, Path], tmp_path: Path) -> None:
    """Long prompts: with less memory fewer run at once, so the last one waits longer."""
    output = tmp_path / "rows.jsonl"
    for memory in ("80GB", "24GB"):
        load = ("--users", "16", "--isl", "20000", "--osl", "400", "--requests", "16")
        assert simulated(files, *load, "--gpu-memory", memory, "--output", str(output)) == 0
    large, small = rows(output)
    assert small["completed"] == large["completed"] == 16
    assert small["duration"] > large["duration"] or small["preemptions"] > large["preemptions"]
