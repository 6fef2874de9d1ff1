"""uvicorn's HTTP protocol with the bounds that it lacks: on connections, request heads, and clients that do not read.

body has the bounds of bodies.
"""

import asyncio
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from oscine.api.common.errors import APIError, unavailable
from oscine.api.common.memory import Bodies
from oscine.api.http.receiving import ReadThrottle, ThrottledProtocol
from oscine.api.http.websocket import BoundedWebSocket
from oscine.api.http.websocket_frames import Freeing, ParseBudget

MAX_HEAD_BYTES = 65_536  # request line and headers
MAX_FRAMING_BYTES = 65_536  # trailers and chunk extensions of a request
MAX_UNPARSED_BYTES = 65_536  # kept while a request waits for the one before it
_TURN_BYTES = 32_768  # of a connection, parsed in one turn of the event loop; each may be a chunk or a header
_SLICE_BYTES = 512  # parsed at once; later bytes are parsed when the requests before them are answered
_RESERVE = 64  # connections above the limit, for probes only
_MAX_DIGITS = 20  # of a length; the parser refuses longer ones
_CHUNK_FRAMING_BYTES = 20  # of a chunk without extensions: its length and two line breaks
HEAD_S = 15.0  # from the first byte of a head, or from the connection, to its last
STALLED_S = 120.0  # that a client may leave a full buffer unread
FIRST_PROBE_S, LAST_PROBE_S = 0.05, 10.0  # between probes of a client that sends no more
_PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"
LINGER_S = 2.0  # for a client to read a response that came before it had sent its body


class _Flow(FlowControl):
    """Flow control that stops reading while it is `full`, even if a request asks for more.

    It ends the connection of a client that leaves a full buffer unread.
    """

    full = False
    stall_timer: asyncio.TimerHandle | None = None

    def __init__(self, transport: asyncio.Transport, throttled: ThrottledProtocol) -> None:
        super().__init__(transport)
        self._throttled = throttled

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self._throttled.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused and not self.full:
            self.read_paused = False
            self._throttled.resume_reading()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.stall_timer is None:
            self.stall_timer = asyncio.get_running_loop().call_later(STALLED_S, self._transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.stall_timer is not None:
            self.stall_timer.cancel()
            self.stall_timer = None


class _Parser:
    """Parses requests with an `Upgrade` that the server does not serve, such as h2c, like any others.

    llhttp stops after the head of such a request. So a new parser reads the body and all later requests. It is first
    fed a made-up head with the same framing headers, which the reader ignores.
    """

    def __init__(self, reader: "_RequestReader") -> None:
        self.framing = b""  # headers that frame the body of a request that offers another protocol
        self._reader = reader
        self._current = self._new()

    def _new(self) -> HttpRequestParser:
        parser = HttpRequestParser(self._reader)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        return parser

    def feed_data(self, data: bytes) -> None:
        while data:
            try:
                self._current.feed_data(data)
                return
            except HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                if self._reader.is_for_websocket():
                    self._reader.rest = data
                    raise
                if self.framing:
                    self._begin_body()

    def _begin_body(self) -> None:
        framing, self.framing = self.framing, b""
        self._current = self._new()
        with self._reader.skipped_head():
            self._current.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % framing)

    def get_http_version(self) -> str:
        return self._current.get_http_version()

    def get_method(self) -> bytes:
        return self._current.get_method()

    def should_keep_alive(self) -> bool:
        return self._current.should_keep_alive()

    def should_upgrade(self) -> bool:
        return self._current.should_upgrade()


