"""Steps as CUDA graphs: captured once for some sizes, then replayed with one launch instead of hundreds.

Knows sizes and addresses; nothing of what a step computes. A graph reads one array of int32 at a fixed address, and the
persistent state that its body reads. All graphs share one memory pool, and only one of them runs at a time. So the
results of a graph are valid until the next replay is queued.

Decode steps, of one token per sequence, have two graphs for some numbers of sequences. The first computes the last
activations. The second chooses tokens; only greedy steps use it. A step of n sequences runs in the next larger graph,
filled up with copies of its first sequence. Copies write the same values to the same places as the first sequence, and
choose its experts.

Steps with prompts have a graph for some numbers of tokens; up to some 2,000 their launches take longer than their work.
Any sequences fit that are not more than there is room for: whole prompts, chunks, decodes, drafts. Attention reads on
the device how many are decodes. One sequence of the padding slot takes all tokens that are left, and further sequences
are empty:

    decode | decode | 300 tokens of a prompt | 18 tokens of padding | empty | ...

Each token of padding stands at position 0. So it writes the padding page, and all of them choose the same experts. Such
a step samples after the replay, while the GPU still computes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oscine.executor.batch.copies import upload_into
from oscine.executor.batch.device_state import Computed
from oscine.executor.batch.slots import ColumnArray, Slots
from oscine.executor.batch.step_arrays import StepArrays, pack
from oscine.ops.interface import PageGroup
from oscine.ops.packed import PackedSizes, PackedStep
from oscine.system.collector import paused
from oscine.timing.kinds import EAGER, decode_size, prompt_size

Forward = Callable[[PackedStep[Tensor]], Computed]  # must be capturable, as the next
Choose = Callable[[Computed], Tensor]  # token ids [S], as Ops.accept returns them


@dataclass(frozen=True, slots=True)
class _Captured:
    forward: torch.cuda.CUDAGraph
    choice: torch.cuda.CUDAGraph
    computed: Computed  # its input is at the fixed address
    ids_S: Tensor


class DecodeGraphs:
    def __init__(self, forward: Forward, choose: Choose, device: torch.device) -> None:
        self._forward, self._choose = forward, choose
        self._device = device
        self.sizes: list[int] = []  # ascending
        self._captured: dict[int, _Captured] = {}
        self._input = torch.empty(0, dtype=torch.int32, device=device)

    @torch.inference_mode()
    def run_eagerly(self, sizes: Sequence[int]) -> None:
        """What would be captured, largest size first: compiles kernels and takes memory."""
        for size in sorted(sizes, reverse=True):
            self._choose(self._forward(self._blank(size)))

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], pool: Any = None) -> None:
        """Largest first: the smaller ones then find room in what it has taken. All kernels must be compiled.

        `pool`: torch's handle of the memory of other graphs, which run at other times.
        """
        assert not self._captured
        self.sizes = sorted(sizes)
        pool = pool or torch.cuda.graph_pool_handle()
        with paused():  # the end of an older graph, one that is garbage, would break a capture
            for size in reversed(self.sizes):
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
            decode_size(self.sizes, len(step.slots_S)) != EAGER
            and bool((step.lens_S == 1).all())
            and bool(step.samples_S.all())
        )

    @property
    def fits_padding(self) -> bool:
        """Whether a step without sequences can be one of padding only."""
        return bool(self.sizes)

    def size_of(self, num_sequences: int) -> int:
        """Of the graph that runs as many."""
        return decode_size(self.sizes, num_sequences)

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


class PromptGraphs:
    def __init__(self, forward: Forward, padding_slot: int, device: torch.device) -> None:
        """`forward`: of any step; all that it reads on the host are the sizes of the packed step."""
        self._forward, self._padding_slot, self._device = forward, padding_slot, device
        self.sizes: list[int] = []  # tokens, ascending
        self.room = 0  # sequences
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Computed]] = {}
        self._input = torch.empty(0, dtype=torch.int32, device=device)

    @torch.inference_mode()
    def run_eagerly(self, sizes: Sequence[int], room: int) -> None:
        """What would be captured, largest size first: compiles kernels and takes memory. Writes the padding page."""
        self.room = room
        for size in sorted(sizes, reverse=True):
            self._forward(self._blank(size))

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], room: int, pool: Any = None) -> None:
        """`sizes`: numbers of tokens. `room`: for sequences. `pool`: as in DecodeGraphs. All kernels must be
        compiled."""
        assert not self._captured
        self.sizes, self.room = sorted(sizes), room
        with paused():
            for size in reversed(self.sizes):
                packed, graph = self._blank(size), torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool):
                    computed = self._forward(packed)
                self._captured[size] = graph, computed
        torch.cuda.synchronize(self._device)

    def size_of(self, step: StepArrays) -> int | None:
        """The tokens of the smallest graph that has room for the step; None: it must run eagerly."""
        return prompt_size(self.sizes, self.room, step.num_tokens, len(step.slots_S)) or None

    def replay(self, step: StepArrays, slots: Slots, size: int) -> Computed:
        """Queues a step. What it returns has no padding."""
        flat, _ = self._pack(step, slots, size)
        upload_into(self._input, flat)
        graph, computed = self._captured[size]
        graph.replay()
        return _first(computed, step)

    def _pack(self, step: StepArrays, slots: Slots, size: int) -> tuple[ColumnArray, PackedSizes]:
        rows_N = np.zeros(min(size, self.room), np.int64)
        slots_M = np.full(len(rows_N), self._padding_slot)
        count = np.count_nonzero(step.samples_S)
        rows_N[:count], slots_M[:count] = step.sampled_rows, step.slots_S[step.samples_S]
        return pack(step.filled(size, len(rows_N) + 1, self._padding_slot), slots, rows_N, slots_M)

    def _blank(self, size: int) -> PackedStep[Tensor]:
        """A step of padding, at the fixed address."""
        flat, sizes = self._pack(StepArrays.of_padding(self._padding_slot), Slots(self._padding_slot + 1), size)
        if len(self._input) < len(flat):
            assert not self._captured, "graphs hold the address"
            self._input = torch.empty(len(flat), dtype=torch.int32, device=self._device)
        upload_into(self._input, flat)
        return PackedStep.of(self._input, sizes)


def _first(computed: Computed, step: StepArrays) -> Computed:
    """The results for the step alone, which comes before its padding."""
    packed, batch, x_NH, features_TH = computed
    tokens, sequences, rows = step.num_tokens, len(step.slots_S), np.count_nonzero(step.samples_S)
    ends = tokens, tokens, tokens, sequences, sequences + 1, rows, rows, 2
    groups = (PageGroup(group.page_table_SB[:sequences], group.slots_T[:tokens]) for group in batch.groups)
    assert batch.logits_rows_N is not None
    return Computed(
        PackedStep(*(column[:end] for column, end in zip(packed, ends, strict=True))),
        replace(
            batch,
            token_ids_T=batch.token_ids_T[:tokens],
            positions_T=batch.positions_T[:tokens],
            query_starts_S1=batch.query_starts_S1[: sequences + 1],
            context_lens_S=batch.context_lens_S[:sequences],
            groups=tuple(groups),
            logits_rows_N=batch.logits_rows_N[:rows],
            num_decodes=0,
            counts_2=None,
        ),
        x_NH[:rows],
        None if features_TH is None else features_TH[:tokens],
    )
