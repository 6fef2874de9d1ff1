"""`oscine bench serve` and `oscine bench sweep` as processes, against real and scripted servers."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from oscine.chat.tokenizer import Tokenizer
from oscine.checkpoint.hub import NANO_FOLDER
from oscine.cli import main
from tests.children import said_to
from tests.cli.test_commands import run
from tests.extensions.bench.scripted_source import Body, Piece, ScriptedSource, chat_event, chat_stream
from tests.server import ServerProcess
from tests.waiting import wait_until

TOKENIZER = ("--tokenizer", str(NANO_FOLDER))
Reply = tuple[int, Iterable[Piece]]


def bench(url: str, *options: str) -> "subprocess.CompletedProcess[str]":
    return run("bench", "serve", url, "--isl", "20", "--osl", "6", *options)


def row_of(done: "subprocess.CompletedProcess[str]", path: Path) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    (line,) = path.read_text().splitlines()
    return dict(json.loads(line))


def streams(body: Body) -> Reply:
    return 200, chat_stream(body["max_tokens"])


@pytest.mark.parametrize(
    ("api", "options"),
    [("chat", ()), ("completions", ()), ("completions", ("--token-ids",)), ("responses", ())],
    ids=["chat", "completions", "ids", "responses"],
)
def test_the_embedded_model(nano_server: ServerProcess, tmp_path: Path, api: str, options: tuple[str, ...]) -> None:
    output = tmp_path / "rows.jsonl"
    same = ("--seed", "1", "--parameter", "temperature=0")  # an answer without any token would count as failed
    load = ("--api", api, "--concurrency", "3", "--sessions", "7", "--warm-up", "2", *same, *options)
    row = row_of(bench(nano_server.url, "--output", str(output), *load), output)
    assert (row["model"], row["completed"], row["failed"], row["conc"]) == ("oscine-nano", 7, 0, 3)
    assert 7 <= row["total_output_tokens"] <= 7 * 6
    if api == "completions":
        assert row["total_input_tokens"] == 7 * 20, "the server counts as many tokens as were meant"
    else:
        assert row["total_input_tokens"] % 7 == 0
        assert row["total_input_tokens"] > 7 * 20, "with the template"
    assert 0 < row["median_ttft"] <= row["median_e2el"] <= row["duration"]


def test_ignore_eos_gives_all_tokens(nano_server: ServerProcess, tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    options = ("--ignore-eos", "--sessions", "4", "--concurrency", "2", "--output", str(output))
    assert row_of(bench(nano_server.url, *options), output)["total_output_tokens"] == 4 * 6


def test_what_is_asked_and_counted(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    with ScriptedSource(streams) as source:
        options = (
            "--sessions",
            "5",
            "--concurrency",
            "2",
            "--warm-up",
            "3",
            "--parameter",
            "temperature=0.5",
            "user=me",
        )
        labels = ("--label", "hw=h200", "framework=other", "--gpus", "2", "--output", str(output))
        done = bench(f"{source.url}/v1", *options, *TOKENIZER, *labels, "--goodput", "ttft:60000", "e2el:0.000001")
    row = row_of(done, output)
    assert len(source.asked) == 8
    assert (row["completed"], row["total_output_tokens"], row["total_input_tokens"]) == (5, 30, 35)
    assert (row["total_cached_tokens"], row["total_gpu_energy_j"]) == (15, 50.0)
    assert (row["hw"], row["framework"], row["tp"]) == ("h200", "other", 2)
    assert row["request_goodput"] == 0
    assert "6.0 generated, 1.00 per event" in done.stdout
    assert "50 J, 1.667 per token" in done.stdout
    tokenizer = Tokenizer(NANO_FOLDER)
    for body in source.asked:
        (message,) = body["messages"]
        assert len(tokenizer.encode(message["content"])) == 20
        assert (body["model"], body["max_tokens"], body["stream"]) == ("scripted", 6, True)
        assert (body["temperature"], body["user"]) == (0.5, "me")
    assert len({body["messages"][0]["content"] for body in source.asked}) == 8


def test_a_session_says_the_answers_again(tmp_path: Path) -> None:
    with ScriptedSource(streams) as source:
        options = ("--turns", "3", "--sessions", "4", "--concurrency", "4", "--processes", "2", "--warm-up", "0")
        done = bench(source.url, *options, *TOKENIZER)
    assert done.returncode == 0, done.stderr
    assert "12 completed, 0 failed" in done.stdout
    by_length: dict[int, list[Body]] = {}
    for body in source.asked:
        by_length.setdefault(len(body["messages"]), []).append(body)
    assert {length: len(bodies) for length, bodies in by_length.items()} == {1: 4, 3: 4, 5: 4}
    for body in by_length[5]:
        assert [message["role"] for message in body["messages"]] == ["user", "assistant"] * 2 + ["user"]
        assert body["messages"][1]["content"] == "yes yes yes "
        assert body["messages"][:3] in [other["messages"] for other in by_length[3]]


def test_an_open_loop_with_bursts(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    with ScriptedSource(streams) as source:
        options = ("--rate", "200", "--burst", "5", "--sessions", "30", "--processes", "3", "--output", str(output))
        row = row_of(bench(source.url, *options, *TOKENIZER), output)
    assert len(source.asked) == 32, "two come before the measurement"
    assert (row["completed"], row["conc"], row["rate"]) == (30, None, 200.0)


@pytest.mark.parametrize("rate", [(), ("--rate", "1000")], ids=["closed", "open"])
def test_the_concurrency_is_kept_and_never_exceeded(rate: tuple[str, ...]) -> None:
    together = threading.Barrier(4, timeout=30)

    def pieces() -> Iterator[Piece]:
        together.wait()
        yield from chat_stream(3)

    with ScriptedSource(lambda body: (200, pieces())) as source:
        options = ("--concurrency", "4", "--sessions", "24", "--warm-up", "0", *rate)
        done = bench(source.url, *options, *TOKENIZER)
    assert "24 completed, 0 failed" in done.stdout
    assert source.most_at_once == 4
    assert source.num_connections <= 4 + 3, "connections are used again; three are for the model and the energy"


def test_a_server_may_close_idle_connections() -> None:
    with ScriptedSource(streams, hangs_up=True) as source:
        done = bench(source.url, "--concurrency", "2", "--sessions", "20", "--warm-up", "0", *TOKENIZER)
    assert "20 completed, 0 failed" in done.stdout, done.stdout + done.stderr


def test_an_interrupt_ends_the_clients() -> None:
    with ScriptedSource(lambda body: (200, chat_stream(2, next_s=1.0))) as source:
        load = ["--concurrency", "2", "--sessions", "1000", "--processes", "2", "--warm-up", "0", *TOKENIZER]
        command = [sys.executable, "-m", "oscine", "bench", "serve", source.url, "--isl", "5", *load]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, text=True, **pipes) as process:
            try:
                wait_until(lambda: len(source.asked) >= 2, "two requests")
                clients = psutil.Process(process.pid).children()
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=30)
            finally:
                process.kill()
    assert (process.returncode, errors) == (130, "")
    assert len(clients) == 2
    assert not [client for client in clients if client.is_running()]


def test_a_terminal_shows_the_progress() -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    with ScriptedSource(streams) as source:
        load = ["--sessions", "5", "--warm-up", "0", "--isl", "5", *TOKENIZER]
        command = [sys.executable, "-m", "oscine", "bench", "serve", source.url, *load]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, timeout=60, check=True, text=True)
    os.close(theirs)
    shown = said_to(ours)
    assert "measured" in shown
    assert "tokens/s" in shown
    assert "5 completed" in done.stdout


def test_failures_are_counted_and_the_others_are_measured() -> None:
    def reply(body: Body) -> Reply:
        number = len(source.asked)
        if number % 3 == 0:
            return 503, [b'{"error": {"message": "full"}}']
        if number % 3 == 1:
            return 200, [chat_event(content="a"), b'data: {"error": {"message": "engine died"}}\n\n']
        return streams(body)

    with ScriptedSource(reply) as source:
        done = bench(source.url, "--sessions", "9", "--warm-up", "0", *TOKENIZER)
    assert done.returncode == 0
    assert "3 completed, 6 failed" in done.stdout
    assert "failed 3 times: 503: full" in done.stdout
    assert "failed 3 times: engine died" in done.stdout


def test_when_all_fail_so_does_the_command() -> None:
    with ScriptedSource(lambda body: (503, [b'{"error": {"message": "full"}}'])) as source:
        done = bench(source.url, "--sessions", "3", *TOKENIZER)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "oscine: error: no request succeeded: 503: full"
    assert "0 completed, 3 failed" in done.stdout


def test_an_answer_that_takes_too_long_fails() -> None:
    with ScriptedSource(lambda body: (200, chat_stream(2, next_s=2.0))) as source:
        done = bench(source.url, "--sessions", "1", "--warm-up", "0", "--timeout", "0.3", *TOKENIZER)
    assert (done.returncode, "no end within 0.3 s" in done.stderr) == (1, True)


def test_a_server_with_keys() -> None:
    with ScriptedSource(streams, api_key="sesame") as source:
        options = ("--sessions", "1", *TOKENIZER)
        refused = bench(source.url, *options)
        assert (refused.returncode, "refuses the API key (401)" in refused.stderr) == (1, True)
        assert bench(source.url, *options, "--api-key", "sesame").returncode == 0
        given = ("bench", "serve", source.url, "--isl", "2", *options)
        assert run(*given, OPENAI_API_KEY="sesame").returncode == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["http://127.0.0.1:1"], 1, "no answer from http://127.0.0.1:1"),
        (["http://127.0.0.1:x"], 2, "not a URL"),
        (["URL", "--model", "gpt-9"], 1, "has no model gpt-9; it has scripted"),
        (["http://127.0.0.1:1", "--concurrency", "0"], 2, "--concurrency must be positive, not 0"),
        (["http://127.0.0.1:1", "--rate", "nan"], 2, "--rate: it must be a number, not 'nan'"),
        (["URL", "--isl", "0"], 2, "--isl: it must be between 1 and 16777216"),
        (["URL", "--rate", "1e300"], 2, "--sessions must be at most 1,000,000, and --rate 1e+300 makes more"),
        (["URL", "--rate", "1.7e308"], 2, "--sessions must be at most 1,000,000, and --rate 1.7e+308 makes more"),
        (["URL", "--sessions", "10000000000"], 2, "--sessions must be at most 1,000,000, not 10000000000"),
        (["URL", "--isl", "10G"], 2, "--isl: it must be between 1 and 16777216"),
        (["URL", "--shared-prefix", "10G"], 2, "--shared-prefix: it must be between 0 and 16777216"),
        (["URL", "--output", "/"], 2, "--output /: no file can be written there: Is a directory"),
        (["URL", "--output", "/proc/x"], 2, "--output /proc/x: no file can be written there"),
        (["URL", "--goodput", "ttft"], 2, "--goodput takes NAME:VALUE, not 'ttft'"),
        (["URL", "--goodput", "itl:3"], 2, "--goodput knows ttft, tpot, e2el, not 'itl'"),
        (["URL", "--burst", "2"], 2, "--burst needs --rate"),
        (["URL", "--num-prefixes", "2"], 2, "--num-prefixes needs --shared-prefix"),
        (["URL", "--think", "2"], 2, "--think needs --turns"),
        (["URL", "--dataset", "/absent", "--turns", "2"], 2, "--dataset has prompts of its own"),
        (["URL", "--token-ids"], 2, "--token-ids is for --api completions"),
        (["URL", "--tokenizer", "/absent"], 2, "--tokenizer /absent has no vocabulary"),
        (["URL", "--dataset", "/absent"], 2, "/absent"),
    ],
)
def test_errors_are_one_line(options: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedSource(streams) as source:
        url, *others = options
        tokenizer = () if "--tokenizer" in options else TOKENIZER
        assert main(["bench", "serve", source.url if url == "URL" else url, *tokenizer, *others]) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("oscine: error: ")
    assert said in line
    assert not source.asked


def test_a_sweep_without_matplotlib_is_an_error_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    output = tmp_path / "sweep"
    assert main(["bench", "sweep", "http://127.0.0.1:1", "--concurrency", "1", "--output", str(output)]) == 1
    assert "the plot needs matplotlib: pip install 'oscine[bench]'" in capsys.readouterr().err
    assert not output.exists()


def test_a_sweep_leaves_rows_a_plot_and_a_page(tmp_path: Path) -> None:
    peers = tmp_path / "peers.jsonl"
    with ScriptedSource(lambda body: (200, chat_stream(6, next_s=0.002))) as source:
        options = ("--concurrency", "1", "2", "--sessions", "4", "--osl", "6", "--isl", "5", *TOKENIZER)
        sweep = ("bench", "sweep", source.url, *options, "--label", "framework=<b>")
        done = run(*sweep, "--output", str(tmp_path / "first"))
        assert done.returncode == 0, done.stderr
        shutil.move(tmp_path / "first" / "rows.jsonl", peers)
        rates = ("bench", "sweep", source.url, "--rate", "50", "100", *options[3:], "--peers", str(peers))
        assert run(*rates, "--output", str(tmp_path / "second")).returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()[2:4]] == ["1", "2"]
    rows = [json.loads(line) for line in peers.read_text().splitlines()]
    assert [(row["conc"], row["completed"], row["framework"]) for row in rows] == [(1, 4, "<b>"), (2, 4, "<b>")]
    for folder in (tmp_path / "first", tmp_path / "second"):
        assert (folder / "pareto.png").read_bytes().startswith(b"\x89PNG")
        page = (folder / "index.html").read_text()
        assert set(re.findall(r'(?:src|href)="([^",]*)', page)) == {"data:image/png;base64"}, "no other file is needed"
        assert "<b>" not in page
        assert page.count("<tr>") == 3