class _RequestReader:
    """Parses what a client sends, with bounds on heads, on the framing of bodies, and on what is parsed in one turn.

    The parser calls its `on_` methods, and these call those of the connection. The connection owns parser and reader,
    and the reader has a weak proxy of it, so that no reference cycle is left for a collector.
    """

    in_message = False  # between the first byte of a request and the last of its body
    in_head = True  # waiting for the end of a head, also on a new connection
    head_timer: asyncio.TimerHandle | None = None
    unparsed = b""  # kept while a request is answered
    rest = b""  # what follows the head of a request for a WebSocket
    _skips = False  # whether the parser reads a head that no client sent
    _head_bytes = 0
    _ended_here = False  # whether a message ended in the newest bytes, so that not all of them belong to the next head
    _framing_bytes = 0  # size of the request's trailers and chunk extensions
    _accounted_bytes = 0  # part of the newest bytes: body, and the usual framing of its chunks
    _body_left = 0  # bytes to come of a body with a length

    def __init__(self, http: "BoundedHttp") -> None:
        self._http: BoundedHttp = weakref.proxy(http)

    def receive(self, data: bytes) -> None:
        if self._http.refusal is not None or self.unparsed or self._http.pipeline:
            self._keep(data)
        else:
            self._parse(data)

    def _keep(self, data: bytes) -> None:
        self.unparsed += data
        if len(self.unparsed) > MAX_UNPARSED_BYTES:
            self._http.flow.full = True
            self._http.flow.pause_reading()

    def parse_on(self) -> None:
        """Parses the bytes that were kept, once the request before them is answered."""
        data, self.unparsed = self.unparsed, b""
        self._http.flow.full = False
        self._http.flow.resume_reading()
        if data:
            self._parse(data)
        if self._http.at_end and self._http.is_done:
            self._http.transport.close()

    def _parse(self, data: bytes) -> None:
        """Parses in slices, so that few pipelined requests exist at once: objects are larger than their bytes.

        A body is one slice, as no request is within it.
        """
        begin = 0
        while begin < len(data) and not self._http.is_ending:
            if self._http.pipeline:
                self._keep(data[begin:])
                return
            if begin >= _TURN_BYTES:
                self._keep(data[begin:])
                self._http.parse_later()
                return
            end = begin + (_SLICE_BYTES if self.in_head else max(_SLICE_BYTES, self._body_left))
            self._parse_slice(data[begin:end])
            if self._http.websocket is not None:
                self._http.websocket.data_received(data[end:])
                return
            begin = end

    def is_for_websocket(self) -> bool:
        return self._http.is_for_websocket()

    def _parse_slice(self, data: bytes) -> None:
        self._ended_here, self._accounted_bytes = False, 0
        after_head = not self.in_head
        self._http.feed(data)
        if self._ended_here:
            return
        if self.in_head:
            self._head_bytes += len(data)
        elif after_head:
            self._framing_bytes += max(0, len(data) - self._accounted_bytes)
        self._check_size(self._head_bytes, MAX_HEAD_BYTES, "request line and the headers")
        self._check_size(self._framing_bytes, MAX_FRAMING_BYTES, "trailers and chunk extensions")

    def _check_size(self, size: int, most: int, what: str) -> None:
        if size > most:
            message = f"The {what} are larger than {most} bytes."
            self._http.refuse(APIError(message, status=431, code="head_too_large"))

    def start_head(self) -> None:
        self.in_head = True
        if self.head_timer is None:
            self.head_timer = self._http.loop.call_later(HEAD_S, self._head_is_late)

    def _head_is_late(self) -> None:
        self.head_timer = None
        if self.unparsed:  # the server itself delays it
            self.start_head()
            return
        self._http.refuse(APIError(f"The request's headers did not arrive within {HEAD_S:g} s.", status=408))

    @contextmanager
    def skipped_head(self) -> Iterator[None]:
        """The head that is parsed within it is no request. A body may end with it."""
        self._skips = True
        try:
            yield
        finally:
            self._skips = False

    def on_message_begin(self) -> None:
        if self._skips or self._http.is_ending:
            return
        self._http.on_message_begin()
        self.in_message, self._body_left = True, 0
        self.start_head()

    def on_url(self, url: bytes) -> None:
        if not self._skips:
            self._http.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.in_head:  # the parser calls this for trailers too
            self._http.on_header(name, value)
            if self._http.headers[-1][0] == b"content-length" and value.isdigit() and len(value) < _MAX_DIGITS:
                self._body_left = int(value)

    def on_headers_complete(self) -> None:
        if self._skips or self._http.is_ending:
            return
        self.in_head = False
        self._head_bytes = self._framing_bytes = 0
        self.end_head_timer()
        parser, headers = self._http.parser, self._http.headers
        if parser.should_upgrade() and not self._http.is_for_websocket():
            framing = (b"%b: %b\r\n" % (n, v) for n, v in headers if n in (b"content-length", b"transfer-encoding"))
            parser.framing = b"".join(framing)
        self._http.on_headers_complete()

    def end_head_timer(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()
            self.head_timer = None

    def on_chunk_header(self) -> None:
        self._accounted_bytes += _CHUNK_FRAMING_BYTES

    def on_body(self, body: bytes) -> None:
        self._accounted_bytes += len(body)
        self._body_left -= len(body)
        if not self._http.is_ending:
            self._http.on_body(body)

    def on_message_complete(self) -> None:
        if self._http.parser.framing or self._http.is_ending:
            return
        self.in_message = False
        self._ended_here = True
        self._http.on_message_complete()


class ConnectionLimit:
    """One for all connections of a server. At the limit a new one replaces the one longest without a request.

    If all connections have requests, a few more are accepted, and only probes are answered on them.
    """

    def __init__(self, most: int, probes: frozenset[bytes]) -> None:
        """`probes`: paths."""
        self.most, self.probes = most, probes
        self.read_throttle = ReadThrottle()  # of all connections
        self.parse_budget, self.freeing = ParseBudget(), Freeing()  # of all WebSockets
        self.idle: dict[BoundedHttp | BoundedWebSocket, None] = {}  # connections without a request, oldest first

    def enter(self, http: "BoundedHttp") -> bool:
        """Counts the connection; closes the oldest idle one at the limit. Returns whether there are too many still."""
        http.connections.add(http)
        if len(http.connections) > self.most and self.idle:
            next(iter(self.idle)).abort()
        self.idle[http] = None
        return len(http.connections) > self.most

    def leave(self, connection: "BoundedHttp | BoundedWebSocket") -> None:
        self.idle.pop(connection, None)
        connection.connections.discard(connection)


class BoundedHttp(HttpToolsProtocol):
    """One connection."""

    # For the whole process; the server makes a subclass with its own values.
    limit: ConnectionLimit
    on_refused: Callable[[str | None, APIError], None]
    is_leaving: Callable[[], bool]
    websockets: frozenset[bytes]  # paths
    bodies: Bodies  # counts the memory of their messages

    websocket: BoundedWebSocket | None = None  # which has the connection from now on
    throttled: ThrottledProtocol  # of its transport

    flow: _Flow
    parser: _Parser  # type: ignore[assignment]
    _reader: _RequestReader
    _linger_timer: asyncio.TimerHandle | None = None
    _probe_timer: asyncio.TimerHandle | None = None
    at_end = False  # whether the client has ended its sending side
    _handshake: "asyncio.Task[None] | None" = None
    _above_limit = False  # whether all other connections had requests when it was accepted
    _running: Any = None  # the request that is being answered; others may have been read behind it
    refusal: APIError | None = None  # of what follows the requests being answered; no later bytes are parsed

    def accepted(self, client: tuple[str, int], handshake: "asyncio.Task[None]") -> None:
        """Counts a TLS connection before its handshake. Cancelling the handshake ends the connection."""
        self.client, self._handshake = client, handshake
        self._above_limit = self.limit.enter(self)

    def abandon(self) -> None:
        """Its handshake has failed, or was cancelled."""
        self.limit.leave(self)
        self._handshake = None
        self.throttled.let_go()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._reader = _RequestReader(self)
        self.flow, self.parser = _Flow(transport, self.throttled), _Parser(self._reader)
        if self._handshake is None:
            self._above_limit = self.limit.enter(self)
        self._handshake = None
        if len(self.connections) > self.limit.most + _RESERVE:
            self.refuse(_full())
        else:
            self._reader.start_head()

    def abort(self) -> None:
        self.limit.leave(self)
        if self._handshake is not None:
            self._handshake.cancel()
        else:
            self.transport.abort()

    def shutdown(self) -> None:
        if self._handshake is not None:
            self._handshake.cancel()
        else:
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self.limit.leave(self)
        for timer in (self._reader.head_timer, self._linger_timer, self._probe_timer):
            if timer is not None:
                timer.cancel()
        self._reader.head_timer = self._linger_timer = self._probe_timer = None
        if self._running is not None:  # uvicorn notifies only the newest one
            self._running.disconnected = True
            self._running.message_event.set()
        for cycle, _ in self.pipeline:  # requests that will not begin; each refers to this connection
            cycle.on_response = _nothing
        self.pipeline.clear()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()  # which uvicorn does for clients that close in order only

    def data_received(self, data: bytes) -> None:
        self._reader.receive(data)

    def feed(self, data: bytes) -> None:
        """Gives bytes to the parser."""
        super().data_received(data)

    def parse_later(self) -> None:
        """Parses the bytes that were kept. The event loop keeps the connection until then; the reader does not."""
        self.loop.call_soon(self._parse_on)

    def _parse_on(self) -> None:
        self._reader.parse_on()

    def eof_received(self) -> bool:  # type: ignore[override]
        """A client may end its sending side and still read. What it has asked is answered before the connection is
        closed; TLS cannot be open on one side only. Returns whether the connection stays open."""
        if self.scheme == "https" or self.is_done:
            return False
        if not self.at_end:
            self.at_end = True
            self._probe(FIRST_PROBE_S)
        return True

    @property
    def is_ending(self) -> bool:
        """Whether no further request, and no further part of one, is taken."""
        return self.refusal is not None or self.transport.is_closing()

    @property
    def is_done(self) -> bool:
        """Whether no request is to be answered, after the end of what the client sends."""
        if self.refusal is not None:  # which closes the connection
            return False
        if self._reader.unparsed or self.pipeline:
            return False
        in_body = self._reader.in_message and not self._reader.in_head  # of the request that runs
        return in_body or self._running is None or self._running.response_complete

    def _probe(self, pause_s: float) -> None:
        """Writes an interim response, which clients skip, so that the kernel notices a client that has left.

        Events of a stream show that too, and no other bytes may be among them. HTTP/1.0 has no interim responses.
        """
        running = self._running
        self._probe_timer = self.loop.call_later(pause_s, self._probe, min(2 * pause_s, LAST_PROBE_S))
        if running is not None and not running.response_started and running.scope["http_version"] == "1.1":
            self.transport.write(_PROBE)

    def on_headers_complete(self) -> None:
        self.limit.idle.pop(self, None)
        above = self._above_limit and len(self.connections) > self.limit.most
        if above and self.url.partition(b"?")[0] not in self.limit.probes:
            self.refuse(_full())
            return
        super().on_headers_complete()
        if self.cycle is not None and (above or self.is_leaving()):
            self.cycle.keep_alive = False  # and the response says so

    def is_for_websocket(self) -> bool:
        """Whether the request whose head was read goes on as a WebSocket: not behind one that is not answered yet."""
        if self.is_ending or not (self.cycle is None or self.cycle.response_complete):
            return False
        path = self.url.partition(b"?")[0]
        return path in self.websockets and self._get_upgrade() == b"websocket" and self.parser.get_method() == b"GET"

    def _should_upgrade(self) -> bool:
        return self.is_for_websocket()

    def handle_websocket_upgrade(self) -> None:
        self.limit.leave(self)
        self._unset_keepalive_if_required()
        head = [b"GET %b HTTP/1.1\r\n" % self.url, *(b"%b: %b\r\n" % field for field in self.headers), b"\r\n"]
        of_uvicorn = (self.config, self.server_state, self.app_state)
        self.websocket = BoundedWebSocket(self.limit, self.bodies, self.throttled, *of_uvicorn)
        self.websocket.connection_made(self.transport)
        self.throttled.target = self.websocket
        self.websocket.begin(b"".join(head), self._reader.rest)

    def on_message_complete(self) -> None:
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        super().on_message_complete()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self.refusal is not None:
            self.refuse(self.refusal)
            return
        reader = self._reader
        if self.cycle.response_complete:
            self.limit.idle[self] = None
            if reader.in_message and not reader.in_head and self._linger_timer is None:
                self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)
        if reader.unparsed or self.at_end:
            self.parse_later()

    def send_400_response(self, msg: str) -> None:
        self.refuse(APIError("This is not a valid HTTP request."))

    def refuse(self, error: APIError) -> None:
        """Writes the response itself, as there is no request, and closes: once the requests before it are answered.

        Of several errors the first is written.
        """
        if self.transport.is_closing():
            return
        self._drop_unfinished()
        if self._answers_whole_request:
            if self.refusal is None:
                self.refusal, self._reader.unparsed = error, b""
                self._reader.end_head_timer()
            return
        self.on_refused(self.client[0] if self.client else None, error)
        body = error.body()
        fields = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
        lines = [f"HTTP/1.1 {error.status} ", *(f"{k}: {v}" for k, v in (fields | error.headers).items()), "", ""]
        self.transport.write("\r\n".join(lines).encode() + body)
        self.transport.close()

    def _drop_unfinished(self) -> None:
        """Drops a queued request whose body has not ended. Only the newest one can be such."""
        if self.pipeline and self.pipeline[0][0].more_body:
            self.pipeline.popleft()

    @property
    def _answers_whole_request(self) -> bool:
        running = self._running
        return running is not None and not running.more_body and not running.response_complete


