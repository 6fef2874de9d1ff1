"""Frees the KV cache of an engine on a CPU while it sleeps, and the memory of weights that are mapped from files."""

import ctypes
import mmap

import torch
from torch import Tensor

from oscine.executor.kv.allocate import allocate_kv
from oscine.executor.kv.memory import MemoryPlan
from oscine.executor.kv.reserved import ReservedMemory
from oscine.extensions.models.sleep.move import tensors_of
from oscine.model.packed import page_out
from oscine.model.weights import Weights
from oscine.ops.interface import KVCache


class CpuSleeper:
    """Pages are zero when the engine wakes. Weights come back when they are read."""

    def __init__(self) -> None:
        self._weights: list[Tensor] = []
        self._pages: list[Tensor] = []

    def keep(self, weights: Weights) -> Weights:
        self._weights = list(tensors_of(weights))
        return weights

    def allocate(self, memory: MemoryPlan, device: torch.device, *, padding: bool = False) -> KVCache:
        kv = allocate_kv(memory, device, padding=padding)
        self._pages = list(kv)
        return kv

    def free_asleep(self, reserved: ReservedMemory) -> None:
        raise AssertionError("reserved memory is of a GPU")

    def sleep(self) -> None:
        for storage in {pages.untyped_storage().data_ptr(): pages.untyped_storage() for pages in self._pages}.values():
            drop(storage.data_ptr(), storage.nbytes())
        page_out(self._weights)

    def wake(self) -> None:
        pass


def drop(address: int, num_bytes: int) -> None:
    """Gives the whole pages in this private, anonymous memory back to the system. They are zero from now on."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + num_bytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
