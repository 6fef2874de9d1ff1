"""HTTP/1.1 by hand: one request at a time per connection, and the time of every read.

A general client would cost more than a server that streams tokens: see docs/measuring.md.
"""

import asyncio
import time
from typing import Protocol, cast

from oscine.extensions.bench.serve.answer import Answer


class _Body(Protocol):
    done: bool

    def feed(self, data: bytes) -> bytes:
        """The payload of what came; may keep a part for later."""


class _Chunked:
    """A chunk counts when all of it is there."""

    def __init__(self) -> None:
        self.done = False
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        data = self._rest + data if self._rest else data
        payload, at = [], 0
        while (line := data.find(b"\r\n", at)) >= 0:
            size = int(data[at:line].partition(b";")[0], 16)
            end = line + 2 + size
            if end + 2 > len(data):
                break
            at = end + 2
            if size == 0:
                self.done = True
                break
            payload.append(data[line + 2 : end])
        self._rest = data[at:]
        return payload[0] if len(payload) == 1 else b"".join(payload)


class _Sized:
    def __init__(self, size: int) -> None:
        self._left = size
        self.done = size == 0

    def feed(self, data: bytes) -> bytes:
        self._left -= len(data)
        self.done = self._left <= 0
        return data


class _UntilClosed:
    done = False

    def feed(self, data: bytes) -> bytes:
        return data


class Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._answer: Answer | None = None
        self._head = b""
        self._body: _Body | None = None
        self._closes = False

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not of that class

    async def ask(self, request: bytes, answer: Answer) -> None:
        """Returns at the end of the answer. Raises ConnectionError, and ValueError for what is not HTTP."""
        if not self.is_open:
            raise ConnectionError("the connection was closed")
        self._answer, self._body, self._head = answer, None, b""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._done
        except BaseException:
            self.close()
            raise
        finally:
            self._answer = None

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        if self._answer is None or self._done.done():
            self.close()
            return
        try:
            self._receive(data, self._answer, now_s)
        except ValueError as error:
            self._done.set_exception(ValueError(f"not HTTP: {error}"))

    def _receive(self, data: bytes, answer: Answer, now_s: float) -> None:
        if self._body is None:
            head, end, data = (self._head + data).partition(b"\r\n\r\n")
            if not end:
                self._head = head
                return
            self._body = self._read_head(head.decode("latin-1"), answer)
        payload = self._body.feed(data)
        if payload:
            answer.feed(payload, now_s)
        if self._body.done:
            self._finish()

    def _read_head(self, head: str, answer: Answer) -> _Body:
        status, *lines = head.split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip().lower() for name, _, value in pairs}
        version, code = status.split(" ", 2)[:2]
        self._closes = headers.get("connection") == "close" or version == "HTTP/1.0"
        answer.head(int(code), headers.get("content-type", ""))
        if headers.get("transfer-encoding") == "chunked":
            return _Chunked()
        if "content-length" in headers:
            return _Sized(int(headers["content-length"]))
        self._closes = True
        return _UntilClosed()

    def _finish(self) -> None:
        if self._closes:
            self.close()
        if not self._done.done():
            self._done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is None or self._done.done():
            return
        if isinstance(self._body, _UntilClosed) and error is None:
            self._finish()
        else:
            self._done.set_exception(ConnectionError(str(error or "the connection was closed within the answer")))
