"""A running program: its barriers, its partitions that take turns, and its pending operations."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.ops.gluon_interpreter.memory import POISON, DeviceDescriptor, Shared


@dataclass
class Barrier:
    """An mbarrier."""

    count: int
    phase: int = 0  # of the phase that is not complete
    pending: int = 0  # arrivals
    expected: int = 0  # bytes announced and not copied
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (to, from)
    complete: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # those that the next wait will see
    until: int = 0  # products in tensor memory that a wait will see: all before this one

    def arrive(self, count: int) -> None:
        assert 0 < count <= self.pending, "more arrivals than the barrier counts"
        self.pending -= count
        self.advance()

    def advance(self) -> None:
        """Completes the phase when all have arrived and been copied."""
        if self.pending == 0 and self.expected == sum(to.nbytes for to, _ in self.copies):
            assert not self.complete, "a phase that copied has passed, and nobody waited for it"
            self.complete, self.copies = self.copies, []
            self.expected, self.pending, self.phase = 0, self.count, self.phase ^ 1

    def land(self) -> None:
        for to, source in self.complete:
            to.copy_(source)
        self.complete.clear()


class Program:
    """The program that runs: its ids, its barriers, and which of its partitions has the turn."""

    current: "Program"
    late: int | None = None  # the partition that gives way to all others at each of its waits

    def __init__(self, ids: tuple[int, ...], grid: tuple[int, ...], num_warps: int) -> None:
        self.ids, self.grid, self.num_warps = ids, grid, num_warps
        self.barriers: dict[int, Barrier] = {}  # by address
        self.products: list[Callable[[], object]] = []  # of tensor memory, in the order in which they were issued
        self.multiplied = 0  # of them
        self.tensor_columns = 0  # of tensor memory in use
        self.progress = 0  # arrivals, announcements and copies so far
        self._running: list[int] = [0]  # partitions in the order of their turns
        self._turns: list[threading.Lock] = []  # of each partition, which another one releases for its turn
        self._failure: BaseException | None = None
        self._local = threading.local()

    def barrier(self, shared: Shared) -> Barrier:
        return self.barriers[shared.data.data_ptr()]

    def multiply(self, until: int) -> None:
        while self.multiplied < until:
            self.products[self.multiplied]()
            self.multiplied += 1

    def wait(self, ready: Callable[[], bool]) -> None:
        """Lets the other partitions go on until it is. Raises RuntimeError if none of them can make it so."""
        if self.late is not None and self.late == getattr(self._local, "number", 0):
            self._give_way()
        seen, rounds = self.progress, 0
        while not ready():
            if rounds > len(self._running):
                raise RuntimeError("every partition waits, and no barrier will complete")
            self._pass_on()
            rounds = rounds + 1 if self.progress == seen else 0
            seen = self.progress

    def _give_way(self) -> None:
        """As often as a ring has stages, and more."""
        for _ in range(16 * len(self._running)):
            self.progress += 1  # else the others would take it for a deadlock
            self._pass_on()

    def end(self) -> None:
        """Raises AssertionError where copies were not announced, or announced and not made."""
        for barrier in self.barriers.values():
            assert not barrier.copies, "bytes that no barrier expects"
            assert not barrier.expected, "a barrier expects bytes that do not come"

    def specialise(self, partitions: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
        self._running = list(range(len(partitions)))
        self._turns = [threading.Lock() for _ in partitions]
        for turn in self._turns:
            turn.acquire()
        threads = [threading.Thread(target=self._partition, args=(i, *one)) for i, one in enumerate(partitions)]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        self._running = [0]
        if self._failure is not None:
            raise self._failure

    def _partition(self, number: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self._local.number = number
        try:
            self._take_turn(number)
            function(*args)
        except BaseException as error:  # raised again by specialise()
            self._failure = self._failure or error
        self._running.remove(number)
        if self._running:
            self._turns[self._running[0]].release()

    def _pass_on(self) -> None:
        number = self._running.pop(0)
        self._running.append(number)
        if self._running[0] != number:
            self._turns[self._running[0]].release()
            self._take_turn(number)

    def _take_turn(self, number: int) -> None:
        """After a failure each ends in its turn."""
        self._turns[number].acquire()
        if self._failure is not None:
            raise SystemExit


def init(shared: Shared, count: int) -> None:
    assert shared.data.numel() == 1
    Program.current.barriers[shared.data.data_ptr()] = Barrier(count, pending=count)


def expect(shared: Shared, num_bytes: int, pred: Any = True) -> None:
    if pred:
        barrier, Program.current.progress = Program.current.barrier(shared), Program.current.progress + 1
        barrier.expected += num_bytes
        barrier.arrive(1)


def arrive(shared: Shared, count: int = 1, pred: Any = True) -> None:
    if pred:
        Program.current.progress += 1
        Program.current.barrier(shared).arrive(count)


def wait(shared: Shared, phase: Any, pred: Any = True) -> None:
    if pred:
        barrier = Program.current.barrier(shared)
        Program.current.wait(lambda: barrier.phase != int(phase))
        barrier.land()
        Program.current.multiply(barrier.until)


def async_copy(descriptor: DeviceDescriptor, at: list[Any], barrier: Shared, target: Shared, pred: Any = True) -> None:
    if not pred:
        return
    source = descriptor.box([int(i) for i in at])
    assert target.data.nbytes == source.nbytes, "another size than the box"
    assert target.data.is_contiguous()
    to = target.data.view(-1).view(torch.uint8)
    to.fill_(POISON)
    Program.current.progress += 1
    waiting = Program.current.barrier(barrier)
    waiting.copies.append((to, source.reshape(-1).view(torch.uint8)))
    waiting.advance()
