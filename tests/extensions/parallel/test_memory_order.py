"""Messages in plain shared memory on processors that exchange loads and stores, as Arm does.

The accesses of the real ring and of the real communicator are recorded. Then all executions of two such programs are
enumerated: a core may do two accesses in either order unless a barrier is between them, or both are of one place; and
every core sees a store at once (Arm is multi-copy atomic). Without any one of the barriers an execution goes wrong.
"""

import os
import platform
from collections.abc import Callable, Iterator
from itertools import permutations
from typing import Any, NamedTuple

import pytest
import torch

from oscine.extensions.parallel import ring
from oscine.extensions.parallel.comm import host
from oscine.extensions.parallel.comm import memory_order as module
from oscine.extensions.parallel.comm.memory_order import MemoryOrder, memory_order
from oscine.extensions.parallel.processes import RankProcesses
from oscine.extensions.parallel.ring import RING_BYTES, RingReader, RingWriter
from oscine.ops.native.cache import NoLibrary


class Access(NamedTuple):
    kind: str  # load, store or barrier
    place: str = ""


BARRIER = Access("barrier")


class Traced:
    """Memory whose accesses are noted. `name` says what a place is."""

    def __init__(self, memory: Any, name: Callable[[Any], str], noted: list[Access]) -> None:
        self._memory, self._name, self._noted = memory, name, noted

    def __len__(self) -> int:
        return len(self._memory)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice) and isinstance(self._memory, memoryview) and self._memory.itemsize == 1:
            return Piece(self._memory[place], self._noted)
        self._noted.append(Access("load", self._name(place)))
        return self._memory[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        self._noted.append(Access("store", self._name(place)))
        self._memory[place] = value


class Piece:
    """Bytes of the ring."""

    def __init__(self, memory: memoryview, noted: list[Access]) -> None:
        self.memory, self._noted = memory, noted

    def __len__(self) -> int:
        return len(self.memory)

    def __setitem__(self, place: slice, value: Any) -> None:
        self._noted.append(Access("store", "data"))
        self.memory[place] = value.memory if isinstance(value, Message) else value


class Message:
    """Bytes of a sender or receiver, in place of a memoryview."""

    def __init__(self, memory: Any, noted: list[Access]) -> None:
        self.memory, self._noted = memoryview(memory), noted

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, place: slice) -> "Message":
        return Message(self.memory[place], self._noted)

    def __setitem__(self, place: slice, piece: Piece) -> None:
        self._noted.append(Access("load", "data"))
        self.memory[place] = piece.memory

    def cast(self, _: str) -> "Message":
        return self


def ring_place(index: int) -> str:
    return {0: "written", 8: "read", 9: "asleep"}[index]


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Access]]:
    """The accesses of one message through the ring, by what each side does."""
    found: dict[str, list[Access]] = {}

    def barrier() -> None:
        noted.append(BARRIER)

    monkeypatch.setattr(ring, "memory_order", lambda: MemoryOrder(barrier, barrier))
    monkeypatch.setattr(ring, "_SPIN_S", 0)
    memory, waker = bytearray(RING_BYTES), os.eventfd(0)
    noted: list[Access] = []
    writer = RingWriter(memory, [waker], lambda: lambda: None)
    reader = RingReader(memory, 0, waker, lambda: lambda: None)
    for end in (writer, reader):
        monkeypatch.setattr(end, "_numbers", Traced(end._numbers, ring_place, noted))
        monkeypatch.setattr(end, "_bytes", Traced(end._bytes, str, noted))

    monkeypatch.setattr(ring, "memoryview", lambda memory: Message(memory, noted), raising=False)

    class SendsInSleep:
        """The reader's poll, during which the writer sends."""

        def poll(self, _: float) -> list[int]:
            found["falls asleep"] = noted.copy()
            noted.clear()
            writer.send(b"second")
            found["wakes"] = noted.copy()
            noted.clear()
            return [1]

    writer.send(b"first")
    found["sends"] = noted.copy()
    noted.clear()
    assert reader.receive() == b"first"
    found["receives"] = noted.copy()
    noted.clear()
    monkeypatch.setattr(reader, "_poll", SendsInSleep())
    assert reader.receive() == b"second"
    os.close(waker)
    return found


def between(program: list[Access], first: Access, last: Access) -> list[Access]:
    """From the last `first` that comes before a `last`, to that one; other data is left out."""
    end = len(program) - 1 - program[::-1].index(last)
    start = end - 1 - program[:end][::-1].index(first)
    return [one for one in program[start : end + 1] if one in (first, last, BARRIER)]


def executions(first: list[Access], second: list[Access]) -> Iterator[list[list[int]]]:
    """What the loads of each see, in their order: 1 if the other one's store to that place was before, else 0."""
    for left in orders(first):
        for right in orders(second):
            for picks in interleavings(len(left), len(right)):
                stored: set[tuple[int, str]] = set()
                seen: list[list[int]] = [[], []]
                at = [iter(left), iter(right)]
                for core in picks:
                    access = next(at[core])
                    if access.kind == "store":
                        stored.add((core, access.place))
                    elif access.kind == "load":
                        seen[core].append(int((1 - core, access.place) in stored))
                yield seen


