"""Freed memory that the allocator keeps."""

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from oscine.system import freed_memory
from oscine.system.freed_memory import return_freed_memory
from tests.waiting import until

MIB = 1 << 20
needs_glibc = pytest.mark.skipif(freed_memory._trim is None, reason="the allocator is not glibc's")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def pieces(count: int) -> list[bytearray]:
    """Of an arena: each is below the size that is mapped alone."""
    return [bytearray(100_000) for _ in range(count)]


async def beside(check: Callable[[], bool]) -> None:
    """Waits for the condition while freed memory is returned."""
    returning = asyncio.create_task(return_freed_memory())
    await asyncio.sleep(0)  # the allocator has its threshold
    await until(check)
    returning.cancel()


@needs_glibc
def test_free_pages_between_what_is_in_use_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "_EVERY_S", 0.0)
    monkeypatch.setattr(freed_memory, "_WORK_S", 0.0)
    made = pieces(2000)
    in_use, before = made[::500], resident_bytes()
    del made
    asyncio.run(beside(lambda: resident_bytes() < before - 100 * MIB))
    assert len(in_use) == 4


@needs_glibc
def test_the_end_of_an_arena_goes_back_without_trimming(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "_EVERY_S", 3600.0)
    most: list[int] = []

    def work() -> None:
        bytearray(30 * MIB)  # once it is freed, the allocator keeps twice as much
        made = pieces(500)
        most.append(resident_bytes())
        del made

    def is_returned() -> bool:
        if not most:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        return resident_bytes() < most[0] - 40 * MIB

    asyncio.run(beside(is_returned))


def test_an_idle_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "_EVERY_S", 0.0)
    trimmed: list[int] = []
    monkeypatch.setattr(freed_memory, "_trim", trimmed.append)

    async def trims(work_s: float) -> int:
        monkeypatch.setattr(freed_memory, "_WORK_S", work_s)
        returning = asyncio.create_task(return_freed_memory())
        for _ in range(20):
            await asyncio.sleep(0)
        await asyncio.to_thread(lambda: None)
        returning.cancel()
        return len(trimmed)

    assert asyncio.run(trims(3600.0)) == 0
    assert asyncio.run(trims(0.0)) > 0
