"""`oscine eval`: the embedded model's answers, servers that fail, test sets of the hub, two files of answers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from oscine.cli import main
from oscine.extensions.apis.batches import retries
from oscine.extensions.eval.cli import run as eval_run
from tests.cli.local_hub import local_hub
from tests.cli.test_commands import run
from tests.extensions.eval.test_tasks import GPQA, write
from tests.http_handler import Handler, serving
from tests.server import ServerProcess

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
AGE = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], "additionalProperties": False}
TASKS: list[dict[str, Any]] = [
    {"id": "sum", "group": "sums", "prompt": "What is 27 + 58?", "answer": {"number": 85}},
    {"id": "wrong", "group": "sums", "prompt": "What is 27 + 58?", "answer": {"number": 86}},
    {
        "id": "cut",
        "group": "sums",
        "prompt": "What is 27 + 58?",
        "parameters": {"max_tokens": 3},
        "answer": {"number": 85},
    },
    {
        "id": "weather",
        "group": "calls",
        "prompt": "What is the weather in Paris?",
        "tools": [WEATHER],
        "parameters": {"tool_choice": "required"},
        "answer": {"call": {"name": "get_weather", "arguments": {"city": "Paris"}}},
    },
    {
        "id": "age",
        "group": "schemas",
        "prompt": "Ann is 31 years old. Extract the age.",
        "response_schema": AGE,
        "answer": {"schema": AGE},
    },
]


def evaluate(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `oscine eval`, in this process."""
    status = main(["eval", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def cells(text: str, name: str) -> list[str]:
    """Of the first line of this name in a table."""
    line = next(line for line in text.splitlines() if line.startswith(f"{name} "))
    return line.removeprefix(name).split()


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


def test_two_servers_a_run_that_goes_on_and_a_comparison(
    nano_server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = write(tmp_path / "tasks.jsonl", *TASKS)
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    options = ("--tasks", tasks, "--samples", 2, "--temperature", 0, "--seed", 1, "--output", first, second)
    status, out, err = evaluate(capsys, nano_server.url, nano_server.url + "/v1", *options)
    assert (status, err) == (0, "")
    assert cells(out, "sums")[:3] == ["3", "6", "33.3%"]
    assert cells(out, "sums")[-3:] == ["2", "2", "0"], "truncated, without a number, failed"
    for name in ("calls", "schemas"):
        assert cells(out, name)[:3] == ["1", "2", "100.0%"]
    assert cells(out, "all")[:3] == ["5", "10", "60.0%"]
    assert "difference +0.0%" in out
    assert "p = 1 (exact sign-flip test over tasks)" in out
    found = {row["task"]: row for row in rows(first)}
    assert found["sum"]["right"]
    assert found["wrong"]["found"] == "85"
    assert (found["cut"]["finish_reason"], found["cut"]["output_tokens"]) == ("length", 3)
    assert found["weather"]["calls"][0]["name"] == "get_weather"

    whole = second.read_text().splitlines(keepends=True)
    second.write_text("".join(whole[:6]))
    again = ("--tasks", tasks, "--samples", 2, "--temperature", 0, "--seed", 1, "--output", second)
    assert evaluate(capsys, nano_server.url, *again)[0] == 0
    assert second.read_text().startswith("".join(whole[:6]))
    assert sorted(rows(second), key=str) == sorted(map(json.loads, whole[1:]), key=str)
    status, _, err = evaluate(capsys, nano_server.url, *again, "--temperature", 1)
    assert status == 2
    assert "is of another run" in err

    second.write_text(
        second.read_text().replace('"task": "sum"', '"task": "SUM"').replace('"right": true', '"right": false')
    )
    status, out, _ = evaluate(capsys, "compare", first, second)
    assert status == 0
    assert "difference -50.0%" in out
    assert "better tasks: 0, worse: 2" in out
    assert f"tasks only in {second}, which are left out: 1" in out
    assert "weather  2/2 -> 0/2" in out


class Answers(Handler):
    """Answers by the prompt: a status, no answer at all, or a text."""

    asked: ClassVar[list[dict[str, Any]]] = []
    busy: ClassVar[int] = 0  # requests that are refused first

    def get(self) -> None:
        self._send(200, {"data": [{"id": "small"}]})

    def post(self, body: bytes) -> None:
        asked = json.loads(body)
        Answers.asked.append(asked)
        prompt = asked["messages"][0]["content"]
        if Answers.busy:
            Answers.busy -= 1
            self._send(503, {"error": {"message": "busy"}})
        elif prompt == "hang up":
            self.close_connection = True
        elif prompt == "no JSON":
            self._send(200, [])
        elif prompt.isdigit():
            self._send(int(prompt), {"error": {"message": "not now"}})
        else:
            message = {"role": "assistant", "content": prompt}
            self._send(200, {"choices": [{"message": message, "finish_reason": "stop"}]})

    def _send(self, status: int, body: Any) -> None:
        self.answer(status, json.dumps(body))


@pytest.fixture
def url() -> Iterator[str]:
    Answers.asked = []
    with serving(Answers) as url:
        yield url


def test_requests_that_fail_are_wrong_answers_and_are_asked_again(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_run, "PATIENCE_S", 0.0)
    prompts = ("A", "B", "400", "503", "hang up", "no JSON")
    lines = ({"id": prompt, "prompt": prompt, "answer": {"choice": "A"}} for prompt in prompts)
    tasks, output = write(tmp_path / "tasks.jsonl", *lines), tmp_path / "out.jsonl"
    arguments = (url, "--tasks", tasks, "--concurrency", 2, "--output", output)
    status, out, err = evaluate(capsys, *arguments)
    assert status == 1
    assert "failed requests, which count as wrong answers: 4" in err
    assert cells(out, "all")[:3] == ["6", "2", "16.7%"]
    assert cells(out, "all")[-4:] == ["-", "0", "0", "4"]
    assert "failed 1 times: 400: not now" in out
    errors = {row["task"]: row["error"] for row in rows(output)}
    assert errors["A"] == errors["B"] == ""
    assert errors["503"] == "503: not now"
    assert "disconnected" in errors["hang up"]
    assert "not a chat completion" in errors["no JSON"]
    Answers.asked.clear()
    assert evaluate(capsys, *arguments)[0] == 1
    assert {body["messages"][0]["content"] for body in Answers.asked} == {"400", "503", "hang up", "no JSON"}


def test_a_server_that_is_full_is_asked_again(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "_DELAYS_S", (0.01, 0.02))
    Answers.busy = 5
    tasks = write(tmp_path / "t.jsonl", *({"id": name, "prompt": "A", "answer": {"choice": "A"}} for name in "abc"))
    status, out, _ = evaluate(capsys, url, "--tasks", tasks)
    assert status == 0
    assert cells(out, "all")[:3] == ["3", "3", "100.0%"]
    assert len(Answers.asked) == 8


def test_what_a_request_says(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = {"id": "a", "prompt": "A", "parameters": {"temperature": 0.5}, "answer": {"choice": "A"}}
    options = ("--reasoning-effort", "low", "--temperature", 1, "--top-p", 0.9, "--max-tokens", 9, "--seed", 7)
    evaluate(capsys, url, "--tasks", write(tmp_path / "t.jsonl", line), "--samples", 3, *options)
    common = {"model": "small", "reasoning_effort": "low", "temperature": 0.5, "top_p": 0.9, "max_tokens": 9}
    common["messages"] = [{"role": "user", "content": "A"}]
    assert sorted(Answers.asked, key=str) == [common | {"seed": seed} for seed in (7, 8, 9)]


def test_a_test_set_of_the_hub(tmp_path: Path, url: str) -> None:
    with local_hub() as hub:
        hub.repositories["datasets/Idavidrein/gpqa"] = {"gpqa_diamond.csv": GPQA.encode()}
        where = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1"}
        done = run("eval", url, "--tasks", "gpqa", **where)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("gpqa: 3 tasks")
    assert "gpqa/Biology" in done.stdout
    done = run("eval", url, "--tasks", "aime", **where)
    (line,) = done.stderr.splitlines()
    assert "data set 'math-ai/aime25' is not in the local cache, and the hub cannot be reached: " in line
    assert done.returncode == 2


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("http://127.0.0.1:1",), "eval needs --tasks"),
        (("a", "b", "c", "--tasks", "t.jsonl"), "one server or two"),
        (("http://127.0.0.1:1", "--tasks", "missing.jsonl"), "missing.jsonl"),
        (("http://127.0.0.1:1", "--tasks", "skills"), "python -m training.tasks"),
        (("http://127.0.0.1:1", "--tasks", "t.jsonl"), "no answer from http://127.0.0.1:1"),
        (("http://127.0.0.1:1", "--tasks", "t.jsonl", "--samples", "0"), "--samples"),
        (("http://127.0.0.1:1", "--tasks", "t.jsonl", "--output", "a", "b"), "--output needs a file for each of 1"),
        (("http://127.0.0.1:1", "x", "--tasks", "t.jsonl", "--output", "a", "./a"), "--output names the same file"),
        (("http://127.0.0.1:1", "--tasks", "bad.jsonl"), "bad.jsonl:1: answer: is missing"),
        (("compare", "t.jsonl"), "compare takes two files"),
        (("compare", "t.jsonl", "t.jsonl", "--samples", "2"), "compare takes two files"),
        (("compare", "t.jsonl", "t.jsonl"), "t.jsonl:1: not a line of answers"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, tuple) else "",
)
def test_bad_usage(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.jsonl", TASKS[0])
    write(tmp_path / "bad.jsonl", {"id": "a", "prompt": "x"})
    status, out, err = evaluate(capsys, *arguments)
    (line,) = err.splitlines()
    assert said in line
    assert (status in (1, 2), out) == (True, "")
