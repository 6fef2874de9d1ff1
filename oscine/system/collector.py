"""Python's garbage collector."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY_S = 2.0
_LONGEST_S = 600.0  # that a collection may be put off
_MANY_OBJECTS = 50_000  # set apart since the last collection of all


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
    """Collects what was set apart too, until it is cancelled: once there is much of it, while `is_quiet` or after
    _LONGEST_S.

    Nothing else runs while objects are traversed, and a large request can have so many that it takes 50 ms. All others
    are left to Python, which collects them little by little. What one minute of connections leaves would take 700 ms.
    """
    put_off_s, apart = 0.0, gc.get_freeze_count()
    while True:
        await asyncio.sleep(_EVERY_S)
        if gc.get_freeze_count() - apart <= _MANY_OBJECTS:
            continue
        put_off_s += _EVERY_S
        if is_quiet() or put_off_s >= _LONGEST_S:
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            put_off_s, apart = 0.0, gc.get_freeze_count()
