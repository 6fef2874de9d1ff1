"""Messages of one process to several others, through a ring of bytes in shared memory: all get all, in order.

A reader looks at the ring for a moment before it sleeps, and then leaves word that it does. So a message to a process
that is at work costs no call of the system. Positions count bytes from the first message on, and are plain memory: see
memory_order.py.
"""

import os
import select
import time
from collections.abc import Callable
from typing import Any

from oscine.extensions.parallel.comm.memory_order import memory_order
from oscine.extensions.parallel.liveness import LOOK_S

_HEAD_BYTES = 4096  # positions, one per cache line
_LINE = 8  # numbers in a cache line
RING_BYTES = _HEAD_BYTES + (4 << 20)
_LENGTH_BYTES = 8  # before each message
_SPIN_S = 0.002
_PAUSE_S = 0.00005  # of a writer that finds the ring full

Watch = Callable[[], Callable[[], None]]  # as of oscine.extensions.parallel.comm.host


class _End:
    """The numbers and bytes that both ends see. Line 0 has the end of what is written.

    Line 1 + i has how far reader i has read, and whether it sleeps.
    """

    def __init__(self, memory: Any, watch: Watch) -> None:
        """`memory`: a writable buffer of RING_BYTES, zeros at first."""
        whole = memoryview(memory)
        self._numbers, self._bytes = whole[:_HEAD_BYTES].cast("Q"), whole[_HEAD_BYTES:RING_BYTES]
        self._position, self._watch = 0, watch
        self._order, self._fence = memory_order()

    def _piece(self, most: int) -> memoryview:
        """The bytes from this position on, up to the end of the ring."""
        start = self._position % len(self._bytes)
        return self._bytes[start : start + most]


class RingWriter(_End):
    def __init__(self, memory: Any, wakers: list[int], watch: Watch) -> None:
        """`wakers`: an eventfd of each reader. `watch` is asked while the ring is full."""
        super().__init__(memory, watch)
        self._wakers = wakers

    def send(self, *parts: Any) -> None:
        """One message, of buffers one after the other. Waits while the ring is full."""
        views = [memoryview(part).cast("B") for part in parts]
        self._put(memoryview(sum(map(len, views)).to_bytes(_LENGTH_BYTES, "little")))
        for view in views:
            self._put(view)
        self._wake()

    def _put(self, data: memoryview) -> None:
        while len(data):
            piece = self._piece(min(len(data), self._room() or self._await_room()))
            self._order()  # readers have read what was there
            piece[:] = data[: len(piece)]
            data = data[len(piece) :]
            self._position += len(piece)
            self._order()
            self._numbers[0] = self._position

    def _room(self) -> int:
        least = min(self._numbers[_LINE * (1 + i)] for i in range(len(self._wakers)))
        return len(self._bytes) - (self._position - least)

    def _await_room(self) -> int:
        self._wake()
        look = self._watch()
        while not (room := self._room()):
            look()
            time.sleep(_PAUSE_S)
        return room

    def _wake(self) -> None:
        self._fence()
        for i, waker in enumerate(self._wakers):
            if self._numbers[_LINE * (1 + i) + 1]:
                os.eventfd_write(waker, 1)


class RingReader(_End):
    def __init__(self, memory: Any, reader: int, waker: int, watch: Watch) -> None:
        """`reader`: which of them this is, from 0. `watch` is asked while there is no message."""
        super().__init__(memory, watch)
        self._own, self._waker = _LINE * (1 + reader), waker
        self._poll = select.poll()
        self._poll.register(waker, select.POLLIN)

    def receive(self) -> bytearray:
        """The next message. Waits for it, and costs next to nothing meanwhile."""
        length = bytearray(_LENGTH_BYTES)
        self._get(memoryview(length))
        message = bytearray(int.from_bytes(length, "little"))
        self._get(memoryview(message))
        return message

    def _get(self, out: memoryview) -> None:
        while len(out):
            piece = self._piece(min(len(out), self._available() or self._await_bytes()))
            self._order()
            out[: len(piece)] = piece
            out = out[len(piece) :]
            self._position += len(piece)
            self._order()
            self._numbers[self._own] = self._position

    def _available(self) -> int:
        return self._numbers[0] - self._position

    def _await_bytes(self) -> int:
        spin_until_s = time.monotonic() + _SPIN_S
        while time.monotonic() < spin_until_s:
            if available := self._available():
                return available
            os.sched_yield()
        look, self._numbers[self._own + 1] = self._watch(), 1
        self._fence()
        while not (available := self._available()):
            look()
            if self._poll.poll(1000 * LOOK_S):
                os.eventfd_read(self._waker)
        self._numbers[self._own + 1] = 0
        return available
