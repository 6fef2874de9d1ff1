"""The two files of a batch, in OpenAI's format: requests in, one JSON object per line; answers out, in any order.

A run can be resumed from the files. Neither file is in memory as a whole, nor are their ids.
"""

import fcntl
import hashlib
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from oscine.cli.error import USAGE, CommandError

URLS = ("/v1/chat/completions", "/v1/responses", "/v1/completions", "/v1/messages")
LONGEST_LINE = 64 << 20  # bytes
_LINE_START = b'{"id":"batch_req_'


class _Given(msgspec.Struct):
    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class _Response(msgspec.Struct):
    status_code: int


class _Written(msgspec.Struct):
    """The fields of an output line that a resumed run reads."""

    id: str
    custom_id: str | None
    response: _Response | None


@dataclass(frozen=True)
class BatchRequest:
    id: str
    custom_id: str
    url: str
    body: bytes  # JSON


@dataclass(frozen=True)
class BadLine:
    """A line that is not a request."""

    id: str
    custom_id: str | None
    message: str


def is_success(status: int) -> bool:
    return 200 <= status < 300


class _Ids:
    """A set of texts that lives in a temporary file when it outgrows a few megabytes."""

    def __init__(self) -> None:
        self._table = sqlite3.connect("", isolation_level=None)  # a private file, gone with the connection
        self._table.execute("PRAGMA journal_mode = OFF")
        self._table.execute("CREATE TABLE ids (id BLOB PRIMARY KEY) WITHOUT ROWID")
        self._table.execute("BEGIN")

    def add(self, text: str) -> bool:
        """Whether it is new."""
        return self._table.execute("INSERT OR IGNORE INTO ids VALUES (?)", (_key(text),)).rowcount == 1

    def __contains__(self, text: str) -> bool:
        return self._table.execute("SELECT 1 FROM ids WHERE id = ?", (_key(text),)).fetchone() is not None


def _key(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


class BatchOutput:
    """Context manager: the output file, to which whole lines are appended. It is locked meanwhile. An incomplete last
    line, of a process that was killed while it wrote, is removed. Raises CommandError for a file that is not the output
    of a batch.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._answered = _Ids()  # custom_ids
        self._refused = _Ids()  # ids of bad lines
        self.failed = 0  # lines without an answer, including those of earlier runs

    def __enter__(self) -> "BatchOutput":
        try:
            self._file = self._path.open("a+b", buffering=0)
        except OSError as error:
            raise CommandError(f"{self._path}: {error.strerror}", USAGE) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read_back()
        except BlockingIOError:
            self._file.close()
            raise CommandError(f"{self._path}: another batch is writing it") from None
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def _read_back(self) -> None:
        whole = 0  # bytes in whole lines
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    self._check_cut(line, number)
                    break
                whole += len(line)
                if line.strip():
                    self._remember(line, number)
        self._file.truncate(whole)

    def _check_cut(self, line: bytes, number: int) -> None:
        start = line[: len(_LINE_START)]
        if not _LINE_START.startswith(start):
            raise self._not_ours(number)

    def _remember(self, line: bytes, number: int) -> None:
        try:
            written = msgspec.json.decode(line, type=_Written)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise self._not_ours(number) from None
        if written.response is None or written.custom_id is None:
            self._refused.add(written.id)
            self.failed += 1
        else:
            self._answered.add(written.custom_id)
            self.failed += not is_success(written.response.status_code)

    def _not_ours(self, number: int) -> CommandError:
        return CommandError(f"{self._path}: line {number} is no line of a batch's output; it is left as it is", USAGE)

    def has(self, line: BatchRequest | BadLine) -> bool:
        """Whether an earlier run wrote it."""
        return line.id in self._refused if isinstance(line, BadLine) else line.custom_id in self._answered

    def answer(self, request: BatchRequest, status: int, request_id: str, body: object) -> None:
        response = {"status_code": status, "request_id": request_id, "body": body}
        self._append({"id": request.id, "custom_id": request.custom_id, "response": response, "error": None})
        self.failed += not is_success(status)

    def refuse(self, line: BadLine) -> None:
        error = {"code": "invalid_line", "message": line.message}
        self._append({"id": line.id, "custom_id": line.custom_id, "response": None, "error": error})
        self.failed += 1

    def _append(self, line: dict[str, Any]) -> None:
        left = memoryview(msgspec.json.encode(line) + b"\n")
        while left:
            left = left[self._file.write(left) :]


class BatchInput:
    """Context manager and iterator over the lines that are not blank."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._met = _Ids()  # custom_ids

    def __enter__(self) -> "BatchInput":
        try:
            self._file = self._path.open("rb")
        except OSError as error:
            raise CommandError(f"{self._path}: {error.strerror}", USAGE) from None
        self._size = max(os.fstat(self._file.fileno()).st_size, 1)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()

    @property
    def share_read(self) -> float:
        return min(self._file.tell() / self._size, 1.0)

    def __iter__(self) -> Iterator[BatchRequest | BadLine]:
        number = 0
        while line := self._file.readline(LONGEST_LINE + 1):
            number += 1
            if line.strip():
                line_id = f"batch_req_{hashlib.blake2b(b'%d:' % number + line, digest_size=12).hexdigest()}"
                too_long = len(line) > LONGEST_LINE
                yield self._too_long(line_id, number) if too_long else self._read(line, line_id, number)

    def _too_long(self, line_id: str, number: int) -> BadLine:
        while (rest := self._file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
            pass
        return BadLine(line_id, None, f"Line {number} is longer than {LONGEST_LINE} bytes.")

    def _read(self, line: bytes, line_id: str, number: int) -> BatchRequest | BadLine:
        try:
            given = msgspec.json.decode(line, type=_Given)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return BadLine(line_id, _custom_id(line), f"Line {number} is no request of a batch: {error}.")
        wrong = self._wrong(given)
        if wrong is not None:
            return BadLine(line_id, given.custom_id, f"Line {number}: {wrong}.")
        return BatchRequest(line_id, given.custom_id, given.url, msgspec.json.encode(given.body))

    def _wrong(self, given: _Given) -> str | None:
        if given.method != "POST":
            return f"'method' must be POST, not {given.method!r}"
        if given.url not in URLS:
            return f"'url' must be one of {', '.join(URLS)}, not {given.url!r}"
        if given.body.get("stream"):
            return "'body.stream' is for connections; a batch has whole answers"
        if not self._met.add(given.custom_id):
            return f"'custom_id' {given.custom_id!r} is that of an earlier line"
        return None


def _custom_id(line: bytes) -> str | None:
    """The custom_id of a line that is malformed elsewhere."""
    try:
        found = msgspec.json.decode(line)["custom_id"]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return None
    return found if isinstance(found, str) else None
