"""Python's garbage collector."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY_S = 5.0
_LONGEST_S = 60.0  # that a collection may be put off
_NEVER = 1 << 30  # a threshold


@contextmanager
def paused() -> Iterator[None]:
    """Nothing is collected within it. Afterwards the collector is as it was."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


async def collect_when_quiet(is_quiet: Callable[[], bool]) -> None:
    """Makes the collections of the oldest generation until it is cancelled; Python makes none meanwhile.

    Such a collection traverses all objects of all requests, and nothing else runs: 0.1 s and more beside large
    requests. It waits until there are few, but not for longer than _LONGEST_S.
    """
    usual = gc.get_threshold()
    gc.set_threshold(*usual[:2], _NEVER)
    put_off_s = 0.0
    try:
        while True:
            await asyncio.sleep(_EVERY_S)
            put_off_s += _EVERY_S
            if gc.get_count()[2] > usual[2] and (is_quiet() or put_off_s >= _LONGEST_S):
                gc.collect()
                put_off_s = 0.0
    finally:
        gc.set_threshold(*usual)