def orders(program: list[Access]) -> Iterator[list[Access]]:
    """All orders of the accesses that the barriers allow, without the barriers."""
    epochs, accesses = 0, []
    for access in program:
        if access.kind == "barrier":
            epochs += 1
        else:
            accesses.append((epochs, access))
    for order in permutations(range(len(accesses))):
        ranks = {index: rank for rank, index in enumerate(order)}
        kept = (
            ranks[i] < ranks[j]
            for j, (epoch, access) in enumerate(accesses)
            for i, (earlier, other) in enumerate(accesses[:j])
            if earlier < epoch or other.place == access.place
        )
        if all(kept):
            yield [accesses[i][1] for i in order]


def interleavings(left: int, right: int) -> Iterator[list[int]]:
    if not left or not right:
        yield [0] * left + [1] * right
        return
    yield from ([0, *rest] for rest in interleavings(left - 1, right))
    yield from ([1, *rest] for rest in interleavings(left, right - 1))


DATA, POSITION = "data", "written"
# (what goes wrong, what the writer does, what the reader does, a wrong outcome of their loads)
LITMUS = [
    (
        "a position is seen before its data",
        ("sends", Access("store", DATA), Access("store", POSITION)),
        ("receives", Access("load", POSITION), Access("load", DATA)),
        lambda writer, reader: reader == [1, 0],
    ),
    (
        "a reader sleeps beside a message",
        ("sends", Access("store", POSITION), Access("load", "asleep")),
        ("falls asleep", Access("store", "asleep"), Access("load", POSITION)),
        lambda writer, reader: writer == [0] and reader == [0],
    ),
    (
        "data is overwritten while it is read",
        ("sends", Access("load", "read"), Access("store", DATA)),
        ("receives", Access("load", DATA), Access("store", "read")),
        lambda writer, reader: writer == [1] and reader == [1],
    ),
]


@pytest.mark.parametrize(("wrong", "writer", "reader", "is_wrong"), LITMUS, ids=[one[0] for one in LITMUS])
def test_no_order_of_the_ring_goes_wrong(
    programs: dict[str, list[Access]], wrong: str, writer: Any, reader: Any, is_wrong: Callable[..., bool]
) -> None:
    left, right = (between(programs[name], first, last) for name, first, last in (writer, reader))
    assert not any(is_wrong(*seen) for seen in executions(left, right)), wrong
    for side in (0, 1):  # each barrier is needed, and the checker finds what it prevents
        without = [left, right]
        without[side] = [access for access in without[side] if access != BARRIER]
        assert without[side] != (left, right)[side], "a barrier"
        assert any(is_wrong(*seen) for seen in executions(*without)), wrong


def test_no_order_of_an_exchange_goes_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of two; rank 1 does the same with the places of both exchanged."""
    noted: list[Access] = []

    def barrier() -> None:
        noted.append(BARRIER)

    monkeypatch.setattr(host, "memory_order", lambda: MemoryOrder(barrier, barrier))
    memory = bytearray(host.bytes_of(2))
    rank = host.HostCommunicator(0, 2, memory, lambda: lambda: None)
    rank._counters[8] = 1  # rank 1 is there
    own = Traced(rank._counters, lambda index: f"counter {index // 8}", noted)
    monkeypatch.setattr(rank, "_counters", own)
    copy = torch.Tensor.copy_

    def copied(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        noted.append(Access("store", "slot 0"))
        return copy(self, source)

    monkeypatch.setattr(torch.Tensor, "copy_", copied)
    rank._exchange(torch.ones(4, dtype=torch.uint8))
    noted.append(Access("load", "slot 1"))  # what the caller does with the slots that it gets
    announces = between(noted, Access("store", "slot 0"), Access("store", "counter 0"))
    looks = between(noted, Access("load", "counter 1"), Access("load", "slot 1"))
    mirrored = [Access(one.kind, one.place.replace("1", "0")) for one in looks]
    assert BARRIER in announces
    assert BARRIER in looks
    assert not any(seen[1] == [1, 0] for seen in executions(announces, mirrored))
    for left, right in (([announces[0], announces[-1]], mirrored), (announces, [mirrored[0], mirrored[-1]])):
        assert any(seen[1] == [1, 0] for seen in executions(left, right))


@pytest.fixture
def arm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    memory_order.cache_clear()
    yield
    memory_order.cache_clear()


@pytest.mark.usefixtures("arm")
def test_arm_has_a_barrier_in_c() -> None:
    order, fence = memory_order()
    assert order is fence
    assert order() == 0


@pytest.mark.usefixtures("arm")
def test_arm_without_a_compiler_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from oscine.ops.native import library

    def no_library() -> None:
        raise NoLibrary("there is no C compiler (cc)")

    monkeypatch.setattr(library, "library", no_library)
    with pytest.raises(
        ValueError, match=r"need a barrier in C on this processor \(aarch64\), and there is no C compiler"
    ):
        RankProcesses(2)


def test_x86_needs_only_its_lock() -> None:
    if platform.machine() == "x86_64":
        assert memory_order() == (module._nothing, module._lock_once)
