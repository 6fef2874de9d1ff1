"""JSON-RPC messages to and from an MCP server: over the pipes of a command, or over HTTP.

What a server sends is bounded while it is read, after decompression. Between pieces the event loop goes on.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Protocol

import httpx2
import msgspec

from oscine.chat.toolbox import bounded
from oscine.system.json_text import decode_json

MAX_MESSAGE_BYTES = 4 << 20
_MAX_UNASKED_BYTES = 16 << 20  # of messages between two answers
_MESSAGE_COST = 1024  # bytes that a message counts for at least
_PIECE = 1 << 14  # bytes that are looked at without a pause
_MAX_ERROR = 1000  # characters
_MAX_REDIRECTS = 3
_MIN_RETRY_S = 0.1
_TERMINATION_S = 2.0  # for a process to end by itself, and then by SIGTERM
_INHERITED = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER")
_METHOD_NOT_FOUND = -32601
SESSION_HEADER = "Mcp-Session-Id"


class ServerError(Exception):
    """The failure of a server, in a sentence."""

    def __init__(self, message: str) -> None:
        plain = "".join(c if c.isprintable() else " " for c in bounded(message, _MAX_ERROR))
        super().__init__(plain)


class RefusedError(ServerError):
    """The server's own error as the answer to a request."""


class BrokenError(ServerError):
    """The connection is of no further use."""


class _Error(msgspec.Struct):
    message: str = ""


class Message(msgspec.Struct):
    """What is read of a message: no other field is decoded."""

    id: int | str | None = None
    method: str | None = None
    result: msgspec.Raw = msgspec.Raw()
    error: _Error | None = None


