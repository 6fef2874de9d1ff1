"""Bounds the bytes that are received in one turn of the event loop, from all clients together.

Reading has a cost per byte: the kernel's copy, and fresh memory. uvloop reads a socket up to 32 times, 250 KiB each,
before it turns to the next one, and to all that have data before anything else runs. 160 clients with 4 MiB each made
a turn of 160 MiB, in which all streams stood still for 390 ms.
"""

import asyncio
from typing import Protocol, cast

TURN_BYTES = 2 << 20  # received in one turn of the event loop: some milliseconds
READ_BYTES = 256 << 10  # at once; blocks of this size have mappings of their own (system/freed_memory)
LEAST_BYTES = 4096  # of one read: a connection that is ready when the turn is used up has one that is so small


class Receiving(Protocol):
    """A connection, as asyncio.Protocol has it."""

    def connection_made(self, transport: asyncio.Transport) -> None: ...
    def connection_lost(self, exc: Exception | None) -> None: ...
    def data_received(self, data: bytes) -> None: ...
    def eof_received(self) -> bool | None: ...
    def pause_writing(self) -> None: ...
    def resume_writing(self) -> None: ...


class ReceivingTurn:
    """One for all connections of a server. Connections that found the turn used up are read again in the next turns,
    each time as many as it has room for, in the order in which they came."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(READ_BYTES))  # of the read that goes on
        self._received, self._ends = 0, False
        self._waiting: dict[Receiver, None] = {}

    @property
    def read_bytes(self) -> int:
        """The size of the next read."""
        return min(READ_BYTES, max(LEAST_BYTES, TURN_BYTES - self._received))

    def count(self, receiver: "Receiver", size: int) -> None:
        self._received += size
        if self._received >= TURN_BYTES and receiver not in self._waiting:
            self._waiting[receiver] = None
            receiver.wait(waits=True)
        self._end_later()

    def leave(self, receiver: "Receiver") -> None:
        self._waiting.pop(receiver, None)

    def _end_later(self) -> None:
        if not self._ends:
            self._ends = True
            asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        self._received, self._ends = 0, False
        for receiver in [*self._waiting][: max(1, TURN_BYTES // READ_BYTES)]:
            del self._waiting[receiver]
            receiver.wait(waits=False)
        if self._waiting:
            self._end_later()


class Receiver(asyncio.BufferedProtocol):
    """What a transport speaks to. It passes on to `target`, which may become another one."""

    def __init__(self, target: Receiving, turn: ReceivingTurn) -> None:
        self.target = target
        self._turn = turn
        self._transport: asyncio.Transport | None = None
        self._is_wanted = True  # by the target
        self._waits = False  # for a turn

    def set_reading(self, *, wanted: bool) -> None:
        """Whether the target wants more. Only this, and no method of the transport, starts and stops reading."""
        self._is_wanted = wanted
        self._apply()

    def wait(self, *, waits: bool) -> None:
        self._waits = waits
        self._apply()

    def _apply(self) -> None:
        if self._transport is None:
            return
        if self._is_wanted and not self._waits:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no such base
        self.target.connection_made(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._turn.leave(self)
        self.target.connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._turn.buffer[: self._turn.read_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._turn.buffer[:nbytes])
        self._turn.count(self, nbytes)
        self.target.data_received(data)

    def eof_received(self) -> bool | None:
        return self.target.eof_received()

    def pause_writing(self) -> None:
        self.target.pause_writing()

    def resume_writing(self) -> None:
        self.target.resume_writing()
