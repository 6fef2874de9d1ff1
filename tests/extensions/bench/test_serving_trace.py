"""`oscine bench serve --trace`: the requests of a trace, at its times, with its lengths and its common prefixes."""

import json
from pathlib import Path
from typing import Any

import pytest

from oscine.chat.tokenizer import Tokenizer
from oscine.checkpoint.hub import NANO_FOLDER
from oscine.cli import main
from oscine.extensions.bench.serve.load import BLOCK, TraceLoad
from oscine.extensions.bench.serve.words import Words
from tests.cli.test_commands import run
from tests.server import ServerProcess

LINES = [
    {"timestamp": 1700, "input_length": 2 * BLOCK + 10, "output_length": 3, "hash_ids": [1, 2, 3]},
    {"timestamp": 1000, "input_length": 2 * BLOCK, "output_length": 0, "hash_ids": [1, 2]},
    {"timestamp": 1900, "input_length": 2 * BLOCK + 7, "output_length": 5, "hash_ids": [1, 4, 5]},
]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return file


@pytest.mark.parametrize("as_ids", [True, False])
def test_equal_blocks_have_equal_tokens_and_others_have_not(trace: Path, *, as_ids: bool) -> None:
    load = TraceLoad.of(trace, Words.of(NANO_FOLDER, seed=1), as_ids=as_ids)
    turns = [turn for (turn,) in load.sessions()]
    encode = Tokenizer(NANO_FOLDER).encode
    first, second, third = (t.prompt if isinstance(t.prompt, list) else encode(str(t.prompt)) for t in turns)
    assert [len(first), len(second), len(third)] == [1024, 1034, 1031]
    assert second[:1024] == first
    assert third[:BLOCK] == first[:BLOCK]
    assert third[BLOCK:1024] != first[BLOCK:]
    assert [turn.max_tokens for turn in turns] == [1, 3, 5]
    assert load.times_s(1.0) == pytest.approx((0.0, 0.7, 0.9))
    assert load.times_s(10.0) == pytest.approx((0.0, 0.07, 0.09))


def test_a_server_finds_the_prefixes_of_a_trace(nano_server: ServerProcess, trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    options = ("--trace", str(trace), "--api", "completions", "--token-ids", "--ignore-eos", "--concurrency", "1")
    done = run("bench", "serve", nano_server.url, *options, "--trace-speed", "5", "--output", str(output))
    assert done.returncode == 0, done.stderr
    assert f"requests of {trace}; at the times of the trace" in done.stdout
    row: dict[str, Any] = json.loads(output.read_text())
    assert (row["completed"], row["failed"], row["isl"], row["trace_speed"]) == (3, 0, None, 5.0)
    assert (row["total_input_tokens"], row["total_output_tokens"]) == (3 * 1024 + 17, 9)
    assert row["total_cached_tokens"] >= 1024 - 64 + 512 - 64, "one after the other, less a page of each"
    assert row["duration"] >= 0.9 / 5


def test_the_first_requests_of_a_trace(nano_server: ServerProcess, trace: Path) -> None:
    options = ("--trace", str(trace), "--sessions", "2", "--api", "completions", "--ignore-eos")
    done = run("bench", "serve", nano_server.url, *options)
    assert done.returncode == 0, done.stderr
    assert "2 completed, 0 failed" in done.stdout


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--rate", "3"), "--trace has times of its own"),
        (("--turns", "2"), "--trace has requests of its own"),
        (("--warm-up", "2"), "--warm-up must be 0 with --trace"),
        (("--burst", "2"), "--burst needs --rate"),
    ],
)
def test_options_that_contradict_a_trace(
    nano_server: ServerProcess, trace: Path, options: tuple[str, ...], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", nano_server.url, "--trace", str(trace), *options]) == 2
    assert what in capsys.readouterr().err


def test_a_speed_needs_a_trace(nano_server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", nano_server.url, "--trace-speed", "2"]) == 2
    assert "--trace-speed needs --trace" in capsys.readouterr().err
