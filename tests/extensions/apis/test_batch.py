"""`oscine batch`: files in OpenAI's batch format, runs that are killed and go on, servers that are busy."""

import asyncio
import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oscine.cli.error import CommandError
from oscine.executor.fake import TEXT
from oscine.extensions.apis.batches import lines as files
from oscine.extensions.apis.batches.cli import run as batch_run
from oscine.extensions.apis.batches.cli.run import BatchRun
from oscine.extensions.apis.batches.lines import BatchInput, BatchOutput
from tests.children import said_to
from tests.cli.test_commands import run
from tests.http_handler import Handler, serving
from tests.server import ServerProcess
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"


def request(name: str, url: str = CHAT, **body: Any) -> str:
    body = body or {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 160}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def by_name(path: Path) -> dict[str, dict[str, Any]]:
    return {line["custom_id"]: line for line in read(path)}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_every_line_gets_a_line(tmp_path: Path, output: Path, model_folder: Path, fake_server: ServerProcess) -> None:
    message: dict[str, Any] = {
        "model": model_folder.name,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 160,
    }
    given = write(
        tmp_path / "in.jsonl",
        request("chat"),
        request("text", "/v1/completions", prompt="Once", max_tokens=70),
        request("response", "/v1/responses", input="hi", max_output_tokens=160),
        request("message", "/v1/messages", **message),
        request("unknown model", model="gpt-9", messages=[{"role": "user", "content": "hi"}]),
        "",
        "no JSON",
        request("elsewhere", "/v1/embeddings", input="hi"),
        request("streamed", messages=[], stream=True),
        request("chat", messages=[]),
        '{"custom_id": "no body", "url": "/v1/completions"}',
        json.dumps({"custom_id": "got", "method": "GET", "url": CHAT, "body": {}}),
    )
    done = run("batch", str(given), str(output), "--url", f"{fake_server.url}/v1")
    assert done.returncode == 1
    assert "4 answered, 7 failed" in done.stderr
    assert done.stderr.splitlines()[-1] == f"oscine: error: failed lines in {output}: 7; each says why"
    assert "tokens/s" in done.stderr
    lines = read(output)
    assert len(lines) == 11
    assert len({line["id"] for line in lines}) == 11
    answered = {line["custom_id"]: line for line in lines if line["response"]}
    chat = answered["chat"]["response"]
    assert chat["status_code"] == 200
    assert chat["request_id"]
    assert chat["body"]["choices"][0]["message"]["content"].startswith(TEXT[:20])
    assert answered["text"]["response"]["body"]["object"] == "text_completion"
    assert answered["response"]["response"]["body"]["object"] == "response"
    assert answered["message"]["response"]["body"]["type"] == "message"
    assert answered["unknown model"]["response"]["status_code"] == 404
    assert answered["unknown model"]["response"]["body"]["error"]["code"] == "model_not_found"
    assert all(line["error"] is None for line in answered.values())
    refused = {line["custom_id"]: line["error"]["message"] for line in lines if not line["response"]}
    expected = {None: "JSON", "elsewhere": "/v1/embeddings", "streamed": "stream", "chat": "earlier line"}
    expected |= {"no body": "body", "got": "GET"}
    assert refused.keys() == expected.keys()
    assert all(word in refused[name] for name, word in expected.items())
    again = run("batch", str(given), str(output), "--url", fake_server.url)
    assert "0 answered, 0 failed, 11 done before" in again.stderr
    assert again.returncode == 1, "the output still has lines without an answer"
    assert read(output) == lines


@pytest.mark.parametrize("cut", [1, 40, 300])
def test_a_line_that_was_cut_off_is_answered_again(
    tmp_path: Path, output: Path, fake_server: ServerProcess, cut: int
) -> None:
    given = write(tmp_path / "in.jsonl", *(request(str(i)) for i in range(4)))
    run("batch", str(given), str(output), "--url", fake_server.url)
    whole = output.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    output.write_bytes(whole[: last + cut])
    done = run("batch", str(given), str(output), "--url", fake_server.url)
    assert "1 answered, 0 failed, 3 done before" in done.stderr
    assert output.read_bytes().startswith(whole[:last])
    assert by_name(output).keys() == set("0123")


def test_killed_at_any_moment_it_goes_on(tmp_path: Path, output: Path, fake_server: ServerProcess) -> None:
    names = {f"r{i}" for i in range(60)}
    given = write(tmp_path / "in.jsonl", *map(request, sorted(names)))
    arguments = ("batch", str(given), str(output), "--url", fake_server.url, "--concurrency", "4")
    with subprocess.Popen([sys.executable, "-m", "oscine", *arguments], stderr=subprocess.DEVNULL) as first:
        wait_until(lambda: output.exists() and output.stat().st_size > 10_000, "some answers")
        second = run(*arguments)
        os.kill(first.pid, signal.SIGKILL)
    assert second.returncode == 1
    assert "another batch" in second.stderr
    before = output.read_text().count("\n")
    assert 0 < before < len(names)
    done = run(*arguments)
    assert f"{60 - before} answered, 0 failed, {before} done before" in done.stderr
    assert len(read(output)) == len(names)
    assert by_name(output).keys() == names
    fake_server.wait_idle()