class Wire(Protocol):
    """A connection for messages."""

    @property
    def ended(self) -> bool:
        """Whether it is known to be of no further use."""

    async def ask(self, request: Mapping[str, Any], headers: Mapping[str, str]) -> msgspec.Raw:
        """The result for a request with `id`, `method` and `params`. Raises ServerError, OSError or HTTPError."""

    async def tell(self, notification: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        """Sends a notification, which has no answer. Raises the same errors."""

    async def close(self) -> None: ...


def _read(data: bytes) -> Message:
    try:
        return decode_json(data, Message)
    except (ValueError, RecursionError) as error:
        raise ServerError(f"its message is malformed: {error}") from None


def _result(answer: Message) -> msgspec.Raw:
    if answer.error is not None:
        raise RefusedError(answer.error.message or "the server gave an error without a message")
    return answer.result


def _encoded(message: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode({"jsonrpc": "2.0", **message})


def _reply(request: Message) -> bytes:
    """The answer to a request of the server. Only pings are served."""
    if request.method == "ping":
        return _encoded({"id": request.id, "result": {}})
    return _encoded({"id": request.id, "error": {"code": _METHOD_NOT_FOUND, "message": "Method not found"}})


class _Unasked:
    """Counts what a server sends since its last answer."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, size: int, least: int = _MESSAGE_COST) -> None:
        """Raises ServerError."""
        self._bytes += max(size, least)
        if self._bytes > _MAX_UNASKED_BYTES:
            raise ServerError("it sends too much that is no answer")

    def answered(self) -> None:
        self._bytes = 0


def _too_long() -> ServerError:
    return ServerError(f"its message is longer than {MAX_MESSAGE_BYTES >> 20} MiB")


def _check_length(size: int) -> None:
    if size > MAX_MESSAGE_BYTES:
        raise _too_long()


# ---- a command ----


class PipeWire:
    """A process of its own, with one message per line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process, self._in, self._out = process, process.stdin, process.stdout
        self._waiting: dict[str, asyncio.Future[msgspec.Raw]] = {}  # by id
        self._unasked = _Unasked()
        self._end: BrokenError | None = None  # why nothing more is read
        self._reading = asyncio.ensure_future(self._read_all())

    @classmethod
    async def open(cls, command: str, args: list[str], env: Mapping[str, str], cwd: str | None) -> "PipeWire":
        """Raises OSError."""
        inherited = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        process = await asyncio.create_subprocess_exec(
            command,
            *args,
            env=inherited | dict(env),
            cwd=cwd,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return cls(process)

    @property
    def ended(self) -> bool:
        return self._end is not None

    async def ask(self, request: Mapping[str, Any], headers: Mapping[str, str]) -> msgspec.Raw:
        if self._end is not None:
            raise self._end
        key = str(request["id"])
        answer: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._waiting[key] = answer
        try:
            await self.tell(request, headers)
            return await answer
        finally:
            del self._waiting[key]

    async def tell(self, notification: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        self._in.write(_encoded(notification) + b"\n")
        await self._in.drain()

    async def close(self) -> None:
        self._reading.cancel()
        await asyncio.wait((self._reading,))
        await self._stop()

    async def _read_all(self) -> None:
        try:
            await self._read_lines()
            self._end = BrokenError("Connection closed")
        except (ServerError, OSError) as error:
            self._end = BrokenError(str(error))
        self._fail(self._end)

    async def _read_lines(self) -> None:
        """Until the process closes its end. Raises ServerError for too much that is no answer."""
        line, skipping = bytearray(), False
        while piece := await self._out.read(_PIECE):
            for part in piece.splitlines(keepends=True):
                line += part
                if part.endswith((b"\n", b"\r")):
                    if not skipping and not line.isspace():
                        self._take(bytes(line))
                    line, skipping = bytearray(), False
            if len(line) > MAX_MESSAGE_BYTES:
                self._unasked.add(len(line))
                if not skipping:
                    self._fail(_too_long())
                line, skipping = bytearray(), True  # the rest of the line is of no use
            await asyncio.sleep(0)

    def _take(self, line: bytes) -> None:
        try:
            message = _read(line)
        except ServerError as error:
            self._unasked.add(len(line))
            if line.lstrip().startswith(b"{"):  # else it is a line of a log, which some servers write here
                self._fail(error)
            return
        answer = None if message.method is not None else self._waiting.get(str(message.id))
        if answer is None:
            self._unasked.add(len(line))
            if message.method is not None and message.id is not None:
                self._in.write(_reply(message) + b"\n")
            return
        self._unasked.answered()
        if not answer.done():
            try:
                answer.set_result(_result(message))
            except RefusedError as error:
                answer.set_exception(error)

    def _fail(self, error: ServerError) -> None:
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)

    async def _stop(self) -> None:
        """Ends the process and all that it has started, at last by force."""
        self._in.close()
        draining = asyncio.ensure_future(self._drain())  # a process that cannot write does not end
        for number in (signal.SIGTERM, signal.SIGKILL, None):
            try:
                await asyncio.wait_for(self._process.wait(), _TERMINATION_S)
                break
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    if number is not None:
                        os.killpg(self._process.pid, number)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # what has outlived the process
        draining.cancel()

    async def _drain(self) -> None:
        while await self._out.read(_PIECE):
            await asyncio.sleep(0)


# ---- HTTP ----


class HttpWire:
    """An address of streamable HTTP: each request is a POST, whose response holds the answer."""

    ended = False

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = httpx2.URL(url)
        self._session: dict[str, str] = {}  # the header of the session, once there is one
        # Nothing has to be decompressed. A server that compresses all the same is read piece by piece.
        self._http = httpx2.AsyncClient(headers={"Accept-Encoding": "identity", **headers}, timeout=None)

    async def ask(self, request: Mapping[str, Any], headers: Mapping[str, str]) -> msgspec.Raw:
        async with self._post(_encoded(request), headers) as response:
            if request["method"] == "initialize" and SESSION_HEADER in response.headers:
                self._session = {SESSION_HEADER: response.headers[SESSION_HEADER]}
            kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if kind == "application/json":
                answer = await self._from_body(response)
            elif kind == "text/event-stream" and response.is_success:
                answer = await self._from_events(response, headers)
            else:
                answer = None
            if answer is None:
                raise self._failure(response, kind)
            return _result(answer)

    async def tell(self, notification: Mapping[str, Any], headers: Mapping[str, str]) -> None:
        await self._send(_encoded(notification), headers)

    async def close(self) -> None:
        if self._session:
            with contextlib.suppress(httpx2.HTTPError, TimeoutError):
                async with asyncio.timeout(_TERMINATION_S), self._stream("DELETE", {}):
                    pass
        await self._http.aclose()

    async def _send(self, message: bytes, headers: Mapping[str, str]) -> None:
        async with self._post(message, headers):
            pass

    def _post(self, message: bytes, headers: Mapping[str, str]) -> contextlib.AbstractAsyncContextManager[Any]:
        kinds = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}
        return self._stream("POST", {**kinds, **headers}, message)

    @contextlib.asynccontextmanager
    async def _stream(
        self, method: str, headers: Mapping[str, str], content: bytes | None = None
    ) -> AsyncIterator[httpx2.Response]:
        """A response, after redirects that keep to the method and the origin; others are answers."""
        request = self._http.build_request(method, self._url, headers={**headers, **self._session}, content=content)
        for left in reversed(range(_MAX_REDIRECTS + 1)):
            response = await self._http.send(request, stream=True, follow_redirects=False)
            following = response.next_request
            if not left or following is None or not _keeps(request, following):
                break
            await response.aclose()
            request = following
        try:
            yield response
        finally:
            await response.aclose()

    async def _from_body(self, response: httpx2.Response) -> Message | None:
        """None for a failure without an error in the body."""
        body = bytearray()
        async for piece in _pieces(response):
            body += piece
            _check_length(len(body))
        if response.is_success:
            return _read(bytes(body))
        with contextlib.suppress(ServerError):
            answer = _read(bytes(body))
            return answer if answer.error is not None else None
        return None

    async def _from_events(self, response: httpx2.Response, headers: Mapping[str, str]) -> Message:
        """The answer of a stream of events. A stream that ends before is continued from its last event."""
        events, unasked = Events(), _Unasked()
        if (answer := await self._answer(response, headers, events, unasked)) is not None:
            return answer
        while events.last_id:
            await asyncio.sleep(max(events.retry_s, _MIN_RETRY_S))
            again = {"Accept": "text/event-stream", "Last-Event-ID": events.last_id, **headers}
            async with self._stream("GET", again) as more:
                if not more.is_success:
                    raise self._failure(more, "")
                events.begin()
                if (answer := await self._answer(more, headers, events, unasked)) is not None:
                    return answer
        raise ServerError("its stream ended without an answer")

    async def _answer(
        self, response: httpx2.Response, headers: Mapping[str, str], events: "Events", unasked: _Unasked
    ) -> Message | None:
        try:
            async for piece in _pieces(response):
                unasked.add(len(piece), least=0)
                for data in events.feed(piece):
                    message = _read(data)
                    if message.method is None:
                        return message
                    unasked.add(len(data))
                    if message.id is not None:
                        await self._send(_reply(message), headers)
        except httpx2.TransportError:
            if not events.last_id:
                raise
        return None

    def _failure(self, response: httpx2.Response, kind: str) -> ServerError:
        if response.is_redirect:
            return ServerError("it redirects to another place, which is not followed")
        if response.status_code == 404:
            return BrokenError("Session terminated") if self._session else ServerError("Not Found")
        if response.is_success:
            return ServerError(f"its answer has the content type {kind!r}")
        return ServerError(f"its answer has the status {response.status_code}")


async def _pieces(response: httpx2.Response) -> AsyncIterator[bytes]:
    """The decompressed body. The event loop goes on after each piece."""
    async for piece in response.aiter_bytes():
        for start in range(0, len(piece), _PIECE):
            yield piece[start : start + _PIECE]
            await asyncio.sleep(0)


def _keeps(request: httpx2.Request, following: httpx2.Request) -> bool:
    """Whether a redirect stays at the same server, and so may see the headers."""
    old, new = request.url, following.url
    upgraded = (old.scheme, new.scheme, old.port, new.port) == ("http", "https", None, None)
    same = (old.scheme, old.port) == (new.scheme, new.port)
    return (
        request.method == following.method
        and old.host == new.host
        and (same or upgraded)
        and new.userinfo in (b"", old.userinfo)
    )


class Events:
    """Reads server-sent events."""

    def __init__(self) -> None:
        self.last_id = ""
        self.retry_s = 1.0
        self.begin()

    def begin(self) -> None:
        """What follows is a new stream."""
        self._line = bytearray()
        self._data: list[bytes] = []
        self._size = 0
        self._kind = b"message"
        self._after_cr = False

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The data of each message that is complete. Raises ServerError for one that is too long."""
        if self._after_cr and piece.startswith(b"\n"):
            piece = piece[1:]
        self._after_cr = piece.endswith(b"\r")
        for part in piece.splitlines(keepends=True):
            _check_length(self._size + len(self._line) + len(part))
            if not part.endswith((b"\n", b"\r")):
                self._line += part
                return
            line = bytes(self._line + part if self._line else part).rstrip(b"\r\n")
            self._line.clear()
            if line:
                self._field(line)
            elif (data := self._event()) is not None:
                yield data

    def _field(self, line: bytes) -> None:
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                self._data.append(value)
                self._size += len(value)
            case b"event":
                self._kind = value
            case b"id" if b"\0" not in value and len(value) <= _MAX_ERROR:
                self.last_id = value.decode("latin-1")
            case b"retry" if value.isdigit() and len(value) < 10:
                self.retry_s = int(value) / 1000

    def _event(self) -> bytes | None:
        data, kind = b"\n".join(self._data), self._kind
        self._data, self._size, self._kind = [], 0, b"message"
        return data if data and kind == b"message" else None
