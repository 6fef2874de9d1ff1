"""Returns memory that the process has freed to the system.

The allocator of glibc keeps it: whole pages between what is still in use, in an arena per thread. After large requests
that is hundreds of MiB. All of them are trimmed here, whatever freed the memory: bodies, prompts, grammars or tools.
"""

import asyncio
import ctypes
import time
from collections.abc import Callable

_EVERY_S = 2.0
_WORK_S = 0.1  # of CPU time since the last time; less frees little
_trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it


async def return_freed_memory() -> None:
    """Trims the arenas in a thread every _EVERY_S in which the process has worked, until it is cancelled."""
    trimmed_s = time.process_time()
    while _trim is not None:
        await asyncio.sleep(_EVERY_S)
        if time.process_time() - trimmed_s >= _WORK_S:
            await asyncio.to_thread(_trim, 0)
            trimmed_s = time.process_time()
