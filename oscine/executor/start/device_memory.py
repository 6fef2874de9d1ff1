"""The memory of a GPU that the engine may use, and torch's limit that enforces it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from oscine.executor.kv.memory import DeviceMemory
from oscine.executor.start.host_memory import available_bytes
from oscine.settings.config import EngineOptions

# Memory outside torch's allocator: a CUDA context of some 550 MB, created before the weights; kernels and graphs.
_MAX_CONTEXT = 1 << 30  # other processes use the memory beyond that
_KERNELS = 1 << 28


def device_memory(device: torch.device, options: EngineOptions, held: int = 0) -> DeviceMemory:
    """`held`: bytes of the model that are already on the device. They count as free."""
    free, total = torch.cuda.mem_get_info(device)
    chip: Any = torch.cuda.get_device_properties(device)
    left = options.cache.left_bytes
    found = DeviceMemory(total - left, free - left, unified=bool(chip.is_integrated))
    return capped(with_cache(found, available_bytes()), options.cache.gpu_memory_bytes, held)


def smallest_gpu(devices: Sequence[torch.device], options: EngineOptions) -> int:
    """Bytes of the smallest of these GPUs, at most --gpu-memory-bytes. Makes no CUDA context on them."""
    totals = [torch.cuda.get_device_properties(device).total_memory for device in devices]
    most = options.cache.gpu_memory_bytes
    return min(totals) if most is None else min(most, *totals)


def with_cache(memory: DeviceMemory, available: int | None) -> DeviceMemory:
    """Counts cached files as free on a GPU with unified memory, which CUDA does not.

    `available`: bytes of host memory that this process may use. A GPU with its own memory is returned unchanged.
    """
    if not memory.unified or available is None:
        return memory
    return replace(memory, free=min(available, memory.total))


def capped(memory: DeviceMemory, most: int | None, held: int = 0) -> DeviceMemory:
    """The memory of a GPU of `most` bytes that holds nothing but this model."""
    memory = replace(memory, free=memory.free + held)
    if most is None or most >= memory.total:
        return memory
    return replace(memory, total=most, free=min(memory.free, most), capped=True)


def engine_bytes(device: torch.device, options: EngineOptions) -> int:
    """Bytes that the engine may take in addition to its CUDA context. Call it before anything of the model is there."""
    free, total = torch.cuda.mem_get_info(device)
    memory, context = device_memory(device, options), min(total - free, _MAX_CONTEXT)
    share = 1.0 if options.cache.kv_cache_free_gpu_memory_fraction is not None else memory.share(options)
    return min(int(share * memory.total) - context, free - options.cache.left_bytes - memory.margin)


class Budget:
    """What the engine may take of its GPU from now on, before anything of the model is there."""

    def __init__(self, device: torch.device, options: EngineOptions) -> None:
        self._device = device
        self._allowed, self._free = engine_bytes(device, options), torch.cuda.mem_get_info(device)[0]
        self._share = options.cache.kv_cache_free_gpu_memory_fraction or 1.0

    @property
    def taken(self) -> int:
        """Bytes of GPU memory that were taken since this object was made."""
        torch.cuda.synchronize(self._device)
        return self._free - torch.cuda.mem_get_info(self._device)[0]

    def cache_bytes(self, held: int) -> int:
        """Bytes that the cache may take once all else has its memory. `held`: bytes that it has already."""
        return int(self._share * (self._allowed - self.taken + held))


def keep_to(device: torch.device, memory: DeviceMemory) -> None:
    """Limits torch's allocator to --gpu-memory-bytes, less the CUDA context and kernels. Call it before any weights."""
    if not memory.capped:
        return
    free, total = torch.cuda.mem_get_info(device)
    context = min(total - free, _MAX_CONTEXT)
    torch.cuda.set_per_process_memory_fraction(max(0, memory.total - context - _KERNELS) / total, device)
