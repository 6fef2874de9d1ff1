"""Frees the weights and the KV cache of an engine on a GPU while it sleeps, and brings them back.

Weights are moved to reserved addresses when they are prepared, and copied to pinned host memory once, as they never
change. So an engine falls asleep without a copy, and wakes up with one. Pages are reserved memory anyway, and their
content is forgotten. CUDA graphs, the state of sequences and the CUDA context stay on the GPU.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

from oscine.executor.kv.allocate import pages_of
from oscine.executor.kv.memory import MemoryPlan
from oscine.executor.kv.reserved import ReservedMemory
from oscine.executor.start.host_memory import available_bytes
from oscine.extensions.models.sleep.move import moved
from oscine.model.weights import Weights
from oscine.ops.interface import KVCache
from oscine.ops.pinned import pin

OPTION = "--enable-sleep-mode"
_ALIGNMENT = 512  # bytes, as torch's allocator has it
_STEP = 32 << 20  # bytes that are mapped at once, at least
_GIB = 1 << 30


class Arena:
    """Tensors side by side in reserved memory. Tensors that share memory go on sharing it."""

    def __init__(self, memory: ReservedMemory, kind: str = "cuda") -> None:
        """`kind`: of the devices whose tensors are moved."""
        self.memory, self.num_bytes, self._kind = memory, 0, kind
        self._starts: dict[int, int] = {}  # address of a storage -> where it is here

    def move(self, tensor: Tensor) -> Tensor:
        """Raises MemoryError if the GPU has not enough left. A tensor on another device is returned as it is."""
        if tensor.device.type != self._kind:
            return tensor
        storage = tensor.untyped_storage()
        size, key = storage.nbytes(), storage.data_ptr()
        if not size:
            return tensor
        if (start := self._starts.get(key)) is None:
            start = self._starts[key] = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
            self._map(start + size)
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self.memory.bytes[start : start + size].copy_(whole)
            self.num_bytes = start + size
        here = self.memory.bytes[start : start + size].view(tensor.dtype)
        return here.as_strided(tensor.shape, tensor.stride(), start // tensor.itemsize + tensor.storage_offset())

    def _map(self, end: int) -> None:
        end = min(-(-end // _STEP) * _STEP, self.memory.num_bytes)
        try:
            self.memory.map(0, end)
        except MemoryError:  # what was moved before may still be in torch's cache
            torch.cuda.empty_cache()
            self.memory.map(0, end)


class GpuSleeper:
    def __init__(self, device: torch.device) -> None:
        """Raises ValueError for a GPU that has no memory of its own."""
        properties = torch.cuda.get_device_properties(device)
        if properties.is_integrated:
            raise ValueError(f"{OPTION} frees no memory on a GPU that shares that of the host")
        self._weights = ReservedMemory(properties.total_memory, device)
        self._caches: list[ReservedMemory] = []
        self._copy = torch.empty(0, dtype=torch.uint8)  # of the weights, in pinned host memory

    def keep(self, weights: Weights) -> Weights:
        arena = Arena(self._weights)
        kept: Weights = moved(weights, arena.move)
        del weights
        torch.cuda.empty_cache()
        self._copy = _pinned(arena.num_bytes)
        self._copy.copy_(self._weights.bytes[: arena.num_bytes])
        return kept

    def allocate(self, memory: MemoryPlan, device: torch.device, *, padding: bool = False) -> KVCache:
        parts = []
        for slots in memory.slots:
            num_bytes = (slots.count + padding) * slots.slot_bytes
            reserved = ReservedMemory(num_bytes, device)
            reserved.map(0, num_bytes)
            self.free_asleep(reserved)
            parts.append(reserved.bytes[:num_bytes])
        return pages_of(memory.groups, memory.slots, parts)

    def free_asleep(self, reserved: ReservedMemory) -> None:
        self._caches.append(reserved)

    def sleep(self) -> None:
        for reserved in (self._weights, *self._caches):
            reserved.release()
        torch.cuda.empty_cache()

    def wake(self) -> None:
        try:
            self._weights.restore(zero=False)
            for cache in self._caches:
                cache.restore()
        except MemoryError:
            self.sleep()
            raise
        weights = self._weights.bytes[: len(self._copy)]
        weights.copy_(self._copy, non_blocking=True)
        torch.cuda.synchronize(weights.device)


def _pinned(num_bytes: int) -> Tensor:
    """Pinned host memory, in huge pages where the system has them. Raises ValueError if there is too little."""
    free = available_bytes()
    if free is not None and free < num_bytes:
        sizes = f"{num_bytes / _GIB:.1f} GiB of host memory, and {free / _GIB:.1f} GiB are free"
        raise ValueError(f"{OPTION}: a copy of the weights takes {sizes}")
    pages = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    pin(memory, OPTION)
    return memory
