"""Python's garbage collector."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_EVERY_S = 2.0
_LONGEST_S = 600.0  # that a collection may be put off
_MANY_OBJECTS = 50_000  # set apart since the last collection of all
_SELDOM = 100  # collections of young objects before one of all: some 700,000 objects that stay; Python's own is 10


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


class _Apart:
    """How many objects have been set apart since the start, freed ones among them. The collector's own count of those
    that are there goes through all of them, 20 ms for what a server has."""

    made = 0


@contextmanager
def set_apart() -> Iterator[None]:
    """Context manager for making many long-lived objects. Only the next full collection traverses them."""
    with paused():
        young = gc.get_count()[0]
        yield
        _Apart.made += max(0, gc.get_count()[0] - young)
        gc.freeze()


async def collect_when_quiet(is_quiet: Callable[[], bool]) -> None:
    """Makes the collections of all objects until it is cancelled, while `is_quiet` or after _LONGEST_S; Python makes
    those of young objects, and one of all where very many stay.

    Nothing else runs while objects are traversed: those of a large request, or of a thousand connections, take 50 ms.
    Requests and connections leave no reference cycles; these collections free what error paths leave.
    """
    gc.collect()
    gc.freeze()  # what the start has made is not traversed again while requests run
    usual = gc.get_threshold()
    gc.set_threshold(*usual[:2], _SELDOM)
    put_off_s, apart, made = 0.0, gc.get_freeze_count(), _Apart.made
    try:
        while True:
            await asyncio.sleep(_EVERY_S)
            put_off_s += _EVERY_S
            many = False
            if _Apart.made - made > _MANY_OBJECTS and is_quiet():
                many, made = gc.get_freeze_count() - apart > _MANY_OBJECTS, _Apart.made
            if many or put_off_s >= _LONGEST_S:
                gc.unfreeze()
                gc.collect()
                gc.freeze()
                put_off_s, apart, made = 0.0, gc.get_freeze_count(), _Apart.made
    finally:
        gc.set_threshold(*usual)