def _nothing() -> None: ...


def _full() -> APIError:
    return unavailable("The server has reached its limit of connections.", code="overloaded")


def protocol(
    max_connections: int,
    *,
    probes: Collection[str] = (),
    websockets: Collection[str] = (),
    bodies: Bodies | None = None,
    on_refused: Callable[[str | None, APIError], None] = lambda client, error: None,
    is_leaving: Callable[[], bool] = lambda: False,
) -> Callable[..., ThrottledProtocol]:
    """What makes the protocol of a new connection, from uvicorn's arguments. Its first target is a BoundedHttp.

    `probes`: paths that are answered even when all connections have requests. `websockets`: paths of WebSockets,
    the memory of whose messages `bodies` counts.

    `on_refused(address, error)` is called for errors answered here, which never reach the application. While
    `is_leaving`, each connection ends with the response to its next request.
    """
    limit = ConnectionLimit(max_connections, frozenset(path.encode() for path in probes))
    paths = frozenset(path.encode() for path in websockets)
    values = {"limit": limit, "websockets": paths, "bodies": bodies or Bodies()}
    calls = {"on_refused": staticmethod(on_refused), "is_leaving": staticmethod(is_leaving)}
    kind: type[BoundedHttp] = type("Http", (BoundedHttp,), values | calls)

    def make(*args: Any, **options: Any) -> ThrottledProtocol:
        http = kind(*args, **options)
        http.throttled = ThrottledProtocol(http, limit.read_throttle)
        return http.throttled

    return make
