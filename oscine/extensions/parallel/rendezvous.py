"""Where the ranks of a group meet: words in shared memory, and for each rank a descriptor that wakes it.

Made by the process that starts the ranks, which inherit all descriptors. Nothing has a name, so nothing is left behind
however they end. A word has 8 bytes and is written at once: what belongs together fits in one.
"""

import mmap
import os
import time
from collections.abc import Callable
from math import inf

from oscine.types import RankHandle, RankLostError

_WORDS_BYTES = mmap.PAGESIZE  # at the beginning of the memory; tensors come after them
_LOST = _WORDS_BYTES // 8 - 1  # the word that says that a rank is lost
_TOLD = _LOST - 1  # the word of broadcast
_SPINS = 200  # looks without a pause, some 100 us: ranks mostly come at the same time
_PAUSE_S = 5e-5


class Rendezvous:
    """One life of a group, of the process that starts its ranks."""

    def __init__(self, num_ranks: int) -> None:
        memory = os.memfd_create("oscine-ranks")
        os.ftruncate(memory, _WORDS_BYTES)
        self._handle = RankHandle(
            0, memory, [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(num_ranks)]
        )
        self._words = words_of(self._handle)

    def handle(self, rank: int) -> RankHandle:
        return RankHandle(rank, self._handle.memory, self._handle.wakes)

    def lose(self, rank: int) -> None:
        """Ends the group: every rank raises RankLostError where it waits, or when it comes to wait."""
        lose(self._words, rank)
        for wake in self._handle.wakes:
            os.eventfd_write(wake, 1)

    def close(self) -> None:
        """Ranks that run keep what they have inherited."""
        for descriptor in self._handle.descriptors:
            os.close(descriptor)


def words_of(handle: RankHandle) -> memoryview:
    """Unsigned words of 8 bytes."""
    return memoryview(mmap.mmap(handle.memory, _WORDS_BYTES)).cast("Q")


def tensors_of(handle: RankHandle, num_bytes: int) -> mmap.mmap:
    """Memory for tensors. All ranks ask for the same number of bytes."""
    end = _WORDS_BYTES + num_bytes
    if os.fstat(handle.memory).st_size < end:
        os.ftruncate(handle.memory, end)
    return mmap.mmap(handle.memory, num_bytes, offset=_WORDS_BYTES)


def broadcast(handle: RankHandle, number: int) -> None:
    """By rank 0, a number that is not 0."""
    words_of(handle)[_TOLD] = number


def recv_broadcast(handle: RankHandle) -> int:
    """What rank 0 tells. Waits for it."""
    words = words_of(handle)
    wait(words, lambda: None if words[_TOLD] else 0, inf)
    return words[_TOLD]


def lose(words: memoryview, rank: int) -> None:
    words[_LOST] = rank + 1


def is_lost(words: memoryview) -> bool:
    return bool(words[_LOST])


def wait(words: memoryview, absent: Callable[[], int | None], limit_s: float) -> None:
    """Returns once no rank is absent. Raises RankLostError, after `limit_s` or when a rank is lost."""
    looks, deadline = 0, time.monotonic() + limit_s
    while True:
        if words[_LOST]:
            raise RankLostError(f"rank {words[_LOST] - 1} of the group ended")
        if (rank := absent()) is None:
            return
        if time.monotonic() > deadline:
            lose(words, rank)
            raise RankLostError(f"rank {rank} of the group did not come within {limit_s:g} s")
        looks += 1
        time.sleep(0 if looks < _SPINS else _PAUSE_S)
