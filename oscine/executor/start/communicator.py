"""The communicator of one rank, by the device that its model is on."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from oscine.checkpoint.opened import OpenedModel
from oscine.config import EngineOptions
from oscine.ops.comm.host import HostCommunicator
from oscine.ops.target import Communicator

if TYPE_CHECKING:  # it needs Triton, which a CPU does not
    from oscine.ops.comm.symmetric import SymmetricCommunicator

MakeCommunicator = Callable[[OpenedModel], Communicator]


def between_ranks(host: HostCommunicator, store: int, options: EngineOptions) -> MakeCommunicator:
    """All ranks make theirs together. `host`: through memory of the machine, for a CPU. `store`: descriptor of an empty
    file that they share, in which GPUs find each other."""

    def make(opened: OpenedModel) -> Communicator:
        if opened.device.type == "cpu":
            return host
        file = dist.FileStore(f"/proc/self/fd/{store}", host.num_ranks)  # type: ignore[attr-defined]
        return between_gpus(host.rank, host.num_ranks, file, opened, options)

    return make


def least_of(number: int, communicator: Communicator, *, shares_experts: bool) -> int:
    """The least number of all ranks of a model on GPUs, and of all engines that share its experts."""
    found = communicator.all_gather(torch.tensor([number])).min()
    if shares_experts:  # the engines are the ranks of the process group
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
    return int(found)


def between_gpus(
    rank: int, num_ranks: int, store: Any, opened: OpenedModel, options: EngineOptions
) -> "SymmetricCommunicator":
    """Returns when all ranks have made theirs. `store`: torch's, the same for all."""
    from oscine.ops.comm.symmetric import MEETING, SymmetricCommunicator

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=MEETING)
    group = dist.group.WORLD
    assert group is not None
    most_rows = options.scheduler.max_num_batched_tokens
    return SymmetricCommunicator(rank, num_ranks, opened.device, group, most_rows, opened.config.hidden_size)
