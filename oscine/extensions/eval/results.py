"""A file of answers: JSON lines, one per answer, after a line about the run. A run goes on where its file ends."""

import fcntl
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from oscine.extensions.eval.grade import Answer, Grade
from oscine.extensions.eval.task import Task

Key = tuple[str, int]  # id of the task, index of the sample


class ResultsError(ValueError):
    """A file that is not one of answers, or of another run. The message names it."""


@dataclass(frozen=True, slots=True)
class Row:
    """One answer. The fields are the keys of a line."""

    task: str
    group: str
    digest: str  # of the task
    sample: int
    right: bool
    found: Any = None  # what the answer says; null if it says nothing of the expected kind
    finish_reason: str = ""
    output_tokens: int | None = None  # None if the server does not count them
    error: str = ""  # why there is no answer
    content: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, task: Task, sample: int, answer: Answer, tokens: int | None) -> "Row":
        grade: Grade = task.expected.grade(answer)
        return cls(
            *(task.id, task.group, task.digest, sample, grade.is_right, grade.found),
            *(answer.finish_reason, tokens, "", answer.content),
            [call._asdict() for call in answer.calls],
        )

    @classmethod
    def failed(cls, task: Task, sample: int, error: str) -> "Row":
        return cls(task.id, task.group, task.digest, sample, right=False, error=error)

    @property
    def key(self) -> Key:
        return self.task, self.sample


@dataclass(frozen=True, slots=True)
class Run:
    """What the answers of one file have in common. `parameters`: of all requests."""

    model: str
    parameters: dict[str, Any]


def read(path: Path) -> tuple[Run, dict[Key, Row]]:
    """The last row of each answer. Raises ResultsError and OSError."""
    return _parsed(path, path.read_bytes())


def _parsed(path: Path, data: bytes) -> tuple[Run, dict[Key, Row]]:
    rows: dict[Key, Row] = {}
    run: Run | None = None
    for number, line in enumerate(data.splitlines(), 1):
        try:
            found = json.loads(line)
            if run is None:
                run = Run(**found["run"])
            else:
                row = Row(**found)
                rows[row.key] = row
        except (ValueError, TypeError, KeyError) as error:
            raise ResultsError(f"{path}:{number}: not a line of answers: {error}") from None
    if run is None:
        raise ResultsError(f"{path} has no answers")
    return run, rows


class ResultsFile:
    """The file that a run appends its answers to. Answers that are there already are `kept`."""

    def __init__(self, path: Path, run: Run, tasks: Iterable[Task]) -> None:
        """Raises ResultsError for the file of another run or of other tasks, and OSError."""
        self.kept: dict[Key, Row] = {}
        self._file: BinaryIO = path.open("a+b")
        try:
            self._open(path, run, {task.id: task.digest for task in tasks})
        except BaseException:
            self._file.close()
            raise

    def _open(self, path: Path, run: Run, digests: dict[str, str]) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ResultsError(f"{path}: another run is writing to it") from None
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]  # a run that was killed may have left a part of a line
        if data and not whole:
            raise ResultsError(f"{path}:1: not a line of answers")
        if not whole:
            self._write({"run": asdict(run)})
            return
        other, rows = _parsed(path, whole)
        if other != run:
            raise ResultsError(f"{path} is of another run: {_differing(other, run)}")
        for row in rows.values():
            if row.task in digests and row.digest != digests[row.task]:
                raise ResultsError(f"{path} has answers to another task {row.task!r}")
        self._file.truncate(len(whole))
        self.kept = {key: row for key, row in rows.items() if not row.error and row.task in digests}

    def append(self, row: Row) -> None:
        self._write(asdict(row))

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _differing(one: Run, other: Run) -> str:
    if one.model != other.model:
        return f"of the model {one.model}, not {other.model}"
    return f"with {json.dumps(one.parameters)}, not {json.dumps(other.parameters)}"
