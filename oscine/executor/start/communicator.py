"""The communicator of one rank, by the device that its model is on."""

import os
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from oscine.config import EngineOptions
from oscine.model.opened import OpenedModel
from oscine.ops.comm.host import HostCommunicator
from oscine.ops.target import Communicator

MakeCommunicator = Callable[[OpenedModel], Communicator]
_MEETING = timedelta(seconds=600)  # that one rank may take longer to start than another


def between_ranks(host: HostCommunicator, store: int, options: EngineOptions) -> MakeCommunicator:
    """All ranks make theirs together. `host`: through memory of the machine, for a CPU. `store`: descriptor of an empty
    file that they share, in which GPUs find each other."""

    def make(opened: OpenedModel) -> Communicator:
        if opened.device.type == "cpu":
            return host
        from oscine.ops.comm.symmetric import SymmetricCommunicator

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        place = host.rank, host.num_ranks
        file = dist.FileStore(f"/proc/self/fd/{store}", host.num_ranks)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=file, rank=host.rank, world_size=host.num_ranks, timeout=_MEETING)
        group = dist.group.WORLD
        assert group is not None
        most_rows = options.scheduler.max_num_batched_tokens
        return SymmetricCommunicator(*place, opened.device, group, most_rows, opened.config.hidden_size)

    return make
