"""The target of the ops of one rank: its chip, and the other ranks of its model.

Made once, and bound to every op by table.resolve. A launch policy reads it; nothing below asks torch which chip it is.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor


class Communicator(Protocol):
    """The ranks that compute one model together. Every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    @property
    def error(self) -> str | None:
        """An error between the ranks, in one line. Read it after the device has finished its work."""
        ...

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over the ranks."""
        ...

    def all_gather(self, part: Tensor) -> Tensor:
        """The parts of all ranks beside each other along the last dimension, in the order of the ranks."""
        ...

    def best(self, values_N: Tensor, ids_N: Tensor) -> Tensor:
        """The id, in the whole vocabulary, of the highest value over the ranks, row by row.

        values_N: float32, each rank's own highest; NaN counts as -inf. ids_N: int64, the ids of these values. Of equal
        values that of the lower rank. -1 where no rank has a value above -inf.
        """
        ...

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        ...

    def serve(self) -> None:
        """Arms the time limit after the start: from now on a rank that exceeds it is lost."""
        ...


class Alone:
    """The communicator of a single rank, which does nothing."""

    rank = 0
    num_ranks = 1
    error = None

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def all_gather(self, part: Tensor) -> Tensor:
        return part

    def best(self, values_N: Tensor, ids_N: Tensor) -> Tensor:
        return ids_N

    def barrier(self) -> None:
        pass

    def serve(self) -> None:
        pass


def best_of_gathered(communicator: Communicator, values_N: Tensor, ids_N: Tensor) -> Tensor:
    """The `best` of a communicator that has no better way than to gather."""
    values_NR, ids_NR = communicator.all_gather(values_N[:, None]), communicator.all_gather(ids_N[:, None])
    values_NR = values_NR.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    highest_N1, rank_N1 = values_NR.max(1, keepdim=True)
    return torch.where(highest_N1 > -torch.inf, ids_NR.gather(1, rank_N1), -1)[:, 0]


class Exchange(Protocol):
    """Ranks that have their own tokens, and a part of every expert: tokens meet at the experts, and their sums return.

    Attention, norms and head know nothing of other ranks. All ranks make the same calls in the same order.
    """

    tokens: tuple[int, ...]  # of each rank in this step; set before it
    failed: Tensor | None  # int32 [1] on the device: not zero if a kernel waited for another rank in vain

    def share(self, moe: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The moe op over the experts of all ranks, made from this rank's op. It returns sums for its own tokens."""
        ...

    def rehearsal(self) -> AbstractContextManager[None]:
        """Within it no kernel waits for another rank, and what kernels compute is worthless."""
        ...

    def serve(self) -> None:
        """Arms the time limit after the start: from now on a rank that exceeds it is lost."""
        ...


class DispatchingExchange(Exchange, Protocol):
    """An exchange whose tokens meet in the norm before the router."""

    def dispatch(self, y_TH: Tensor, counts_E: Tensor | None, planes: Any) -> Tensor:
        """The tokens of all ranks, [n, H]. Sets counts_E to zero on the way, and writes planes of all (planes.py)."""
        ...


CpuWeights = Literal["float32", "int8", "bf16"]
ActivationDtype = Literal["auto", "fp8"]


@dataclass(frozen=True, slots=True)
class Target:
    device: torch.device
    capability: tuple[int, int] = (0, 0)  # compute capability of an NVIDIA GPU; (0, 0) on anything else
    sm_count: int = 1  # streaming multiprocessors
    shared_memory: int = 0  # bytes that a program can have
    communicator: Communicator = field(default_factory=Alone)
    exchange: Exchange | None = None  # with ranks that have their own tokens
    cpu_weights: CpuWeights = "float32"  # type of the dense weights on a CPU
    activation_dtype: ActivationDtype = "auto"  # of what experts multiply; auto: exact
    architecture: str = ""  # of an AMD GPU, such as gfx942

    @classmethod
    def of(
        cls, device: torch.device, communicator: Communicator | None = None, exchange: Exchange | None = None
    ) -> "Target":
        """The device as torch describes it."""
        communicator = communicator or Alone()
        if device.type != "cuda":
            return cls(device, communicator=communicator, exchange=exchange)
        chip: Any = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            return cls(
                device,
                sm_count=chip.multi_processor_count,
                shared_memory=chip.shared_memory_per_block,
                communicator=communicator,
                exchange=exchange,
                architecture=chip.gcnArchName.split(":")[0],
            )
        shared_memory = chip.shared_memory_per_block_optin
        return cls(device, (chip.major, chip.minor), chip.multi_processor_count, shared_memory, communicator, exchange)

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
        """The constant `PDL` of a Triton kernel, and the launch options that go with it; see launch.py."""
        dependent = {"PDL": True, "launch_pdl": True} if self.dependent_launch else {"PDL": False}
        return dependent | {"enable_fp_fusion": True}

    def program(self, options: dict[str, int]) -> dict[str, int]:
        """num_warps and maxnreg of a launch. On an AMD GPU 16 warps are the most, and registers have no limit."""
        if not self.architecture:
            return options
        kept = {name: value for name, value in options.items() if name != "maxnreg"}
        return kept | {"num_warps": min(16, kept["num_warps"])}
