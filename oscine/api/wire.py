"""uvicorn's HTTP protocol with the bounds that it lacks: on connections, request heads, and clients that do not read.

Knows bytes and timers; what a request is answered with is the application's affair. A body has its bounds in limits.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from oscine.api.errors import APIError, unavailable

MAX_HEAD_BYTES = 65_536  # request line and headers
MAX_FRAMING_BYTES = 65_536  # trailers and chunk extensions of a request
_CHUNK_FRAMING_BYTES = 20  # of a chunk without extensions: its length and two line breaks
HEAD_S = 15.0  # from the first byte of a head, or from the connection, to its last
STALLED_S = 120.0  # that a client may leave a full buffer unread
LINGER_S = 2.0  # for a client to read a response that came before it had sent its body


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    max_connections = 4096  # of the process; the server makes a subclass with its own

    _head_timer: asyncio.TimerHandle | None = None
    _stall_timer: asyncio.TimerHandle | None = None
    _linger_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _ended_here = False  # a message in the bytes that came last: not all of them are of the next head
    _in_message = False  # between the first byte of a request and the last of its body
    _in_head = True  # waiting for the end of a head; a new connection owes one
    _framing_bytes = 0  # of the request's trailers and chunk extensions
    _accounted_bytes = 0  # of the bytes that came last: body, and the usual framing of its chunks
    _running: Any = None  # the request that is being answered; others may have been read behind it

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(unavailable("The server has as many connections as it takes.", code="overloaded"))
            return
        self._start_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._stall_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._stall_timer = self._linger_timer = None
        if self._running is not None:  # uvicorn tells the newest one only
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._ended_here, self._accounted_bytes = False, 0
        after_head = not self._in_head
        super().data_received(data)
        if self._ended_here:
            return
        if self._in_head:
            self._head_bytes += len(data)
        elif after_head:
            self._framing_bytes += max(0, len(data) - self._accounted_bytes)
        self._check_size(self._head_bytes, MAX_HEAD_BYTES, "request line and the headers")
        self._check_size(self._framing_bytes, MAX_FRAMING_BYTES, "trailers and chunk extensions")

    def _check_size(self, size: int, most: int, what: str) -> None:
        if size > most:
            self._refuse(APIError(f"The {what} are larger than {most} bytes.", status=431, code="head_too_large"))

    # ---- what the parser finds ----

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_message = True
        self._start_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # the parser calls this for trailers too
            super().on_header(name, value)

    def on_chunk_header(self) -> None:
        self._accounted_bytes += _CHUNK_FRAMING_BYTES

    def on_body(self, body: bytes) -> None:
        self._accounted_bytes += len(body)
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = self._framing_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_message = False
        self._ended_here = True
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        super().on_message_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_message and not self._in_head and self._linger_timer is None:
            self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)

    # ---- clients that do not read ----

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    # ---- clients that do not write ----

    def _start_head(self) -> None:
        self._in_head = True
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        self._refuse(APIError(f"The request's headers did not arrive within {HEAD_S:g} s.", status=408))

    def send_400_response(self, msg: str) -> None:
        self._refuse(APIError("This is not a valid HTTP request."))

    def _refuse(self, error: APIError) -> None:
        """Answers by hand, as there is no request, and closes."""
        if self.transport.is_closing():
            return
        body = error.body()
        fields = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
        lines = [f"HTTP/1.1 {error.status} ", *(f"{k}: {v}" for k, v in (fields | error.headers).items()), "", ""]
        self.transport.write("\r\n".join(lines).encode() + body)
        self.transport.close()


def protocol(max_connections: int) -> type[BoundedHttp]:
    attributes: dict[str, Any] = {"max_connections": max_connections}
    return type("Http", (BoundedHttp,), attributes)
