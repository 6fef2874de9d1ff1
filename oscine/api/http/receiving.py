"""Bounds the bytes that are received in one turn of the event loop, from all clients together.

Reading has a cost per byte: the kernel's copy, and fresh memory. uvloop reads a socket up to 32 times, 256 KiB each,
before it turns to the next one, and to all that have data before anything else runs: many clients that send much
would hold up all streams.

With TLS the bound is for decrypted bytes. In the turn before, uvloop reads up to 256 KiB of encrypted bytes from each
connection that is not paused.
"""

import asyncio
from typing import cast

TURN_BYTES = 2 << 20  # received in one turn of the event loop: some milliseconds
READ_BYTES = 256 << 10  # at once; blocks of this size have mappings of their own (system/freed_memory)
LEAST_BYTES = 4096  # of one read: a connection that is ready when the turn is used up has one that is so small


class ReadThrottle:
    """One for all connections of a server. A connection that finds the turn used up is paused, and waits in a queue.

    In each later turn the first connections of the queue resume, and share the turn equally: round robin. While there
    is a queue, connections that are not in it read LEAST_BYTES and join it.
    """

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(READ_BYTES))  # of the current read
        self._received = 0  # bytes, in a turn without shares
        self._shares: dict[ThrottledProtocol, int] = {}  # bytes that are left of those that resumed in this turn
        self._queue: dict[ThrottledProtocol, None] = {}
        self._ends = False  # whether the end of this turn is scheduled

    def _left(self, connection: "ThrottledProtocol") -> int:
        return self._shares.get(connection, 0) if self._shares else TURN_BYTES - self._received

    def read_bytes(self, connection: "ThrottledProtocol") -> int:
        """The size of its next read."""
        return min(READ_BYTES, max(LEAST_BYTES, self._left(connection)))

    def count(self, connection: "ThrottledProtocol", size: int) -> None:
        left = self._left(connection) - size
        if not self._shares:
            self._received += size
        elif connection in self._shares:
            self._shares[connection] = left
        if left <= 0 and connection not in self._queue:
            self._queue[connection] = None
            connection.throttle(paused=True)
        self._end_later()

    def leave(self, connection: "ThrottledProtocol") -> None:
        """Its connection is lost."""
        self._queue.pop(connection, None)
        if connection in self._shares:
            self._shares[connection] = 0

    def _end_later(self) -> None:
        if not self._ends:
            self._ends = True
            asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        self._ends, self._received = False, 0
        resumed = [*self._queue][: max(1, TURN_BYTES // READ_BYTES)]
        self._shares = {connection: TURN_BYTES // len(resumed) for connection in resumed}
        for connection in resumed:
            del self._queue[connection]
            connection.throttle(paused=False)
        if resumed:  # after what they have scheduled
            self._end_later()


_NO_TARGET = asyncio.Protocol()


class ThrottledProtocol(asyncio.BufferedProtocol):
    """The protocol of a transport. It passes on to `target`, which may be replaced by another one.

    It lets go of a target whose connection is lost, so that both are freed at once, and not by a collector, which holds
    up all streams.
    """

    def __init__(self, target: asyncio.Protocol, throttle: ReadThrottle) -> None:
        self.target = target
        self._throttle = throttle
        self._transport: asyncio.Transport | None = None
        self._is_paused = False  # by the target
        self._is_throttled = False

    def pause_reading(self) -> None:
        """For the target, which does not call the transport's own method, as the throttle pauses reading too."""
        self._is_paused = True
        self._apply()

    def resume_reading(self) -> None:
        self._is_paused = False
        self._apply()

    def throttle(self, *, paused: bool) -> None:
        self._is_throttled = paused
        self._apply()

    def _apply(self) -> None:
        if self._transport is None:
            return
        if self._is_paused or self._is_throttled:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no such base
        self.target.connection_made(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._throttle.leave(self)
        target = self.target
        self.let_go()
        target.connection_lost(exc)

    def let_go(self) -> None:
        """Its target is of no use any more."""
        self.target = _NO_TARGET

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._throttle.buffer[: self._throttle.read_bytes(self)]

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._throttle.buffer[:nbytes])
        self._throttle.count(self, nbytes)
        self.target.data_received(data)

    def eof_received(self) -> bool | None:
        return self.target.eof_received()

    def pause_writing(self) -> None:
        self.target.pause_writing()

    def resume_writing(self) -> None:
        self.target.resume_writing()
