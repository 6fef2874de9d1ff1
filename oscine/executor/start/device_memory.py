"""What a GPU has for the engine, and the limit that keeps the engine to it."""

from dataclasses import replace
from typing import Any

import torch

from oscine.config import EngineOptions
from oscine.executor.kv.memory import DeviceMemory
from oscine.executor.start.host_memory import available_bytes

# Beside torch's memory: a context of some 550 MB, which is there before the weights, and kernels and graphs.
_MOST_CONTEXT = 1 << 30  # what is in use beyond that is of other processes
_KERNELS = 1 << 28


def device_memory(device: torch.device, options: EngineOptions, held: int = 0) -> DeviceMemory:
    """`held`: bytes of the model that are on the device already, and count as free."""
    free, total = torch.cuda.mem_get_info(device)
    chip: Any = torch.cuda.get_device_properties(device)
    found = DeviceMemory(total, free, unified=bool(chip.is_integrated))
    return capped(with_cache(found, available_bytes()), options.cache.gpu_memory_bytes, held)


def with_cache(memory: DeviceMemory, available: int | None) -> DeviceMemory:
    """Memory of the system that holds cached files is free, but CUDA does not count it. `available`: to this process.

    A GPU with memory of its own stays as it is.
    """
    if not memory.unified or available is None:
        return memory
    return replace(memory, free=min(available, memory.total))


def capped(memory: DeviceMemory, most: int | None, held: int = 0) -> DeviceMemory:
    """As if the GPU had `most` bytes, and nothing else on it."""
    memory = replace(memory, free=memory.free + held)
    if most is None or most >= memory.total:
        return memory
    return replace(memory, total=most, free=min(memory.free, most), capped=True)


def keep_to(device: torch.device, memory: DeviceMemory) -> None:
    """From now on torch takes no more than --gpu-memory-bytes leaves it. To be called before the weights are there."""
    if not memory.capped:
        return
    free, total = torch.cuda.mem_get_info(device)
    context = min(total - free, _MOST_CONTEXT)
    torch.cuda.set_per_process_memory_fraction(max(0, memory.total - context - _KERNELS) / total, device)
