"""Freed memory that the allocator keeps."""

import asyncio
from pathlib import Path

import pytest

from oscine.system import freed_memory
from oscine.system.freed_memory import return_freed_memory

MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(freed_memory._trim is None, reason="the allocator is not glibc's")
def test_pages_between_what_is_in_use_go_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freed_memory, "_EVERY_S", 0.0)
    monkeypatch.setattr(freed_memory, "_WORK_S", 0.0)
    pieces = [bytearray(100_000) for _ in range(2000)]  # each below the size that glibc maps by itself
    in_use = pieces[::500]
    before = resident_bytes()
    del pieces

    async def go() -> None:
        returning = asyncio.create_task(return_freed_memory())
        while resident_bytes() > before - 100 * MIB:
            await asyncio.sleep(0.001)
        returning.cancel()

    asyncio.run(asyncio.wait_for(go(), 30))
    assert len(in_use) == 4


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
