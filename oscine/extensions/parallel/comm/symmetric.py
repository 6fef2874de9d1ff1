"""The ranks of one model on the GPUs of one host: a Communicator whose messages go from GPU to GPU, see push.py.

Every rank has one buffer in memory that all others can write. It is cut into named slots that start as zeros:

| name | used by | halves |
|---|---|---|
| embedding | the kernel that embeds tokens | 1 |
| attention | the norm that adds up the partial sums of attention | 1 |
| experts | the norms that add up the partial sums of experts | 1 |
| sum, gather, best | the kernels all_reduce, all_gather and best | 2, used in turns |

A step uses embedding first, then attention and experts in turns, so one half each is enough: a rank sends into one
after it has received in another, and what it received was sent after its slot had been cleared.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from oscine.extensions.parallel.comm import kernels
from oscine.extensions.parallel.comm.collectives import MEETING
from oscine.ops.comm.push import LIMIT_NS
from oscine.ops.comm.sums import row_bytes
from oscine.ops.target import Target

GATHERED = 32 << 20  # bytes of a half of a slot for gathering
LIMIT = 1.5  # seconds that a kernel waits for another rank
START_LIMIT = 120.0  # seconds; ranks may compile a kernel one after the other
CHOSEN = 4096  # rows that can be chosen at once

# From so many bytes on, by the fewest ranks, two shots are used. With two ranks one shot carries as few bytes.
TWO_SHOT_BYTES = {8: 128 << 10, 4: 384 << 10}


def two_shots(num_ranks: int, num_bytes: int) -> bool:
    return next((num_bytes >= least for fewest, least in TWO_SHOT_BYTES.items() if num_ranks >= fewest), False)


class Slots(NamedTuple):
    """One named part of the buffers; see push.py."""

    addresses: tuple[int, ...]
    slot: int  # bytes, as the next
    half: int


class SymmetricCommunicator:
    """Made by all ranks together, of a process group of gloo that has them all.

    max_rows: of a step. hidden: columns of a row that is added up. A kernel that has waited for another rank for too
    long sets `failed`, int32 [1] on the device, and no kernel waits from then on; what they compute is worthless.
    """

    def __init__(
        self, rank: int, num_ranks: int, device: torch.device, group: dist.ProcessGroup, max_rows: int, hidden: int
    ) -> None:
        self.rank, self.num_ranks, self.device, self._group = rank, num_ranks, device, group
        self._options = Target.of(device).launch_options
        self._state = torch.zeros(2, dtype=torch.int32, device=device)
        self.failed = self._state[:1]
        self.set_limit(START_LIMIT)
        rows = max_rows * row_bytes(hidden)
        cells = max(triton.cdiv(rows, kernels.CELL_BYTES), GATHERED // kernels.CELL_BYTES)
        sums = triton.cdiv(rows, kernels.CELL_BYTES) * kernels.CELL_BYTES
        twice = {"sum": sums, "gather": GATHERED, "best": CHOSEN * 8}
        self._turns = {name: torch.zeros(cells, dtype=torch.int32, device=device) for name in twice}
        sizes = [(name, rows, 1) for name in ("embedding", "attention", "experts")]
        self._slots = self._cut([*sizes, *((name, half, 2) for name, half in twice.items())])

    def _cut(self, sizes: list[tuple[str, int, int]]) -> dict[str, Slots]:
        """From (name, bytes of a half, halves)."""
        starts = self._allocate(sum(half * halves for _, half, halves in sizes) * (self.num_ranks - 1))
        found = {}
        for name, half, halves in sizes:
            slot = half * halves
            assert slot < 1 << 31, "places in a slot are int32"
            others = [
                start + slot * (self.rank - (self.rank > other))
                for other, start in enumerate(starts)
                if other != self.rank
            ]
            found[name] = Slots((starts[self.rank], *others), slot, half)
            starts = [start + slot * (self.num_ranks - 1) for start in starts]
        return found

    def _allocate(self, num_bytes: int) -> list[int]:
        """Zeros on each rank. Returns their addresses here, by rank."""
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"  # read at the rendezvous
        import torch.distributed._symmetric_memory as symmetric

        self._memory = symmetric.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._memory.zero_()
        torch.cuda.synchronize(self.device)
        self._handle = symmetric.rendezvous(self._memory, self._group)
        self.barrier()  # all are zeros
        buffers = (self._handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(self.num_ranks))
        return [buffer.data_ptr() for buffer in buffers]

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Of bfloat16 or float32, or of anything on the host."""
        if partial.device.type == "cpu":
            total = partial.clone()
            dist.all_reduce(total, group=self._group)
            return total
        flat = partial.contiguous().view(-1)
        total, most = torch.empty_like(flat), self._slots["sum"].half // flat.itemsize
        for begin in range(0, len(flat), most):
            part = flat[begin : begin + most]
            self._launch(
                kernels.all_reduce_kernel,
                "sum",
                (part, total[begin:], len(part)),
                BLOCK=kernels.CELL_BYTES // flat.itemsize,
                TWO_SHOT=two_shots(self.num_ranks, part.nbytes),
            )
        return total.view_as(partial)

    def all_gather(self, part: Tensor) -> Tensor:
        """Of float32 up to GATHERED bytes in the last dimension, or of anything on the host."""
        if part.device.type == "cpu":
            parts = [torch.empty_like(part) for _ in range(self.num_ranks)]
            dist.all_gather(parts, part.contiguous(), group=self._group)
            return torch.cat(parts, -1)
        columns = part.shape[-1]
        rows, most = part.contiguous().view(-1, columns), GATHERED // (4 * columns)
        found = rows.new_empty(len(rows), columns * self.num_ranks)
        for begin in range(0, len(rows), most):
            some = rows[begin : begin + most]
            self._launch(
                kernels.all_gather_kernel,
                "gather",
                (some, found[begin:], some.numel()),
                COLUMNS=columns,
                BLOCK=kernels.CELL_BYTES // 4,
            )
        return found.view(*part.shape[:-1], -1)

    def best(self, values_N: Tensor, ids_N: Tensor) -> Tensor:
        """Of each row the id of the highest value of all ranks; the lower rank's where they are equal.

        values_N: float32. ids_N: int64, below 2^31 - 1. On the device.
        """
        best_N = torch.empty_like(ids_N)
        assert len(ids_N) <= CHOSEN
        if len(ids_N):
            self._launch(kernels.best_kernel, "best", (values_N, ids_N, best_N, len(ids_N)), BLOCK=kernels.BEST_ROWS)
        return best_N

    def _launch(self, kernel: Any, name: str, arguments: tuple[Any, ...], BLOCK: int, **constants: Any) -> None:
        """The last of the arguments is what is divided into cells of BLOCK."""
        kernel[(triton.cdiv(arguments[-1], BLOCK),)](
            *arguments,
            self._turns[name],
            half=self._slots[name].half,
            BLOCK=BLOCK,
            num_warps=kernels.WARPS,
            **self._places(name),
            **constants,
            **self._options,
        )

    def norm_arguments(self, name: str, num_rows: int, hidden: int) -> dict[str, Any]:
        """Arguments of a kernel that adds up bfloat16 rows in attention or experts."""
        num_bytes = num_rows * row_bytes(hidden)
        assert num_bytes <= self._slots[name].half, "more rows than the communicator was made for"
        return self._places(name) | {"TWO_SHOT": two_shots(self.num_ranks, num_bytes)}

    def _places(self, name: str) -> dict[str, Any]:
        addresses, slot, _ = self._slots[name]
        ranks = {"rank": self.rank, "RANKS": self.num_ranks}
        return {"addresses": addresses, "slot": slot, "state": self._state} | ranks

    def set_limit(self, seconds: float) -> None:
        """How long a kernel waits for other ranks, also in graphs that are captured already."""
        self._state[1:].fill_(max(1, int(seconds * 1e9) // LIMIT_NS))

    def serve(self) -> None:
        torch.cuda.synchronize(self.device)
        self.set_limit(LIMIT)

    @property
    def error(self) -> str | None:
        """Reads `failed` on a stream of its own, so that it does not wait for queued steps."""
        with torch.cuda.stream(torch.cuda.Stream(self.device)):  # type: ignore[no-untyped-call]
            failed = bool(self.failed.item())
        return f"another rank did not answer within {LIMIT:g} s" if failed else None

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Within it kernels wait for no rank, and what they compute is worthless."""
        self.failed.fill_(1)
        yield
        torch.cuda.synchronize(self.device)
        self.barrier()  # no kernel of any rank sends any more
        self._memory.zero_()
        self.failed.zero_()
        torch.cuda.synchronize(self.device)
        self.barrier()

    def barrier(self) -> None:
        """Of the hosts. Raises RuntimeError when a rank does not come."""
        dist.monitored_barrier(self._group, MEETING)
