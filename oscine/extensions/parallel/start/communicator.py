"""The communicator of one rank, by the device that its model is on."""

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from oscine.checkpoint.opened import OpenedModel
from oscine.executor.start.shared import MakeCommunicator, Report
from oscine.extensions.parallel.comm.collectives import LIMIT, MEETING, CollectiveCommunicator
from oscine.extensions.parallel.comm.host import HostCommunicator
from oscine.model.config import ModelConfig
from oscine.ops.target import Communicator
from oscine.settings.config import EngineOptions
from oscine.system.environment import Environment

if TYPE_CHECKING:  # it needs Triton, which a CPU does not
    from oscine.extensions.parallel.comm.symmetric import SymmetricCommunicator


def between_ranks(
    host: HostCommunicator, store: int, options: EngineOptions, report: Report = lambda text: None
) -> MakeCommunicator:
    """All ranks make theirs together. `host`: through memory of the machine, for a CPU. `store`: descriptor of an empty
    file that they share, in which GPUs find each other."""

    def make(opened: OpenedModel) -> Communicator:
        if opened.device.type == "cpu":
            return host
        file = dist.FileStore(f"/proc/self/fd/{store}", host.num_ranks)  # type: ignore[attr-defined]
        found = between_gpus(host.rank, host.num_ranks, file, opened, options)
        if isinstance(found, CollectiveCommunicator):
            report(_without_peer_access(opened.config))
        return found

    return make


def between_gpus(
    rank: int, num_ranks: int, store: Any, opened: OpenedModel, options: EngineOptions
) -> "SymmetricCommunicator | CollectiveCommunicator":
    """Returns when all ranks have made theirs. `store`: torch's, the same for all.

    Messages go from GPU to GPU, or through NCCL without peer access. Raises ValueError.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=MEETING)
    group = dist.group.WORLD
    assert group is not None
    if not reach_each_other(opened.device, group):
        return CollectiveCommunicator(group, _nccl())
    from oscine.extensions.parallel.comm.symmetric import SymmetricCommunicator

    most_rows = options.scheduler.max_num_batched_tokens
    return SymmetricCommunicator(rank, num_ranks, opened.device, group, most_rows, opened.config.hidden_size)


def reach_each_other(device: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether each rank's GPU has peer access to all others. Ranks call it together and get the same answer."""
    index = torch.tensor([torch.cuda.current_device() if device.index is None else device.index])
    indices = [torch.empty_like(index) for _ in range(group.size())]
    dist.all_gather(indices, index, group=group)
    own, others = int(index), {int(other) for other in indices} - {int(index)}
    can = all(torch.cuda.can_device_access_peer(own, other) for other in others)
    found = torch.tensor([int(can and not Environment().no_peer_access)])
    dist.all_reduce(found, op=dist.ReduceOp.MIN, group=group)
    return bool(found)


def _nccl() -> dist.ProcessGroup:
    """NCCL's group of all ranks, without peer access if that is hidden. Raises ValueError."""
    if not dist.is_nccl_available():
        raise ValueError("these GPUs cannot reach each other's memory, so several ranks need a torch with NCCL")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if Environment().no_peer_access:
        os.environ["NCCL_P2P_DISABLE"] = "1"
    found: dist.ProcessGroup = dist.new_group(backend="nccl", timeout=LIMIT)
    return found


def _without_peer_access(config: ModelConfig) -> str:
    return (
        f"these GPUs cannot reach each other's memory: the {2 * config.num_hidden_layers + 1} messages of a step go "
        "through NCCL, and take 7 us or more each instead of 2; engines of one GPU (--data-parallel-size) need none"
    )
