"""The memory of the page groups on a device."""

import numpy as np
import torch
from torch import Tensor

from oscine.config import CacheOptions
from oscine.executor.kv.memory import MemoryPlan
from oscine.kv_group import FP8, KVGroup
from oscine.model.config import ModelConfig
from oscine.ops.interface import KVCache


def dtype_name(dtype: torch.dtype) -> str:
    """As page groups call it."""
    return str(dtype).removeprefix("torch.")


def groups_of(config: ModelConfig, cache: CacheOptions, dtype: torch.dtype, num_ranks: int = 1) -> tuple[KVGroup, ...]:
    """The page groups that the options ask for. `config`: of the whole model. `dtype`: of activations."""
    return config.kv_groups(cache.page_size, dtype_name(dtype), num_ranks, FP8 if cache.fp8 else None)


def stored_dtype(group: KVGroup) -> torch.dtype:
    """Of the memory. A page in FP8 is bytes, as its elements and its scales differ in type."""
    dtype: torch.dtype = torch.uint8 if group.dtype == FP8 else getattr(torch, group.dtype)
    return dtype


def allocate_kv(memory: MemoryPlan, device: torch.device, *, padding: bool = False) -> KVCache:
    """Zeros, not garbage: attention multiplies what it masks by zero, and zero times NaN is NaN.

    `padding`: with one more page in each group, for padding.
    """
    counts = zip(memory.groups, memory.num_pages, strict=True)
    return tuple(allocate_group(group, num_pages + padding, device) for group, num_pages in counts)


def allocate_group(group: KVGroup, num_pages: int, device: torch.device) -> Tensor:
    """Zeros. On a CPU, the system gives the memory when it is first used: none is waited for, or taken in vain."""
    shape, dtype = (num_pages, *group.page_shape), stored_dtype(group)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(num_pages * group.page_bytes, np.uint8)).view(dtype).view(shape)
