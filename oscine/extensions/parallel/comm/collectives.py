"""The ranks of one model over torch's process groups: NCCL between GPUs that cannot reach each other's memory.

Each message is a launch of its own, unlike in symmetric.py. NCCL's kernels wait for another rank forever, so a process
that waits for a step watches the other ranks meanwhile.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from oscine.ops.target import best_of_gathered

LIMIT = timedelta(seconds=120)  # of a message; ranks may compile a kernel one after the other
MEETING = timedelta(seconds=600)  # of a barrier of the hosts
_GATHERED = 32 << 20  # bytes per all-gather


class CollectiveCommunicator:
    """Constructed by all ranks together."""

    error: str | None = None  # always: its kernels never time out

    def __init__(self, on_host: dist.ProcessGroup, on_device: dist.ProcessGroup) -> None:
        """Both groups have all ranks. `on_host`: of gloo."""
        self.rank, self.num_ranks = on_host.rank(), on_host.size()
        self._on_host, self._on_device = on_host, on_device

    def all_reduce(self, partial: Tensor) -> Tensor:
        total = partial.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._group(total))
        return total

    def all_gather(self, part: Tensor) -> Tensor:
        columns = part.shape[-1]
        rows = part.contiguous().view(-1, columns)
        found = rows.new_empty(len(rows), self.num_ranks, columns)
        at_once = max(1, _GATHERED // (columns * self.num_ranks * part.itemsize))
        for begin in range(0, len(rows), at_once):
            some, out = rows[begin : begin + at_once], found[begin : begin + at_once]
            parts = some.new_empty(self.num_ranks * len(some), columns)
            dist.all_gather_into_tensor(parts, some, group=self._group(some))
            out.copy_(parts.view(self.num_ranks, len(some), columns).transpose(0, 1))
        return found.view(*part.shape[:-1], self.num_ranks * columns)

    def best(self, values_N: Tensor, ids_N: Tensor) -> Tensor:
        return best_of_gathered(self, values_N, ids_N)

    def barrier(self) -> None:
        """A barrier of the hosts. Raises RuntimeError if a rank does not arrive."""
        dist.monitored_barrier(self._on_host, MEETING)

    def serve(self) -> None:
        """Nothing to do: its kernels have no time limit to arm."""

    def _group(self, tensor: Tensor) -> dist.ProcessGroup:
        return self._on_host if tensor.is_cpu else self._on_device
