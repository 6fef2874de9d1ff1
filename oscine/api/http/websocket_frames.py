"""Cuts what a client sends into WebSocket frames, and bounds how many are read in one turn of the event loop.

`websockets` gets whole frames. So a long frame is kept as it came, in pieces, and is copied once.
"""

import asyncio
import time
from collections import deque

_LONGEST_HEAD = 14
_MORE = {126: 2, 127: 8}  # further bytes of the length
TURN_S = 0.005  # of reading frames of all connections, in one turn of the event loop


def frame_bytes(head: bytes) -> int:
    """The length of a frame, from its first bytes; if these are too few, the bytes that are needed to know it."""
    if len(head) < 2:
        return 2
    size = head[1] & 127
    more = _MORE.get(size, 0)
    if len(head) < 2 + more:
        return 2 + more
    if more:
        size = int.from_bytes(head[2 : 2 + more], "big")
    return 2 + more + (4 if head[1] & 128 else 0) + size


class FrameCutter:
    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: of a frame's data."""
        self._pieces: deque[bytes] = deque()
        self._begin = 0  # in the first piece
        self._most = max_bytes + _LONGEST_HEAD
        self.num_bytes = 0  # kept

    def add(self, data: bytes) -> None:
        if data:
            self._pieces.append(data)
            self.num_bytes += len(data)

    def clear(self, freeing: "Freeing") -> None:
        freeing.add(self._pieces)
        self._pieces = deque()
        self._begin = self.num_bytes = 0

    def take(self) -> bytes:
        """The next frame, or what is there of one that is too long; empty if it is not complete."""
        wanted = frame_bytes(self._head())
        if wanted > self._most:
            wanted = self.num_bytes
        return self._cut(wanted) if wanted <= self.num_bytes else b""

    def _head(self) -> bytes:
        """The first bytes, as many as a head may have."""
        while len(self._pieces) > 1 and len(self._pieces[0]) - self._begin < _LONGEST_HEAD:
            first = self._pieces.popleft()
            self._pieces[0] = first[self._begin :] + self._pieces[0]
            self._begin = 0
        return self._pieces[0][self._begin : self._begin + _LONGEST_HEAD] if self._pieces else b""

    def _cut(self, size: int) -> bytes:
        self.num_bytes -= size
        taken: list[bytes] = []
        while size:
            piece = self._pieces[0]
            part = piece[self._begin : self._begin + size]
            taken.append(part)
            size -= len(part)
            self._begin += len(part)
            if self._begin == len(piece):
                self._pieces.popleft()
                self._begin = 0
        return b"".join(taken)


class ParseBudget:
    """The time that has been spent on parsing frames in this turn of the event loop."""

    def __init__(self) -> None:
        self._spent_s, self._ends = 0.0, False

    @property
    def is_spent(self) -> bool:
        return self._spent_s > TURN_S

    def spend(self, began_s: float) -> None:
        """`began_s`: on the clock of time.perf_counter."""
        self._spent_s += time.perf_counter() - began_s
        if not self._ends:
            self._ends = True
            asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        self._spent_s, self._ends = 0.0, False


class Freeing:
    """Frees messages of clients that have left, some pieces per turn of the event loop: many may leave at once."""

    def __init__(self) -> None:
        self._left: deque[deque[bytes]] = deque()

    def add(self, pieces: deque[bytes]) -> None:
        if pieces:
            self._left.append(pieces)
            if len(self._left) == 1:
                asyncio.get_running_loop().call_soon(self._free)

    def _free(self) -> None:
        until_s = time.perf_counter() + TURN_S
        while self._left and time.perf_counter() <= until_s:
            self._left[0].popleft()
            if not self._left[0]:
                self._left.popleft()
        if self._left:
            asyncio.get_running_loop().call_soon(self._free)
