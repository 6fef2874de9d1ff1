"""A communicator for ranks on a CPU: processes of one machine that share memory.

Each rank has two slots, used in turns, and a counter. In exchange k it writes slot k % 2, raises its counter to k + 1,
and waits until the counters of all ranks are there. Two slots are enough: a rank writes slot k % 2 again only after
all others have begun exchange k + 1, so they have read what was in it. Counters and slots are plain memory: see
memory_order.py.
"""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from oscine.extensions.parallel.comm.memory_order import memory_order
from oscine.ops.target import best_of_gathered

_SLOT_BYTES = 1 << 20
_HEAD_BYTES = 4096  # counters, one per cache line
_LINE = 8  # counters in a cache line
_SPIN_S = 0.001  # a rank that is late by more lets the others sleep
_PAUSE_S = 0.00005

# Begins a wait. What it returns is called now and then, and raises when there is nothing to wait for any more.
Watch = Callable[[], Callable[[], None]]


def bytes_of(num_ranks: int) -> int:
    """Of the memory that the ranks share: zeros at first."""
    return _HEAD_BYTES + 2 * num_ranks * _SLOT_BYTES


class HostCommunicator:
    error: str | None = None  # it raises instead

    def __init__(self, rank: int, num_ranks: int, memory: Any, watch: Watch) -> None:
        """`memory`: a writable buffer of bytes_of(num_ranks)."""
        self.rank, self.num_ranks, self._watch = rank, num_ranks, watch
        self._counters = memoryview(memory)[:_HEAD_BYTES].cast("Q")
        slots = torch.frombuffer(memory, dtype=torch.uint8, offset=_HEAD_BYTES, count=2 * num_ranks * _SLOT_BYTES)
        self._slots = slots.view(2, num_ranks, _SLOT_BYTES)
        self._count = 0
        self._order = memory_order().order

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Summed in float32, in the order of the ranks: the same bits on all of them."""
        mine = partial.float().contiguous().view(-1)
        whole = torch.empty_like(mine)
        for piece in _pieces(mine):
            first, *others = self._exchange(mine[piece].view(torch.uint8)).view(torch.float32)
            total = whole[piece].copy_(first)
            for other in others:
                total += other
        return whole.view(partial.shape).to(partial.dtype)

    def all_gather(self, part: Tensor) -> Tensor:
        mine = part.contiguous().view(-1).view(torch.uint8)
        parts_RB = torch.empty((self.num_ranks, len(mine)), dtype=torch.uint8)
        for piece in _pieces(mine):
            parts_RB[:, piece] = self._exchange(mine[piece])
        return torch.cat(parts_RB.view(part.dtype).view(self.num_ranks, *part.shape).unbind(), -1)

    def best(self, values_N: Tensor, ids_N: Tensor) -> Tensor:
        return best_of_gathered(self, values_N, ids_N)

    def barrier(self) -> None:
        self._exchange(torch.empty(0, dtype=torch.uint8))

    def serve(self) -> None:
        """Nothing changes: the watch notices a rank that hangs."""

    def _exchange(self, mine: Tensor) -> Tensor:
        """The bytes of all ranks, [ranks, n]. They stay until the exchange after the next one."""
        slots = self._slots[self._count % 2, :, : len(mine)]
        slots[self.rank].copy_(mine)
        self._count += 1
        self._order()  # also after the reads of the exchange before
        self._counters[_LINE * self.rank] = self._count
        for rank in range(self.num_ranks):
            if self._counters[_LINE * rank] < self._count:
                self._await(rank)
        self._order()
        return slots

    def _await(self, rank: int) -> None:
        counters, place, count = self._counters, _LINE * rank, self._count
        spin_until_s = time.monotonic() + _SPIN_S
        while time.monotonic() < spin_until_s:
            if counters[place] >= count:
                return
            os.sched_yield()
        look = self._watch()
        while counters[place] < count:
            look()
            time.sleep(_PAUSE_S)


def _pieces(flat: Tensor) -> Iterator[slice]:
    """What of it fits a slot at once."""
    size = _SLOT_BYTES // flat.itemsize
    return (slice(start, start + size) for start in range(0, len(flat), size))