def test_a_file_that_is_no_output_is_left_alone(tmp_path: Path, output: Path, fake_server: ServerProcess) -> None:
    given = write(tmp_path / "in.jsonl", request("a"))
    for text in ("my diary", "my diary\n", '{"id": 1}\n', '{"id":"x'):
        output.write_text(text)
        done = run("batch", str(given), str(output), "--url", fake_server.url)
        assert done.returncode == 2
        assert "line 1" in done.stderr
        assert output.read_text() == text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("missing.jsonl", "out.jsonl"), "missing.jsonl"),
        (("in.jsonl", "in.jsonl"), "same file"),
        (("in.jsonl", "no/folder/out.jsonl"), "no/folder"),
        (("in.jsonl", "out.jsonl", "oscine-nano", "--url", "http://127.0.0.1:1"), "--url"),
        (("in.jsonl", "out.jsonl", "--url", "http://127.0.0.1:1"), "http://127.0.0.1:1"),
        (("in.jsonl", "out.jsonl", "--url", "http://[::x"), "http://[::x is not a URL"),
        (("in.jsonl", "out.jsonl", "--concurrency", "0"), "--concurrency"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else "",
)
def test_bad_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", request("a"))
    done = run("batch", *arguments)
    assert done.returncode in (1, 2)
    (line,) = done.stderr.splitlines()
    assert said in line


def test_lines_without_end_cost_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LONGEST_LINE", 1000)
    path = write(tmp_path / "in.jsonl", "x" * 5000, request("a"), "y" * 5000)
    with BatchInput.open(path) as lines:
        first, second, third = lines
    assert "Line 1 is longer" in first.problem
    assert "Line 3 is longer" in third.problem
    assert (second.custom_id, second.problem) == ("a", "")


class Busy(Handler):
    """Refuses the first requests, drops one connection, then answers; one request fails in the engine each time."""

    posts = 0

    def get(self) -> None:
        self._answer(200, {"data": []})

    def post(self, body: bytes) -> None:
        Busy.posts += 1
        if b"poison" in body:
            code = ("engine_died", "engine_failed")[Busy.posts % 2]
            self._answer(503, {"error": {"message": "it failed", "code": code}})
        elif Busy.posts == 1 and self.path == "/v1/messages":
            self._answer(529, {"type": "error", "error": {"type": "overloaded_error", "message": "full"}})
        elif Busy.posts == 1:
            self._answer(503, {"error": {"message": "full", "code": "overloaded"}})
        elif Busy.posts == 2:
            self.close_connection = True
        else:
            self._answer(200, {"usage": {"completion_tokens": 5}})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        self.answer(status, json.dumps(body))


@pytest.fixture
def busy() -> Iterator[str]:
    Busy.posts = 0
    with serving(Busy) as url:
        yield url


def test_a_busy_server_is_asked_again_and_a_deadly_request_is_given_up(tmp_path: Path, output: Path, busy: str) -> None:
    given = write(tmp_path / "in.jsonl", request("good"), request("deadly", prompt="poison"))
    done = run("batch", str(given), str(output), "--url", busy, "--concurrency", "1")
    assert done.returncode == 1
    assert "1 answered, 1 failed, 5 tokens" in done.stderr
    assert f"failed lines in {output}: 1" in done.stderr
    lines = by_name(output)
    assert lines["good"]["response"]["status_code"] == 200
    assert lines["deadly"]["response"]["status_code"] == 503
    assert Busy.posts == 3 + 3


def test_a_message_is_asked_again_too(tmp_path: Path, output: Path, busy: str) -> None:
    given = write(tmp_path / "in.jsonl", request("one", "/v1/messages", max_tokens=5))
    assert run("batch", str(given), str(output), "--url", busy).returncode == 0
    assert by_name(output)["one"]["response"]["status_code"] == 200


@pytest.mark.parametrize("text", ["good", "poison"])
def test_the_line_of_progress_ends_before_anything_else(tmp_path: Path, output: Path, busy: str, text: str) -> None:
    given = write(tmp_path / "in.jsonl", request("one", prompt=text))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "oscine", "batch", str(given), str(output), "--url", busy]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, timeout=60, check=False)
    os.close(theirs)
    *_, last = said_to(ours).rpartition("\x1b[K")
    assert done.returncode == (text == "poison")
    assert last.splitlines()[0].startswith("done: ")
    assert last.endswith("\n")
    assert len(last.splitlines()) == 1 + (text == "poison")


def test_a_run_that_ends_early_leaves_the_line_of_progress(
    tmp_path: Path, output: Path, busy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_run, "PATIENCE_S", 0.0)
    report = _Terminal()
    given = write(tmp_path / "in.jsonl", request("a"))
    with BatchInput.open(given) as lines, BatchOutput.open(output) as out, pytest.raises(CommandError, match="full"):
        asyncio.run(BatchRun(lines, out, busy, None, report).run(1))
    assert "0 answered, 0 failed" in report.getvalue()
    assert report.getvalue().endswith(" s\n")
    assert report.getvalue().count("\n") == 1


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_url_it_starts_a_server(tmp_path: Path, output: Path) -> None:
    body = {"messages": [{"role": "user", "content": "What is 27 + 58?"}], "temperature": 0}
    given = write(tmp_path / "in.jsonl", request("sum", model="mine", **body))
    done = run("batch", str(given), str(output), "--served-model-name", "mine", "--max-num-seqs", "8")
    assert done.returncode == 0, done.stderr
    message = by_name(output)["sum"]["response"]["body"]["choices"][0]["message"]
    assert "85" in message["content"]
