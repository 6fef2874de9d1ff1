"""What the ops of one rank run on: the chip, and the other ranks of its model.

Made once, and bound to every op by table.resolve. A launch policy reads it; nothing below asks torch which chip it is.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor


class Communicator(Protocol):
    """The ranks that compute one model together. Every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over the ranks."""
        ...

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks beside each other along the last dimension, in the order of the ranks."""
        ...

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        ...


class Alone:
    """The communicator of a single rank, which does nothing."""

    rank = 0
    num_ranks = 1

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        return part

    def barrier(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Target:
    device: torch.device
    capability: tuple[int, int] = (0, 0)  # compute capability of an NVIDIA GPU; (0, 0) on anything else
    sm_count: int = 1  # streaming multiprocessors
    shared_memory: int = 0  # bytes that a program can have
    communicator: Communicator = field(default_factory=Alone)

    @classmethod
    def of(cls, device: torch.device, communicator: Communicator | None = None) -> "Target":
        """The device as torch describes it."""
        communicator = communicator or Alone()
        if device.type != "cuda":
            return cls(device, communicator=communicator)
        chip: Any = torch.cuda.get_device_properties(device)
        shared_memory = chip.shared_memory_per_block_optin
        return cls(device, (chip.major, chip.minor), chip.multi_processor_count, shared_memory, communicator)

    @property
    def dependent_launch(self) -> bool:
        """Whether a kernel can be launched while the one before it runs (programmatic dependent launch)."""
        return self.capability >= (9, 0)

    @property
    def warp_groups(self) -> bool:
        """Whether four warps multiply together, from shared memory (wgmma). Elsewhere operands are in registers."""
        return self.capability[0] == 9

    @property
    def tensor_memory(self) -> bool:
        """Whether the sums of products have a memory of their own (tcgen05). Elsewhere they are in registers."""
        return self.capability[0] == 10

    @property
    def launch_options(self) -> dict[str, bool]:
        """The constant `PDL` of a Triton kernel, and the launch option that goes with it; see launch.py."""
        return {"PDL": True, "launch_pdl": True} if self.dependent_launch else {"PDL": False}
