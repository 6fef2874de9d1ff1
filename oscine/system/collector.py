"""Python's garbage collector."""

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY_S = 2.0
_MANY_OBJECTS = 50_000  # set apart since the last collection of all
_SHARE = 0.01  # of the time that such collections may take while it is not quiet


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


@contextmanager
def set_apart() -> Iterator[None]:
    """Context manager for making many long-lived objects. Only the next full collection traverses them."""
    with paused():
        yield
        gc.freeze()


async def collect_when_quiet(is_quiet: Callable[[], bool]) -> None:
    """Collects what was set apart too, until it is cancelled: whenever there is much of it, but while it is not quiet
    no more often than takes _SHARE of the time.

    Nothing else runs while objects are traversed, and a large request can have so many that it takes 50 ms. All others
    are left to Python, which collects them little by little: what a minute of connections leaves takes 700 ms at once.
    """
    next_s, apart = 0.0, gc.get_freeze_count()
    while True:
        await asyncio.sleep(_EVERY_S)
        began_s = time.monotonic()
        if gc.get_freeze_count() - apart > _MANY_OBJECTS and (is_quiet() or began_s >= next_s):
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            ended_s = time.monotonic()
            next_s, apart = ended_s + (ended_s - began_s) / _SHARE, gc.get_freeze_count()
