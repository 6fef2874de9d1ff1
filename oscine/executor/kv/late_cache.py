"""The KV cache of a GPU: addresses are reserved before graphs are captured, and memory is mapped last."""

from dataclasses import replace

import torch

from oscine.executor.kv.allocate import pages_of
from oscine.executor.kv.memory import MemoryPlan, longest
from oscine.executor.kv.reserved import ReservedMemory
from oscine.model.config import ModelConfig
from oscine.ops.interface import KVCache

_GIB = 1 << 30


class LateCache:
    """Slots with addresses for all of the GPU. Before `fill`, only the first has memory, and the last, for padding."""

    def __init__(self, plan: MemoryPlan, device: torch.device) -> None:
        (slots,) = plan.slots
        self._slot_bytes = slots.slot_bytes
        most = torch.cuda.get_device_properties(device).total_memory // slots.slot_bytes
        self.reserved = ReservedMemory((most + 1) * slots.slot_bytes, device)
        self.reserved.map(0, slots.slot_bytes)
        self.reserved.map(most * slots.slot_bytes, (most + 1) * slots.slot_bytes)
        data = self.reserved.bytes[: (most + 1) * slots.slot_bytes]
        self.kv: KVCache = pages_of(plan.groups, plan.slots, [data])

    @property
    def num_bytes(self) -> int:
        """Bytes that have memory."""
        return self.reserved.num_mapped

    def room(self, num_bytes: int) -> int:
        """Slots that `num_bytes` hold."""
        unit = self.reserved.granularity
        return num_bytes // unit * unit // self._slot_bytes - 1  # for padding

    def fill(self, count: int) -> None:
        """Gives memory to the first `count` slots. Raises MemoryError if there is too little."""
        self.reserved.map(0, count * self._slot_bytes)


def filled(plan: MemoryPlan, config: ModelConfig, asked: int | None, count: int) -> MemoryPlan:
    """The plan with what the cache really has. `asked`: --max-model-len.

    Raises ValueError if a sequence of that length does not fit.
    """
    slots = replace(plan.slots[0], count=max(0, count))
    most = longest(config, plan.groups, slots)
    if most < (asked or 1):
        size, least = slots.slot_bytes, asked or 1
        raise ValueError(
            f"once all else is in its place, the GPU has {slots.count * size / _GIB:.2f} GiB for the KV cache, too "
            f"little for a sequence of {least} tokens; it has more with a smaller --max-num-seqs or "
            "--max-num-batched-tokens"
        )
    return replace(plan, slots=[slots], max_model_len=asked or most)
