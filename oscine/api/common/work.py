"""Runs work on large requests in threads, and on small ones on the event loop, some milliseconds per turn of the loop.

So streams go on. A thread releases the interpreter every few milliseconds, except within one call into C, such as
decoding a body. `memory` bounds those calls.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TypeVar

T = TypeVar("T")

INLINE_SIZE = 16_384  # characters, bytes or tokens: some milliseconds of work
_TURNS_S = 1.0  # for two turns of the event loop, at most
TURN_S = 0.005  # of inline work in one turn of the event loop; many small requests may come at once

REQUESTS = ThreadPoolExecutor(2, "requests")  # more would delay the event loop and hold more memory at once
BODIES = ThreadPoolExecutor(1, "bodies")  # for calls into C of some 30 ms: two at once could delay the loop by both
BATCHES = ThreadPoolExecutor(1, "batches")  # for all work of batches, so that no other request waits behind it


class InlineWork:
    """Runs work on the event loop. After `most_s` of work in one turn of the loop, the rest waits for the next turn."""

    def __init__(self, most_s: float = TURN_S, clock: Callable[[], float] = time.perf_counter) -> None:
        self._most_s, self._clock = most_s, clock
        self._loop: asyncio.AbstractEventLoop | None = None  # whose turn it is; None until work begins in a turn
        self._taken_s = 0.0

    async def run(self, make: Callable[[], T]) -> T:
        """Returns or raises as `make` does."""
        loop = asyncio.get_running_loop()
        while self._loop is loop and self._taken_s >= self._most_s:
            await asyncio.sleep(0)
        if self._loop is not loop:
            self._loop, self._taken_s = loop, 0.0
            loop.call_soon(self._end_turn)
        began_s = self._clock()
        try:
            return make()
        finally:
            self._taken_s += self._clock() - began_s

    def _end_turn(self) -> None:
        self._loop = None


_inline = InlineWork()


async def run_in_thread(make: Callable[[], T], size: int, threads: ThreadPoolExecutor = REQUESTS) -> T:
    """Calls `make`, in one of `threads` if the size of its input is above INLINE_SIZE. Returns or raises as `make`
    does."""
    if size <= INLINE_SIZE:
        return await _inline.run(make)
    run = partial(copy_context().run, make)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(threads, run if threads is REQUESTS else partial(_in_turn, run, loop))


def _in_turn(run: Callable[[], T], loop: asyncio.AbstractEventLoop) -> T:
    """Runs a call into C, then waits until the event loop has gone round twice.

    An event is received and sent within two turns, in which the loop acquires the GIL several times. Each time it
    would wait for another such call.
    """
    try:
        return run()
    finally:
        turned = threading.Event()
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(loop.call_soon, turned.set)
            turned.wait(_TURNS_S)
