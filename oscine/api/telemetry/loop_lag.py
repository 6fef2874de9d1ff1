"""Measures the lag of the event loop. All streams wait while one piece of work occupies it."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_TICK_S = 0.025


@contextmanager
def core_wait() -> Iterator[Callable[[], float]]:
    """A function that returns how many seconds this thread has waited for a core; 0 if the kernel does not count."""
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    if not path.exists():
        yield lambda: 0.0
        return
    with path.open("rb", buffering=0) as file:
        yield lambda: int(os.pread(file.fileno(), 128, 0).split()[1]) / 1e9


async def measure_lag(observe: Callable[[float], object]) -> None:
    """Calls `observe` repeatedly with the lag of the running loop in seconds, until it is cancelled.

    Time in which the thread of the loop waited for a core is left out.
    """
    with core_wait() as core_wait_s:
        began_s, waited_s = time.monotonic(), core_wait_s()
        while True:
            await asyncio.sleep(_TICK_S)
            now_s, now_waited_s = time.monotonic(), core_wait_s()
            observe(max(0.0, now_s - began_s - _TICK_S - (now_waited_s - waited_s)))
            began_s, waited_s = now_s, now_waited_s
