"""Tasks and their files: JSON lines with a prompt and the expected answer. docs/eval.md has the format."""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscine.extensions.eval.grade import Expected, ExpectedError
from oscine.settings.option import did_you_mean

GROUP = "tasks"  # of tasks that name none
_FIELDS = ("id", "group", "prompt", "messages", "tools", "response_schema", "parameters", "answer")
_OWN = ("model", "messages", "tools", "stream", "stream_options", "n", "seed")  # not among a task's parameters


class TaskError(ValueError):
    """A line that is not a task. The message names file, line and field."""


@dataclass(frozen=True, slots=True)
class Task:
    id: str
    group: str
    body: dict[str, Any]  # keys of the chat completion's request
    expected: Expected

    @classmethod
    def of(cls, line: Any) -> "Task":
        """From the object of a line. Raises ExpectedError, which has the field."""
        if not isinstance(line, dict):
            raise ExpectedError("line", "must be an object")
        for name in line.keys() - set(_FIELDS):
            raise ExpectedError(name, f"is unknown{did_you_mean(name, _FIELDS)}")
        for name, default in (("id", None), ("group", GROUP)):
            value = line.get(name, default)
            if not isinstance(value, str) or not value.strip():
                raise ExpectedError(name, f"must be a text, not {value!r}")
        if "answer" not in line:
            raise ExpectedError("answer", "is missing")
        return cls(line["id"], line.get("group", GROUP), _body(line), Expected.read(line["answer"]))

    @property
    def digest(self) -> str:
        """Equal for tasks with the same question and the same answer."""
        expected = {self.expected.kind: self.expected.value, **self.expected.extra}
        text = json.dumps([self.body, expected], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _body(line: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": _messages(line)}
    if (tools := line.get("tools")) is not None:
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ExpectedError("tools", "must be a list of objects")
        body["tools"] = tools
    if (schema := line.get("response_schema")) is not None:
        if not isinstance(schema, dict):
            raise ExpectedError("response_schema", "must be an object")
        form = {"name": "answer", "schema": schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    parameters = line.get("parameters", {})
    if not isinstance(parameters, dict):
        raise ExpectedError("parameters", "must be an object")
    for name in parameters:
        if name in _OWN or name in body:
            raise ExpectedError(f"parameters.{name}", "is set elsewhere")
    return body | parameters


def _messages(line: dict[str, Any]) -> list[dict[str, Any]]:
    if ("prompt" in line) == ("messages" in line):
        raise ExpectedError("messages", "either prompt or messages must be there")
    if "prompt" in line:
        if not isinstance(line["prompt"], str):
            raise ExpectedError("prompt", f"must be a text, not {line['prompt']!r}")
        return [{"role": "user", "content": line["prompt"]}]
    messages = line["messages"]
    if not isinstance(messages, list) or not messages:
        raise ExpectedError("messages", "must be a list with at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ExpectedError(f"messages[{index}]", "must be an object with a role")
    return messages


def read(path: Path) -> list[Task]:
    """Raises TaskError, OSError, and ModuleNotFoundError where a schema needs the package jsonschema."""
    tasks: dict[str, Task] = {}
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        if not text.strip():
            continue
        try:
            task = Task.of(json.loads(text))
        except ExpectedError as error:
            raise TaskError(f"{path}:{number}: {error}") from None
        except (ValueError, RecursionError) as error:
            raise TaskError(f"{path}:{number}: not JSON: {error}") from None
        if task.id in tasks:
            raise TaskError(f"{path}:{number}: id: {task.id!r} is the id of an earlier line")
        tasks[task.id] = task
    if not tasks:
        raise TaskError(f"{path} has no tasks")
    return [*tasks.values()]


def write(path: Path, lines: Iterable[dict[str, Any]]) -> int:
    """Writes objects of lines, which must be tasks. Returns their number."""
    texts = []
    for line in lines:
        Task.of(line)
        texts.append(json.dumps(line, ensure_ascii=False) + "\n")
    path.write_text("".join(texts), encoding="utf-8")
    return len(texts)


def some(tasks: Sequence[Task], limit: int | None) -> list[Task]:
    """At most this many tasks in their order, the same ones in every run: those whose ids hash to the least values."""
    if limit is None or limit >= len(tasks):
        return [*tasks]
    chosen = {task.id for task in sorted(tasks, key=lambda task: hashlib.sha256(task.id.encode()).digest())[:limit]}
    return [task for task in tasks if task.id in chosen]
