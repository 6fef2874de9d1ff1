"""An upload: a form whose file is written to the disk as it arrives, so that its size costs no memory."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from oscine.api.common.errors import APIError, invalid

_LONGEST_FIELD = 1024  # bytes of a field that is no file
_MAX_PARTS = 16
_LONGEST_HEADER = 4096
_SILENCE_S = 60.0  # after which an upload is given up


@dataclass
class Upload:
    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None  # None: there was no file
    size: int = 0  # bytes of the file


class UploadRoom:
    """Files and bytes of the unfinished uploads of one owner, beside the files that are stored."""

    def __init__(self) -> None:
        self._files = self._bytes = 0

    @contextmanager
    def reserved(self, largest: int, files: int, size: int) -> Iterator[Callable[[int], None]]:
        """A function that takes room for bytes of one more file as they arrive; all is given back in the end.

        `largest`: bytes of a file. `files` and `size`: how many more files and bytes may be stored. It raises
        APIError 413, as the function does.
        """
        mine = 0

        def reserve(more: int) -> None:
            nonlocal mine
            if mine + more > largest:
                raise APIError(f"The file is larger than {largest} bytes.", status=413, code="file_too_large")
            if self._bytes + more > size:
                raise storage_full()
            mine += more
            self._bytes += more

        if self._files >= files:
            raise storage_full()
        self._files += 1
        try:
            yield reserve
        finally:
            self._files -= 1
            self._bytes -= mine


def storage_full() -> APIError:
    message = "There are as many files, or bytes of files, as a key may have. Delete some."
    return APIError(message, status=413, code="storage_limit_exceeded")


async def read_upload(
    content_type: bytes, body: AsyncIterator[bytes], path: Path, reserve: Callable[[int], None]
) -> Upload:
    """Writes the part `file` to `path`. `reserve` is called with the bytes of each piece of it, and may raise.

    Raises APIError 400 for what is no form, and 408.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        message = "The body must be a form: multipart/form-data with a boundary."
        raise APIError(message, status=415, code="unsupported_media_type")
    with path.open("wb") as file:
        form = _Form(boundary, file, reserve)
        try:
            while (piece := await _next(body)) is not None:
                form.feed(piece)
                await form.flush()
        except MultipartParseError as error:
            raise APIError(f"The body is no form: {error}.", code="invalid_form") from None
    if not form.complete:
        raise APIError("The body is no form: its end is missing.", code="invalid_form")
    return form.upload


async def _next(body: AsyncIterator[bytes]) -> bytes | None:
    try:
        async with asyncio.timeout(_SILENCE_S):
            return await anext(body, None)
    except TimeoutError:
        message, headers = f"Nothing of the body came for {_SILENCE_S:g} s.", {"Connection": "close"}
        raise APIError(message, status=408, headers=headers) from None


class _Form:
    """Takes the parts of a form as the parser finds them."""

    def __init__(self, boundary: bytes, file: BinaryIO, reserve: Callable[[int], None]) -> None:
        self.upload = Upload()
        self.complete = False
        self._file, self._reserve = file, reserve
        self._parts = 0
        self._waiting = bytearray()  # of the file, not written yet
        self._header: list[bytearray] = []  # name and value
        self._name = ""
        self._value = bytearray()
        self._in_file = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_begin": lambda: self._header.extend((bytearray(), bytearray())),
                "on_header_field": lambda data, start, end: self._add_header(-2, data[start:end]),
                "on_header_value": lambda data, start, end: self._add_header(-1, data[start:end]),
                "on_headers_finished": self._read_header,
                "on_part_data": lambda data, start, end: self._take(data[start:end]),
                "on_part_end": self._end,
                "on_end": self._finish,
            },
        )

    def feed(self, piece: bytes) -> None:
        self._parser.write(piece)

    async def flush(self) -> None:
        if self._waiting:
            data, self._waiting = self._waiting, bytearray()
            await asyncio.to_thread(self._file.write, data)

    def _begin(self) -> None:
        self._header, self._value, self._in_file = [], bytearray(), False
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise APIError(f"The form has more than {_MAX_PARTS} parts.", code="invalid_form")

    def _add_header(self, place: int, data: bytes) -> None:
        self._header[place] += data
        if len(self._header[place]) > _LONGEST_HEADER:
            raise APIError("A part of the form has too long a header.", code="invalid_form")

    def _read_header(self) -> None:
        headers = {bytes(name).lower(): bytes(value) for name, value in zip(*[iter(self._header)] * 2, strict=True)}
        _, options = parse_options_header(headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._in_file = self._name == "file"
        if self._in_file:
            if self.upload.filename is not None:
                raise invalid("file", "the form has a second one")
            self.upload.filename = options.get(b"filename", b"").decode("utf-8", "replace")[:255] or "file"

    def _take(self, data: bytes) -> None:
        if not self._in_file:
            self._value += data
            if len(self._value) > _LONGEST_FIELD:
                raise invalid(self._name, f"it is longer than {_LONGEST_FIELD} bytes")
            return
        self._reserve(len(data))
        self.upload.size += len(data)
        self._waiting += data

    def _end(self) -> None:
        if not self._in_file:
            self.upload.fields[self._name] = self._value.decode("utf-8", "replace")

    def _finish(self) -> None:
        self.complete = True
