"""The memory of the page groups on a device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from oscine.executor.kv.memory import MemoryPlan
from oscine.kv_group import KVGroup, Slots
from oscine.model.config import ModelConfig
from oscine.ops.interface import KVCache
from oscine.settings.config import CacheOptions


def dtype_name(dtype: torch.dtype) -> str:
    """As page groups call it."""
    return str(dtype).removeprefix("torch.")


def groups_of(config: ModelConfig, cache: CacheOptions, dtype: torch.dtype, num_ranks: int = 1) -> tuple[KVGroup, ...]:
    """The page groups that the options ask for. `config`: of the whole model. `dtype`: of activations."""
    return config.kv_groups(cache.page_size, cache.kv_dtype(dtype_name(dtype)), num_ranks)


def stored_dtype(group: KVGroup) -> torch.dtype:
    """Of the memory."""
    dtype: torch.dtype = getattr(torch, group.dtype.stored_as)
    return dtype


def allocate_kv(memory: MemoryPlan, device: torch.device, *, padding: bool = False) -> KVCache:
    """The pages of each group, [pages, *page_shape]. Groups that share memory see the same bytes.

    Zeros, not garbage: attention multiplies what it masks by zero, and zero times NaN is NaN. `padding`: with one more
    slot, whose pages are for padding.
    """
    parts = [zeros((slots.count + padding) * slots.slot_bytes, device) for slots in memory.slots]
    return pages_of(memory.groups, memory.slots, parts)


def pages_of(groups: Sequence[KVGroup], memory: Sequence[Slots], parts: Sequence[Tensor]) -> KVCache:
    """The pages of each group in these bytes, one part for each kind of slots."""
    found = {
        group: pages_in(data, groups[group], slots.stride(group))
        for slots, data in zip(memory, parts, strict=True)
        for group in slots.groups
    }
    return tuple(found[group] for group in range(len(groups)))


def pages_in(data: Tensor, group: KVGroup, stride: int) -> Tensor:
    """All pages of a group in these bytes [N]: [pages, *page_shape]. `stride`: bytes from a page to the next."""
    pages = data.view(-1, stride)[:, : group.page_bytes].view(stored_dtype(group))
    return pages.view(len(pages), *group.page_shape)


def allocate_group(group: KVGroup, num_pages: int, device: torch.device) -> Tensor:
    """Zeros, in memory of their own."""
    return pages_in(zeros(num_pages * group.page_bytes, device), group, group.page_bytes)


def zeros(num_bytes: int, device: torch.device) -> Tensor:
    """On a CPU, the system gives the memory when it is first used: none is waited for, or taken in vain."""
    if device.type != "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    return torch.from_numpy(np.zeros(num_bytes, np.uint8))
