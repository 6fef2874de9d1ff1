"""Runs work on large requests in threads beside the event loop, so that streams go on.

Small requests are processed on the loop at once. A thread releases the interpreter every few milliseconds, except
within one call into C, such as decoding a body. `limits` bounds those calls.
"""

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")

INLINE_SIZE = 16_384  # characters, bytes or tokens: some milliseconds of work

_TRIMMED_BYTES = 64 << 20  # of freed bodies and objects, after which memory is returned to the system

REQUESTS = ThreadPoolExecutor(2, "requests")  # more would delay the event loop and hold more memory at once
BODIES = ThreadPoolExecutor(1, "bodies")  # for calls into C of some 30 ms: two at once could delay the loop by both
BATCHES = ThreadPoolExecutor(1, "batches")  # for all work of batches, so that no other request waits behind it


async def beside(make: Callable[[], T], size: int, threads: ThreadPoolExecutor = REQUESTS) -> T:
    """Calls `make`, in one of `threads` if the size of its input is above INLINE_SIZE. Returns or raises as `make`
    does."""
    if size <= INLINE_SIZE:
        return make()
    return await asyncio.get_running_loop().run_in_executor(threads, copy_context().run, make)


class Trimmer:
    """Returns freed memory of large requests to the system. The allocator would keep it."""

    def __init__(self) -> None:
        self._freed = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc

    def freed(self, size: int) -> None:
        self._freed += size
        if self._freed >= _TRIMMED_BYTES and self._trim is not None:
            self._freed = 0
            REQUESTS.submit(self._trim, 0)
