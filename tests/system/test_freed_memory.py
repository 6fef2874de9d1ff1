"""Freed memory that the allocator keeps."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from oscine.system import freed_memory
from oscine.system.freed_memory import return_freed_memory
from tests.waiting import until

needs_glibc = pytest.mark.skipif(freed_memory._trim is None, reason="the allocator is not glibc's")


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@needs_glibc
def test_free_pages_between_what_is_in_use_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "_EVERY_S", 0.0)
    monkeypatch.setattr(freed_memory, "_WORK_S", 0.0)
    made = [bytearray(100_000) for _ in range(2000)]  # each is below the size that is mapped alone
    in_use, before = made[::500], resident_bytes()
    del made

    async def go() -> None:
        returning = asyncio.create_task(return_freed_memory())
        await until(lambda: resident_bytes() < before - (100 << 20))
        returning.cancel()

    asyncio.run(go())
    assert len(in_use) == 4


@needs_glibc
def test_the_end_of_an_arena_goes_back_without_trimming() -> None:
    """In a process of its own: elsewhere a thread may get an arena that others have used."""
    subprocess.run([sys.executable, "-c", _END_OF_ARENA], check=True)


_END_OF_ARENA = """
import asyncio, threading
from pathlib import Path
from oscine.system.freed_memory import return_freed_memory

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

def work():
    bytearray(30 << 20)  # once it is freed, the allocator would keep twice as much
    [bytearray(100_000) for _ in range(500)]

async def start():
    returning = asyncio.create_task(return_freed_memory())
    await asyncio.sleep(0)  # the allocator has its threshold
    returning.cancel()

asyncio.run(start())
before = resident_bytes()
thread = threading.Thread(target=work)
thread.start()
thread.join()
assert resident_bytes() < before + (25 << 20)
"""


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
