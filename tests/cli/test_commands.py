"""The command line from outside: processes, their output and their exit status."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from typing import ClassVar

import pytest

import oscine
from oscine.executor.fake import TEXT
from tests.children import said_to
from tests.http_handler import Handler, serving
from tests.server import ServerProcess

THOUGHT = "The user wants to hear something, so I say something."


def run(*arguments: str, given: str = "", **environment: str) -> "subprocess.CompletedProcess[str]":
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OPENAI_", "OSCINE_"))} | environment
    command = [sys.executable, "-m", "oscine", *arguments]
    return subprocess.run(command, input=given, capture_output=True, text=True, timeout=60, check=False, env=env)


@pytest.mark.needs("terminal")
def test_version_and_help() -> None:
    assert run("--version").stdout == f"oscine {oscine.__version__}\n"
    for command in (
        [],
        ["serve"],
        ["chat"],
        ["batch"],
        ["bench"],
        ["bench", "serve"],
        ["bench", "sweep"],
        ["bench", "engine"],
        ["bench", "ops"],
        ["eval"],
        ["dynamo-worker"],
    ):
        done = run(*command, "--help")
        assert done.returncode == 0
        assert done.stdout.startswith("usage: oscine")


def test_without_a_command_the_help_is_printed() -> None:
    done = run()
    assert (done.returncode, done.stderr) == (2, "")
    assert done.stdout == run("--help").stdout


@pytest.mark.needs("terminal")
def test_a_reader_that_has_seen_enough_is_no_error(fake_server: ServerProcess) -> None:
    command = [sys.executable, "-m", "oscine", "chat", "hi", "--url", fake_server.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as chat:
        assert chat.stdout is not None
        assert chat.stderr is not None
        chat.stdout.close()
        assert "Traceback" not in chat.stderr.read()
    assert chat.returncode == 0


@pytest.mark.needs("terminal")
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["sing"], 2, "sing"),
        (["run"], 2, "there is no command 'run'; did you mean chat? (see oscine --help)"),
        (["run", "gpt-oss:20b", "--verbose"], 2, "did you mean chat?"),
        (["sevre"], 2, "not 'sevre'; did you mean serve?"),
        (["bench"], 2, "required: serve|sweep|engine|ops (see"),
        (["serve", "--port", "x"], 2, "--port"),
        (["serve", "--prot", "1"], 2, "--prot; did you mean --port? (see oscine serve --help)"),
        (["chat", "--effort", "huge"], 2, "--effort"),
        (["chat", "hi", "--url", "http://127.0.0.1:1"], 1, "http://127.0.0.1:1"),
        (["chat", "hi", "--url", "nonsense"], 1, "nonsense"),
        (
            ["chat", "gpt-oss-20b", "hi"],
            2,
            "unrecognized arguments: hi; PROMPT is one argument, in quotes, and --model",
        ),
        (["chat", "hi", "--modle", "x"], 2, "--modle x; did you mean --model? (see oscine chat --help)"),
        (["chat", "", "--url", "http://127.0.0.1:1"], 2, "PROMPT is empty"),
        (["chat", " \n"], 2, "PROMPT is empty"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else str(v),
)
def test_errors_are_one_line_on_stderr(arguments: list[str], status: int, said: str) -> None:
    done = run(*arguments)
    (line,) = done.stderr.splitlines()
    assert line.startswith("oscine: error: ")
    assert said in line
    assert (done.returncode, done.stdout) == (status, "")


@pytest.mark.needs("terminal")
def test_chat_into_a_pipe_is_plain_text(fake_server: ServerProcess) -> None:
    done = run("chat", "Tell me something.", "--url", fake_server.url)
    thought, answer = done.stdout.rstrip("\n").split("\n\n")
    assert thought == THOUGHT
    assert answer == (TEXT * 9)[: len(answer)]
    assert "tokens/s" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    nowhere = "http://127.0.0.1:1"
    assert (
        run("chat", "Tell me something.", OSCINE_URL=f"{fake_server.url}/v1", HTTP_PROXY=nowhere).stdout == done.stdout
    )
    address = fake_server.url.removeprefix("http://")
    assert run("chat", "Tell me something.", "--url", address, OSCINE_URL=nowhere).stdout == done.stdout


@pytest.mark.needs("terminal")
@pytest.mark.parametrize(("no_color", "dims"), [("", True), ("1", False)])
def test_chat_in_a_terminal_dims_the_reasoning(fake_server: ServerProcess, no_color: str, dims: bool) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "oscine", "chat", "hi", "--max-tokens", "90", "--url", fake_server.url]
    env = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | ({"NO_COLOR": no_color} if no_color else {})
    done = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, timeout=60, check=False, env=env)
    os.close(theirs)
    text = said_to(ours)
    assert done.returncode == 0
    assert THOUGHT in text
    assert (f"\x1b[2m{THOUGHT}" in text) == dims


@pytest.mark.needs("terminal")
def test_a_conversation(fake_server: ServerProcess) -> None:
    lines = ["/effort huge", "/effort low", "first", "second", "/reset", "third"]
    done = run("chat", "--max-tokens", "80", "--url", fake_server.url, given="\n".join(lines))
    assert done.returncode == 0
    assert done.stdout.count(THOUGHT) == 3
    assert "/effort takes one of none, minimal, low, medium, high, xhigh, max" in done.stderr
    assert "ctrl-D" not in done.stderr  # a pipe has no keys


@pytest.mark.needs("terminal")
def test_a_pipe_whose_messages_fail_is_a_failure() -> None:
    done = run("chat", "--url", "http://127.0.0.1:1", given="first\n\n/effort huge\nsecond\n/bye\nthird")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("Connection refused") == 2
    assert done.stderr.endswith("oscine: error: messages without an answer: 2\n")


class Small(Handler):
    """A server with a context of 100 tokens that records the requests."""

    asked: ClassVar[list[int | None]] = []

    def get(self) -> None:
        self.answer(200, json.dumps({"data": [{"id": "small"}]}))

    def post(self, body: bytes) -> None:
        wanted = json.loads(body).get("max_tokens")
        Small.asked.append(wanted)
        if wanted is not None and wanted > 100:
            self.answer(400, json.dumps({"error": {"message": "no room", "code": "context_length_exceeded"}}))
        else:
            choices = [{"delta": {"content": "well"}, "finish_reason": "length"}]
            self.answer(200, f"data: {json.dumps({'choices': choices})}\n\ndata: [DONE]\n\n")


@pytest.fixture
def small() -> Iterator[str]:
    Small.asked = []
    with serving(Small) as url:
        yield url


@pytest.mark.needs("terminal")
def test_an_answer_has_a_limit_where_the_context_has_room_for_it(small: str) -> None:
    done = run("chat", "hi", "--url", small)
    assert (done.returncode, done.stdout) == (0, "well\n")
    assert "cut off by the token limit (--max-tokens)" in done.stderr
    assert Small.asked == [4096, None]


@pytest.mark.needs("terminal")
def test_a_limit_that_was_asked_for_is_not_changed(small: str) -> None:
    done = run("chat", "hi", "--url", small, "--max-tokens", "200")
    assert done.returncode == 1
    assert "no room" in done.stderr
    assert Small.asked == [200]


@pytest.mark.needs("terminal")
def test_a_server_that_refuses_is_quoted(fake_server: ServerProcess) -> None:
    done = run("chat", "hi", "--url", fake_server.url, "--model", "gpt-9")
    assert done.returncode == 1
    assert "404" in done.stderr
    assert "gpt-9" in done.stderr


@pytest.mark.needs("terminal")
def test_chat_without_a_server_starts_one() -> None:
    """Variables of other programs are ignored."""
    done = run("chat", "What is 27 + 58?", OPENAI_BASE_URL="http://127.0.0.1:1/v1")
    assert done.returncode == 0
    thought, answer = done.stdout.rstrip("\n").split("\n\n")
    assert thought
    assert "85" in answer
