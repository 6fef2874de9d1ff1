"""Decode steps as CUDA graphs: captured once for some sizes, then replayed with one launch instead of hundreds.

Knows sizes and addresses; nothing of what a step computes. A size has two graphs. The first computes the last
activations. The second chooses tokens; only greedy steps use it. They read one array of int32 at a fixed address, and
the persistent state that their bodies read. A step of n sequences runs in the next larger graph, filled up with copies
of its first sequence. Copies write the same values to the same places as the first sequence, and choose its experts.

All graphs share one memory pool, and only one of them runs at a time. So the results of a graph are valid until the
next replay is queued.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from oscine.collector import paused
from oscine.executor.slots import ColumnArray
from oscine.executor.step_batch import StepArrays
from oscine.executor.transfer import upload_into
from oscine.ops.interface import Batch
from oscine.ops.packed import PackedSizes, PackedStep


class Computed(NamedTuple):
    """A step of one token per sequence, up to the choice of the next ones."""

    packed: PackedStep[Tensor]  # on the device
    batch: Batch
    x_SH: Tensor  # what the head takes
    features_TH: Tensor | None = None  # what a draft head reads


Forward = Callable[[PackedStep[Tensor]], Computed]  # must be capturable, as the next
Choose = Callable[[Computed], Tensor]  # token ids [S], as Ops.accept returns them


@dataclass(frozen=True, slots=True)
class _Captured:
    forward: torch.cuda.CUDAGraph
    choice: torch.cuda.CUDAGraph
    computed: Computed  # its input is at the fixed address
    ids_S: Tensor


class CudaGraphs:
    def __init__(self, forward: Forward, choose: Choose, device: torch.device) -> None:
        self._forward, self._choose = forward, choose
        self._device = device
        self._sizes: list[int] = []  # ascending
        self._captured: dict[int, _Captured] = {}
        self._input = torch.empty(0, dtype=torch.int32, device=device)

    @torch.inference_mode()
    def run_eagerly(self, sizes: list[int]) -> None:
        """What would be captured, largest size first: compiles kernels and takes memory."""
        for size in sorted(sizes, reverse=True):
            self._choose(self._forward(self._blank(size)))

    @torch.inference_mode()
    def capture(self, sizes: list[int]) -> None:
        """Largest first: the smaller ones then find room in what it has taken. All kernels must be compiled."""
        assert not self._captured
        self._sizes = sorted(sizes)
        pool = torch.cuda.graph_pool_handle()
        with paused():  # the end of an older graph, one that is garbage, would break a capture
            for size in reversed(self._sizes):
                packed = self._blank(size)
                forward, choice = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
                with torch.cuda.graph(forward, pool=pool):
                    computed = self._forward(packed)
                with torch.cuda.graph(choice, pool=pool):
                    ids_S = self._choose(computed)
                self._captured[size] = _Captured(forward, choice, computed, ids_S)
        torch.cuda.synchronize(self._device)

    def _blank(self, size: int) -> PackedStep[Tensor]:
        """A step of token 0 at position 0 of slot 0, at the fixed address."""
        if len(self._input) < _sizes_of(size).total:
            assert not self._captured, "graphs hold the address"
            self._input = torch.empty(_sizes_of(size).total, dtype=torch.int32, device=self._device)
        self._input.zero_()
        packed = PackedStep.of(self._input, _sizes_of(size))
        torch.arange(size + 1, out=packed.query_starts_S1)
        torch.arange(size, out=packed.logits_rows_N)
        return packed

    def fits(self, step: StepArrays) -> bool:
        """Whether the step is one sampled token a sequence, and not of more sequences than any graph."""
        return (
            bool(self._sizes)
            and len(step.slots_S) <= self._sizes[-1]
            and bool((step.lens_S == 1).all())
            and bool(step.samples_S.all())
        )

    @property
    def fits_padding(self) -> bool:
        """Whether a step without sequences can be one of padding only."""
        return bool(self._sizes)

    def size_of(self, num_sequences: int) -> int:
        """Of the graph that runs as many."""
        return self._sizes[bisect_left(self._sizes, num_sequences)]

    def replay(self, packed: tuple[ColumnArray, PackedSizes]) -> Computed:
        """Queues a padded step."""
        flat, sizes = packed
        upload_into(self._input, flat)
        captured = self._captured[sizes.sequences]
        captured.forward.replay()
        return captured.computed

    def replay_choice(self, size: int) -> Tensor:
        """Queues the choice after a step that was padded to this size. Returns its token ids."""
        captured = self._captured[size]
        captured.choice.replay()
        return captured.ids_S


def _sizes_of(size: int) -> PackedSizes:
    return PackedSizes(tokens=size, sequences=size, logits_rows=size, sampled=size)
