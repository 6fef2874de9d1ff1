"""The two files of a batch, in OpenAI's format: requests in, one JSON object per line; answers out, in any order.

A run can be resumed from the files. Neither file is in memory as a whole, nor are their ids.
"""

import hashlib
import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, Literal

import msgspec

from oscine.system.json_text import decode_json, decode_whole
from oscine.system.model_files import open_file
from oscine.system.owned_folder import take_lock

logger = logging.getLogger(__name__)

URLS = ("/v1/chat/completions", "/v1/responses", "/v1/completions", "/v1/messages")
LONGEST_LINE = 64 << 20  # bytes
_PIECE = 1 << 16  # bytes that are skipped at once
_MAX_SHOWN = 200  # characters of a value that a problem repeats
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LINE_START = b'{"id":"batch_req_'


class BatchFileError(ValueError):
    """A file that cannot be read or is no file of a batch."""


class FileInUseError(Exception):
    """Another process writes the file."""


class _Asked(msgspec.Struct):
    """The fields of a body that are read here. Its endpoint decodes and checks the others."""

    model: str | None = None
    stream: bool | None = None
    background: bool | None = None


class _Given(msgspec.Struct):
    custom_id: str
    url: str
    body: _Asked
    method: Literal["POST"] = "POST"


class _Body(msgspec.Struct):
    body: msgspec.Raw


class _Named(msgspec.Struct):
    custom_id: str


class _Response(msgspec.Struct):
    status_code: int
    request_id: str = ""
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Written(msgspec.Struct):
    """A line of the output."""

    id: str
    custom_id: str | None
    response: _Response | None
    error: Any = None

    @property
    def has_failed(self) -> bool:
        return self.response is None or not 200 <= self.response.status_code < 300


@dataclass(frozen=True)
class BatchLine:
    """A line of the input: a request, unless it has a problem."""

    id: str
    custom_id: str | None
    url: str = ""
    body: bytes = b""  # JSON
    model: str | None = None
    number: int = 0  # of the line, from 1
    place: tuple[int, int] = (0, 0)  # offset and length in the file, bytes
    problem: str = ""  # why it is no request
    code: str = ""  # of the problem, as OpenAI has it


class _Ids:
    """A set of texts that lives in a temporary file when it outgrows a few megabytes."""

    def __init__(self) -> None:
        self._table = sqlite3.connect("", isolation_level=None, check_same_thread=False)  # a file that goes with it
        self._table.execute("PRAGMA journal_mode = OFF")
        self._table.execute("CREATE TABLE ids (id TEXT PRIMARY KEY) WITHOUT ROWID")
        self._table.execute("BEGIN")

    def add(self, text: str) -> bool:
        """Whether it is new."""
        return self._table.execute("INSERT OR IGNORE INTO ids VALUES (?)", (text,)).rowcount == 1

    def __contains__(self, text: str | None) -> bool:
        return self._table.execute("SELECT 1 FROM ids WHERE id = ?", (text,)).fetchone() is not None


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    """A regular file: its lines may be read again."""
    try:
        file = open_file(path)
    except ValueError as error:
        raise BatchFileError(str(error)) from None
    with file:
        yield file


@contextmanager
def _opened_to_append(path: Path) -> Iterator[FileIO]:
    """Nothing is buffered: a write that fails leaves nothing to be tried again when the file is closed."""
    try:
        file = path.open("a+b", buffering=0)
    except OSError as error:
        raise BatchFileError(f"{path}: {error.strerror}") from None
    with file:
        if not file.seekable():
            raise BatchFileError(f"{path}: must be a file, not a pipe: a run goes on after what it holds")
        yield file


class BatchOutput:
    """The output file, to which whole lines are appended.

    An incomplete last line, of a process that was killed while it wrote, is removed. Raises BatchFileError for a
    file that is not the output of a batch.
    """

    def __init__(self, path: Path, file: FileIO) -> None:
        self._path, self._file = path, file
        self._answered = _Ids()  # custom_ids
        self._refused = _Ids()  # ids of lines with a problem
        self.num_lines = 0  # including those of earlier runs
        self.num_failed = 0  # lines without an answer, including those of earlier runs
        self._read_back()

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator["BatchOutput"]:
        """The file is locked meanwhile, if there are locks. Raises FileInUseError if another process has locked it."""
        with _opened_to_append(path) as file:
            try:
                if not take_lock(file.fileno(), needed=False):
                    logger.warning("%s has no file locks, so two servers may run the same batch", path.parent)
            except BlockingIOError:
                raise FileInUseError(f"{path}: another batch is writing it") from None
            try:
                yield cls(path, file)
            finally:
                os.fsync(file.fileno())

    def _read_back(self) -> None:
        whole = 0  # bytes in whole lines
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    if not _LINE_START.startswith(line[: len(_LINE_START)]):
                        raise self._not_ours(number)
                    break
                whole += len(line)
                if line.strip():
                    self._remember(line, number)
        self._file.truncate(whole)

    def _remember(self, line: bytes, number: int) -> None:
        try:
            written = msgspec.json.decode(line, type=_Written)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise self._not_ours(number) from None
        if written.response is None or written.custom_id is None:
            self._refused.add(written.id)
        else:
            self._answered.add(written.custom_id)
        self._count(written)

    def _not_ours(self, number: int) -> BatchFileError:
        return BatchFileError(f"{self._path}: line {number} is no line of a batch's output; it is left as it is")

    def has(self, line: BatchLine) -> bool:
        """Whether an earlier run wrote it."""
        return line.id in self._refused if line.problem else line.custom_id in self._answered

    def answer(self, line: BatchLine, status: int, request_id: str, body: bytes) -> None:
        """`body`: JSON."""
        response = _Response(status, request_id, msgspec.Raw(body))
        self._append(_Written(line.id, line.custom_id, response))

    def refuse(self, line: BatchLine, code: str, message: str) -> None:
        """For a line that is not asked."""
        self._append(_Written(line.id, line.custom_id, None, {"code": code, "message": message}))

    def _append(self, line: _Written) -> None:
        left = memoryview(msgspec.json.encode(line) + b"\n")
        while left:
            left = left[self._file.write(left) :]
        self._count(line)

    def _count(self, line: _Written) -> None:
        self.num_lines += 1
        self.num_failed += line.has_failed


