"""The ring of bytes between processes: here between threads, and once between processes."""

import mmap
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

import pytest

from oscine.extensions.parallel import ring as module
from oscine.extensions.parallel.ring import RING_BYTES, RingReader, RingWriter
from tests.waiting import wait_until

ROOM = RING_BYTES - 4096  # bytes of messages, with 8 for the length of each


def never() -> Callable[[], None]:
    return lambda: None


@dataclass
class Ring:
    writer: RingWriter
    readers: list[RingReader]
    memory: bytearray

    def sleeps(self, reader: int) -> bool:
        return bool(memoryview(self.memory)[:4096].cast("Q")[8 * (1 + reader) + 1])


@pytest.fixture(params=[1, 2], ids=["1 reader", "2 readers"])
def ring(request: pytest.FixtureRequest) -> Iterator[Ring]:
    memory, wakers = bytearray(RING_BYTES), [os.eventfd(0) for _ in range(request.param)]
    readers = [RingReader(memory, i, waker, never) for i, waker in enumerate(wakers)]
    yield Ring(RingWriter(memory, wakers, never), readers, memory)
    for waker in wakers:
        os.close(waker)


def received(ring: Ring, messages: list[bytes]) -> list[list[bytes]]:
    """What each reader gets of messages that are sent meanwhile."""

    def read(reader: RingReader) -> list[bytes]:
        return [bytes(reader.receive()) for _ in messages]

    with ThreadPoolExecutor(len(ring.readers)) as threads:
        reading = [threads.submit(read, reader) for reader in ring.readers]
        for message in messages:
            ring.writer.send(message)
        return [one.result(timeout=60) for one in reading]


def test_messages_of_all_sizes_go_round_the_end_of_the_ring(ring: Ring) -> None:
    random_bytes = random.Random(0).randbytes
    sizes = [0, 1, 7, 8, 9, ROOM // 3, ROOM - 8, ROOM - 7, 5, ROOM, 3 * ROOM + 11, 0, 64]
    messages = [random_bytes(size) for size in sizes]
    assert received(ring, messages) == [messages] * len(ring.readers)


def test_small_messages_fill_the_ring_many_times(ring: Ring) -> None:
    messages = [i.to_bytes(4, "little") * (i % 5000) for i in range(3000)]
    assert sum(map(len, messages)) > 4 * ROOM
    assert received(ring, messages) == [messages] * len(ring.readers)


def test_parts_are_one_message(ring: Ring) -> None:
    ring.writer.send(b"ab", bytearray(b""), memoryview(b"cd"))
    assert [bytes(reader.receive()) for reader in ring.readers] == [b"abcd"] * len(ring.readers)


def test_a_writer_waits_for_the_slowest_reader(ring: Ring) -> None:
    looks = count()
    ring.writer._watch = lambda: lambda: next(looks) and None
    *quick, slow = ring.readers
    ring.writer.send(b"a" * (ROOM - 8))
    for reader in quick:
        reader.receive()
    thread = threading.Thread(target=ring.writer.send, args=(b"b",))
    thread.start()
    wait_until(lambda: next(looks) > 10, "a writer that waits")
    assert thread.is_alive()
    slow.receive()
    thread.join()
    assert [bytes(reader.receive()) for reader in ring.readers] == [b"b"] * len(ring.readers)


def test_a_reader_that_sleeps_is_woken(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 3600.0)  # nothing else wakes it
    with ThreadPoolExecutor(len(ring.readers)) as threads:
        for message in (b"a", b"b", b"c"):
            reading = [threads.submit(reader.receive) for reader in ring.readers]
            wait_until(lambda: all(map(ring.sleeps, range(len(ring.readers)))), "readers that sleep")
            ring.writer.send(message)
            assert [bytes(one.result(timeout=60)) for one in reading] == [message] * len(ring.readers)


def test_what_a_watch_raises_ends_a_wait(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("the other end is gone")

    monkeypatch.setattr(module, "LOOK_S", 0.01)
    ring.readers[0]._watch = ring.writer._watch = lambda: fail
    with pytest.raises(RuntimeError, match="the other end is gone"):
        ring.readers[0].receive()
    with pytest.raises(RuntimeError, match="the other end is gone"):
        ring.writer.send(bytes(ROOM + 1))


CHILD = """
import mmap, sys
from oscine.extensions.parallel.ring import RING_BYTES, RingReader
memory, reader, waker = map(int, sys.argv[1:])
ring = RingReader(mmap.mmap(memory, RING_BYTES), reader, waker, lambda: lambda: None)
total = 0
while message := ring.receive():
    total = (total * 31 + sum(message)) % (1 << 61)
print(total)
"""


def test_processes_read_what_another_writes() -> None:
    memory, wakers = os.memfd_create("ring"), [os.eventfd(0) for _ in range(2)]
    os.ftruncate(memory, RING_BYTES)
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, *map(str, (memory, i, waker))],
            pass_fds=(memory, waker),
            stdout=subprocess.PIPE,
            text=True,
        )
        for i, waker in enumerate(wakers)
    ]
    writer, rng, total = RingWriter(mmap.mmap(memory, RING_BYTES), wakers, never), random.Random(1), 0
    for i in range(300):
        message = rng.randbytes(rng.choice((1, 600, 70_000)))
        total = (total * 31 + sum(message)) % (1 << 61)
        writer.send(message)
        if i % 100 == 0:
            time.sleep(0.01)  # long enough for readers to sleep
    writer.send(b"")
    assert [child.communicate(timeout=60)[0].strip() for child in children] == [str(total)] * 2
    for descriptor in (memory, *wakers):
        os.close(descriptor)
