"""Returns freed memory to the system. glibc's allocator would keep hundreds of MiB.

It has an arena per thread. Once a large block was freed, it keeps up to 64 MiB at the end of each arena, and takes
blocks of up to 32 MiB from there. A fixed threshold prevents both: blocks above 128 KiB then have mappings of their
own. Trimming returns the free pages between blocks that are in use.
"""

import asyncio
import ctypes
import time
from collections.abc import Callable

_KEPT_BYTES = 4 << 20  # at the end of an arena: what encoding a slice of a text takes
_EVERY_S = 2.0
_WORK_S = 0.1  # of CPU time since the last time; less frees little
_M_TRIM_THRESHOLD = -1  # of malloc.h

_allocator = ctypes.CDLL(None)
_trim: Callable[[int], int] | None = getattr(_allocator, "malloc_trim", None)  # only glibc has it


async def return_freed_memory() -> None:
    """Trims the arenas in a thread every _EVERY_S, unless the process was idle. Runs until it is cancelled."""
    if _trim is None:
        return
    _allocator.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    trimmed_s = time.process_time()
    while True:
        await asyncio.sleep(_EVERY_S)
        if time.process_time() - trimmed_s >= _WORK_S:
            await asyncio.to_thread(_trim, 0)
            trimmed_s = time.process_time()
