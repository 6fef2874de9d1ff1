"""`oscine bench serve` beside AIPerf (`pip install aiperf`), which is found on the PATH or by the variable AIPERF."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from oscine.checkpoint.hub import NANO_FOLDER
from tests.cli.test_commands import run
from tests.extensions.bench.scripted_source import ScriptedSource, chat_stream

AIPERF = shutil.which(os.environ.get("AIPERF", "aiperf"))
CONCURRENCY, REQUESTS, OSL = 4, 16, 64
FIRST_S, NEXT_S = 1.0, 0.05  # long beside the time that a busy machine adds


@pytest.mark.slow
@pytest.mark.skipif(AIPERF is None, reason="aiperf is not installed")
def test_aiperf_measures_the_same(tmp_path: Path) -> None:
    with ScriptedSource(lambda body: (200, chat_stream(OSL, first_s=FIRST_S, next_s=NEXT_S))) as source:
        ours = _ours(source.url, tmp_path / "rows.jsonl")
        theirs = _theirs(source.url, tmp_path / "artifacts")
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=0.03), name


def _ours(url: str, output: Path) -> dict[str, float]:
    load = ("--concurrency", f"{CONCURRENCY}", "--sessions", f"{REQUESTS}", "--isl", "100", "--osl", f"{OSL}")
    done = run("bench", "serve", url, *load, "--tokenizer", str(NANO_FOLDER), "--output", str(output))
    assert done.returncode == 0, done.stderr
    return dict(json.loads(output.read_text()))


def _theirs(url: str, folder: Path) -> dict[str, float]:
    """By our names and in our units."""
    assert AIPERF is not None
    load = ["--concurrency", f"{CONCURRENCY}", "--request-count", f"{REQUESTS}", "--warmup-request-count", "4"]
    lengths = ["--synthetic-input-tokens-mean", "100", "--output-tokens-mean", f"{OSL}", "--use-server-token-count"]
    server = ["--model", "scripted", "--url", url, "--endpoint-type", "chat", "--streaming"]
    output = ["--tokenizer", str(NANO_FOLDER), "--ui", "none", "--output-artifact-dir", str(folder)]
    command = [AIPERF, "profile", *server, *load, *lengths, *output]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    path = min(folder.rglob("profile_export_aiperf.json"), key=lambda path: len(path.parts))
    found = json.loads(path.read_text())
    return {
        "request_throughput": found["request_throughput"]["avg"],
        "output_tput_per_gpu": found["output_token_throughput"]["avg"],
        "mean_ttft": found["time_to_first_token"]["avg"] / 1e3,
        "mean_tpot": found["inter_token_latency"]["avg"] / 1e3,
        "mean_e2el": found["request_latency"]["avg"] / 1e3,
    }
