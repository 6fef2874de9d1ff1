"""Work on requests that would keep the event loop from its streams: it is done beside the loop, a few at a time.

Knows how large a request may be to be dealt with at once; not what is done. A thread gives way every few milliseconds,
except within one call into C, such as the decoding of a body: `limits` bounds those.
"""

import asyncio
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")

INLINE_SIZE = 16_384  # characters, bytes or tokens: some milliseconds of work
_THREADS = 2  # more of them would keep the event loop waiting for its turn, and hold more memory at once

_TRIMMED_BYTES = 64 << 20  # of bodies and their objects: after so many, memory is given back to the system

_threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="requests")


async def beside(make: Callable[[], T], size: int) -> T:
    """What `make` returns or raises; `size` is that of what it works on."""
    if size <= INLINE_SIZE:
        return make()
    return await asyncio.get_running_loop().run_in_executor(_threads, copy_context().run, make)


class Trimmer:
    """Gives memory that large requests have left free back to the system, which the allocator would keep."""

    def __init__(self) -> None:
        self._freed = 0
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc

    def freed(self, size: int) -> None:
        self._freed += size
        if self._freed >= _TRIMMED_BYTES and self._trim is not None:
            self._freed = 0
            _threads.submit(self._trim, 0)