class BatchInput:
    """An iterator over the lines that are not blank."""

    def __init__(self, file: BufferedReader, urls: Sequence[str], longest: int) -> None:
        """`longest`: bytes of a line."""
        self._file, self._urls, self._longest = file, urls, longest
        self._number = 1  # of the next line
        self._size = max(os.fstat(file.fileno()).st_size, 1)
        self._met = _Ids()  # custom_ids
        if file.peek(3)[:3] == _BYTE_ORDER_MARK:
            file.seek(3)

    @classmethod
    @contextmanager
    def open(cls, path: Path, urls: Sequence[str] = URLS, longest: int | None = None) -> Iterator["BatchInput"]:
        """`urls`: that lines may have. `longest`: bytes of a line; None: LONGEST_LINE."""
        with _opened(path) as file:
            yield cls(file, urls, longest or LONGEST_LINE)

    @property
    def share_read(self) -> float:
        return min(self._file.tell() / self._size, 1.0)

    def __iter__(self) -> Iterator[BatchLine]:
        while True:
            self._skip_blank()
            start = self._file.tell()
            line = self._file.readline(self._longest + 1)
            if not line:
                return
            found = self._read(line, self._number)
            self._number += 1
            yield replace(found, place=(start, len(line)))

    def again(self, line: BatchLine) -> BatchLine:
        """The line with its body, read from the file again."""
        start, size = line.place
        return replace(line, body=_body(os.pread(self._file.fileno(), size, start)))

    def _skip_blank(self) -> None:
        """Skips blank lines, and spaces before a line. Python does nothing per line: a file may have millions."""
        while ahead := self._file.peek():
            blank = len(ahead) - len(ahead.lstrip())
            self._number += self._file.read(blank).count(b"\n")
            if blank < len(ahead):
                return

    def _read(self, line: bytes, number: int) -> BatchLine:
        line_id = f"batch_req_{hashlib.blake2b(b'%d:' % number + line, digest_size=12).hexdigest()}"
        if len(line) > self._longest:
            while line and not line.endswith(b"\n"):
                line = self._file.readline(_PIECE)
            problem = f"Line {number} is longer than {self._longest} bytes."
            return BatchLine(line_id, None, number=number, problem=problem, code="line_too_long")
        try:
            whole, given = decode_whole(line, _Given)
            body = _body(whole)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            problem, code = f"Line {number} is no request of a batch: {error}.", "invalid_json_line"
            if isinstance(error, msgspec.ValidationError):
                code = "missing_required_parameter" if "required" in str(error) else "invalid_request"
            return BatchLine(line_id, _custom_id(line), number=number, problem=problem, code=code)
        known = BatchLine(line_id, given.custom_id, given.url, number=number, model=given.body.model)
        wrong = self._wrong(given)
        if wrong is not None:
            code, why = wrong
            return replace(known, problem=f"Line {number}: {why}.", code=code)
        return replace(known, body=body)

    def _wrong(self, given: _Given) -> tuple[str, str] | None:
        if given.url not in self._urls:
            return "invalid_url", f"'url' must be one of {', '.join(self._urls)}, not {given.url[:_MAX_SHOWN]!r}"
        if given.body.stream:
            return "invalid_request", "'body.stream' is for connections; a batch has whole answers"
        if given.body.background:
            return "invalid_request", "'body.background' is for clients that ask again; a batch has whole answers"
        if not self._met.add(given.custom_id):
            return "duplicate_custom_id", f"'custom_id' {given.custom_id[:_MAX_SHOWN]!r} is that of an earlier line"
        return None


def _body(line: bytes) -> bytes:
    return bytes(decode_json(line, _Body).body)


def _custom_id(line: bytes) -> str | None:
    """The custom_id of a line that is malformed elsewhere."""
    try:
        return decode_json(line, _Named).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
