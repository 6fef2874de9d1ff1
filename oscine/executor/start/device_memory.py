"""What a GPU has for the engine, and the limit that keeps the engine to it."""

from typing import Any

import torch

from oscine.config import EngineOptions
from oscine.executor.kv.memory import DeviceMemory
from oscine.executor.start.host_memory import available_bytes

# Beside torch's memory: the context, which is there before the weights, and compiled kernels and graphs, which come.
_MOST_CONTEXT = 1 << 30
_KERNELS = 1 << 28


def device_memory(device: torch.device, options: EngineOptions, held: int = 0) -> DeviceMemory:
    """`held`: bytes of the model that are on the device already, and count as free."""
    free, total = torch.cuda.mem_get_info(device)
    if is_unified(device):  # what files of the system's cache hold is free, but CUDA does not count it
        free = max(free, min(available_bytes() or 0, total))
    return capped(DeviceMemory(total, free + held), options.cache.gpu_memory_bytes)


def capped(memory: DeviceMemory, most: int | None) -> DeviceMemory:
    """As if the GPU had `most` bytes, and no other process on it."""
    if most is None or most >= memory.total:
        return memory
    context = min(memory.total - memory.free, _MOST_CONTEXT)
    return DeviceMemory(most, max(0, min(memory.free, most - context)), capped=True)


def is_unified(device: torch.device) -> bool:
    """Whether the GPU's memory is the system's, as of a Jetson or of GB10."""
    chip: Any = torch.cuda.get_device_properties(device)
    return bool(chip.is_integrated)


def keep_to(device: torch.device, memory: DeviceMemory) -> None:
    """From now on torch takes no more than --gpu-memory-bytes leaves it."""
    if memory.capped:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(max(0, memory.free - _KERNELS) / total, device)
