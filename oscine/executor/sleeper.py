"""What an executor asks of the part that frees its memory while the engine sleeps: the extension models has them."""

from typing import Protocol

import torch

from oscine.executor.kv.memory import MemoryPlan
from oscine.executor.kv.reserved import ReservedMemory
from oscine.model.weights import Weights
from oscine.ops.interface import KVCache


class Sleeper(Protocol):
    """Addresses of weights and pages stay what they are, as CUDA graphs hold them."""

    def keep(self, weights: Weights) -> Weights:
        """The same weights, where they can be freed. Called once, when they are prepared and nothing has used them.

        Raises ValueError if the host has too little memory for its copy.
        """
        ...

    def allocate(self, memory: MemoryPlan, device: torch.device, *, padding: bool = False) -> KVCache:
        """As allocate_kv, where the pages can be freed."""
        ...

    def free_asleep(self, reserved: ReservedMemory) -> None:
        """This memory is freed, too. When the engine wakes it is zero."""
        ...

    def sleep(self) -> None:
        """Frees weights and pages. No step may run until `wake`."""
        ...

    def wake(self) -> None:
        """Raises MemoryError if there is too little memory; then everything stays free."""
        ...
