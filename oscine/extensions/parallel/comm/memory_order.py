"""The order in which other cores see loads and stores of plain shared memory.

x86 processors show stores in their order, and loads as well; only a store and a later load may change places. Arm
processors may exchange any two accesses of different memory. So data and the position that announces it need:

    order()   between data and its position, on both sides: nothing on x86, a barrier elsewhere
    fence()   between a store and a later load, where each side looks for what the other one stored

The barrier is a C function of ops/native (`dmb ish` on Arm).
"""

import functools
import platform
import threading
from collections.abc import Callable
from typing import NamedTuple

from oscine.ops.native.cache import NoLibrary

_ORDERED = ("x86_64", "AMD64")
_lock = threading.Lock()


class MemoryOrder(NamedTuple):
    order: Callable[[], object]
    fence: Callable[[], object]


@functools.cache
def memory_order() -> MemoryOrder:
    """For this machine. Raises ValueError where it needs a barrier and the C kernels cannot be compiled."""
    if platform.machine() in _ORDERED:
        return MemoryOrder(_nothing, _lock_once)
    from oscine.ops.native.library import library  # imports torch

    try:
        barrier = functools.partial(library().oscine_fence, 0)
    except NoLibrary as error:
        need = "ranks, and engines that share experts, need a barrier in C on this processor"
        raise ValueError(f"{need} ({platform.machine()}), and {error}") from error
    return MemoryOrder(barrier, barrier)


def _nothing() -> None:
    pass


def _lock_once() -> None:
    """The instructions of a lock are a fence on x86."""
    with _lock:
        pass
