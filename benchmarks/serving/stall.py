"""How long a piece of work keeps an event loop from anything else."""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_TICK_S = 0.001


@dataclass(frozen=True, slots=True)
class Stall(Generic[T]):
    """What work returned, and the longest time between two turns of the loop meanwhile."""

    result: T
    gap_s: float  # by the clock
    cpu_s: float  # of this process, all its threads: what the gap would be on a machine that does nothing else


async def stall(work: Coroutine[Any, Any, T]) -> Stall[T]:
    """Runs `work` beside a ticker. Raises what it raises."""
    gaps, cpu = [0.0], [0.0]

    async def tick() -> None:
        before, used = time.perf_counter(), time.process_time()
        while True:
            await asyncio.sleep(_TICK_S)
            now, now_used = time.perf_counter(), time.process_time()
            gaps.append(now - before)
            cpu.append(now_used - used)
            before, used = now, now_used

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(2 * _TICK_S)
    try:
        result = await work
        await asyncio.sleep(2 * _TICK_S)  # the gap that the end of the work made
    finally:
        ticking.cancel()
    return Stall(result, max(gaps), max(cpu))
