"""uvicorn's WebSocket protocol with the bounds that it lacks: on messages, and on clients that do not read.

`websockets` reads and writes the frames. A broken frame, invalid UTF-8 or a message that is too large ends its
connection with the status 1002, 1007 or 1009.
"""

import asyncio
import logging
import time
import weakref
from functools import partial
from typing import Any

from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import CloseCode, Frame

from oscine.api.common.errors import APIError
from oscine.api.common.memory import Bodies
from oscine.api.http.body import BODY_TIMEOUT_S
from oscine.api.http.receiving import ThrottledProtocol
from oscine.api.http.websocket_frames import FrameCutter, ParseBudget

BUSY = "oscine.busy"  # extension of a scope: a function that tells whether the connection has a request
STALLED_S = 120.0  # that a client may leave a full buffer unread
LINGER_S = 2.0  # for a client to read why its connection is closed
PING_S = 30.0  # an idle connection gets a ping after this long; no answer is required
MAX_FRAGMENTS = 16_384  # of a message
_logger = logging.getLogger("uvicorn.websocket")
_logger.setLevel(logging.ERROR)


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """One connection, from its upgrade on."""

    def __init__(self, limit: Any, bodies: Bodies, throttled: ThrottledProtocol, *args: Any) -> None:
        """`limit`: the ConnectionLimit that has counted it. `bodies` counts the memory of messages that are not
        complete. Other arguments: those of uvicorn's protocol."""
        super().__init__(*args)
        self.logger = _logger
        self._limit, self._bodies, self._throttled = limit, bodies, throttled
        self._cutter = FrameCutter(self.config.ws_max_size)
        self._head = b""  # of the request, until its turn of the event loop
        self._parses_later = False  # in a later turn of the event loop
        self._fragment_bytes = 0  # of the message that is not complete
        self._held_bytes = 0  # counted by `bodies`
        self._has_failed = False  # by what the client sent: the rest of it is dropped
        self._stall_timer: asyncio.TimerHandle | None = None
        self._message_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.set_busy(busy=False)

    def handle_connect(self, event: Any) -> None:
        super().handle_connect(event)
        if hasattr(self, "scope"):  # the application runs from the next turn of the event loop on
            extensions: dict[str, Any] = self.scope["extensions"]
            extensions[BUSY] = partial(_set_busy, weakref.ref(self))

    async def send(self, message: Any) -> None:
        """Raises ClientDisconnected."""
        if self._has_failed:
            raise ClientDisconnected
        await super().send(message)
        if message["type"] == "websocket.accept":
            self._read()
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True  # by a refusal; else uvicorn reports an error of the application

    def set_busy(self, *, busy: bool) -> None:
        self._limit.idle.pop(self, None)
        if not busy and not self.disconnected:
            self._limit.idle[self] = None

    def abort(self) -> None:
        self._limit.leave(self)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._stall_timer, self._message_timer):
            if timer is not None:
                timer.cancel()
        self._hold(0)
        self._cutter.clear(self._limit.freeing)
        self.frames = []
        self.connections.add(self)  # `abort` has removed it; uvicorn removes it once more
        super().connection_lost(exc)
        self._limit.leave(self)
        self.conn.parser.close()  # its frame is part of a reference cycle, which only a collector would free

    def begin(self, head: bytes, rest: bytes) -> None:
        """`head`: of the request. `rest`: what the client has sent behind it."""
        self._head = head
        self._cutter.add(rest)
        self._read()

    def data_received(self, data: bytes) -> None:
        if not self._has_failed:
            self._cutter.add(data)
            self._read()

    def _read(self) -> None:
        """Reads the head, and frames until a message waits for the application, or the time of this turn is over."""
        budget: ParseBudget = self._limit.parse_budget
        while not (self.read_paused or self._parses_later or self._has_failed or self.transport.is_closing()):
            if budget.is_spent:
                self._parses_later = True
                self.loop.call_soon(self._read_on)
                break
            began_s = time.perf_counter()
            # frames wait until the application has accepted: an answer to one would come before that of the handshake
            frame = self._cutter.take() if self.handshake_complete else self._head
            self._head = b""
            if not frame:
                break
            super().data_received(frame)
            budget.spend(began_s)
        self._count()
        self._set_reading()

    def _read_on(self) -> None:
        self._parses_later = False
        self._read()

    def _count(self) -> None:
        """Counts what is kept, and gives a message that is not complete its deadline."""
        part_bytes = 0 if self._has_failed else self._cutter.num_bytes + self._fragment_bytes
        has_part = bool(self.frames) or part_bytes > 0
        try:
            self._hold(part_bytes)
        except APIError as error:
            self._fail(CloseCode.TRY_AGAIN_LATER, error.message)
        if has_part and self._message_timer is None:
            self._message_timer = self.loop.call_later(BODY_TIMEOUT_S, self._is_late)
        elif not has_part and self._message_timer is not None:
            self._message_timer.cancel()
            self._message_timer = None

    def _set_reading(self) -> None:
        """Reads from the client unless something waits: for the application, for a turn, or for the client itself.

        The application has to accept the connection first.
        """
        if self.transport.is_closing():
            return
        waits = self.read_paused or self._parses_later or not (self.handshake_complete and self.writable.is_set())
        if waits and not self._has_failed:
            self._throttled.pause_reading()
        else:
            self._throttled.resume_reading()

    async def receive(self) -> Any:
        message = await self.queue.get()
        if self.read_paused and self.queue.empty():
            self.read_paused = False
            self._read()
        return message

    def _hold(self, size: int) -> None:
        """Raises APIError where memory is short."""
        self._bodies.give_back(self._held_bytes)
        self._held_bytes = 0
        self._bodies.take(size)
        self._held_bytes = size

    def _is_late(self) -> None:
        self._message_timer = None
        self._fail(CloseCode.POLICY_VIOLATION, f"the message did not arrive within {BODY_TIMEOUT_S:g} s")

    def handle_cont(self, event: Frame) -> None:
        if len(self.frames) >= MAX_FRAGMENTS:
            self._fail(CloseCode.MESSAGE_TOO_BIG, f"a message has at most {MAX_FRAGMENTS} fragments")
        else:
            self._fragment_bytes += len(event.data)
            super().handle_cont(event)

    def handle_text(self, event: Frame) -> None:
        self._fragment_bytes = len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._fragment_bytes = len(event.data)
        super().handle_bytes(event)

    def send_receive_event_to_app(self) -> None:
        self._fragment_bytes = 0
        if self.curr_msg_data_type == "text":
            try:
                self.frames = [b"".join(self.frames)]
                self.frames[0].decode()
            except UnicodeDecodeError:
                self._fail(CloseCode.INVALID_DATA, "the text is not UTF-8")
                return
        super().send_receive_event_to_app()

    def _fail(self, code: CloseCode, reason: str) -> None:
        if self.close_sent or self.transport.is_closing():
            return
        self.frames = []
        if self.handshake_complete:
            self.conn.fail(code, reason)
            self.handle_parser_exception()
        else:  # the application has not accepted it yet
            self._has_failed = True
            self.transport.abort()

    def handle_parser_exception(self) -> None:
        """Closes, but reads on for a while: the kernel would drop what was written if bytes were left unread."""
        self._has_failed = True
        self._cutter.clear(self._limit.freeing)
        self._hold(0)
        assert self.conn.close_sent is not None
        code, reason = self.conn.close_sent.code, self.conn.close_sent.reason
        self.queue.put_nowait({"type": "websocket.disconnect", "code": code, "reason": reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.close_timer = self.loop.call_later(LINGER_S, self.transport.close)
        self._set_reading()

    def pause_writing(self) -> None:
        """Nothing more is read from a client that does not read, else the answers to its pings would pile up."""
        super().pause_writing()
        self._set_reading()
        if self._stall_timer is None:
            self._stall_timer = self.loop.call_later(STALLED_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        self._set_reading()


def _set_busy(connection: "weakref.ref[BoundedWebSocket]", *, busy: bool) -> None:
    if (found := connection()) is not None:
        found.set_busy(busy=busy)
