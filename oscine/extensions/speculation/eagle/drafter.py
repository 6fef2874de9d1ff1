"""Drafts by an EAGLE-3 head, on the device. It knows tokens that the host does not know yet.

    follow    after a step of the target: the head's keys and values of all positions of the step
    draft     before a step: K tokens for each sequence, one after the other

Keys and values of the head are one more layer of a page group of the target. At position p they depend on the tokens up
to p + 1. So the last ones of a cached prefix are those of the sequence that it was computed for: drafts may be worse
for it, answers are not. Shape suffixes as in extensions/speculation/ops/interface.py.
"""

from bisect import bisect_left

import numpy as np
import torch
from torch import Tensor

from oscine.executor.batch.copies import upload, upload_into
from oscine.executor.batch.device_state import DeviceState
from oscine.executor.batch.slots import ColumnArray, IntArray
from oscine.extensions.speculation.eagle.head import EagleHead
from oscine.extensions.speculation.ops.interface import DraftState
from oscine.ops.interface import Batch
from oscine.ops.native.recording import Recording
from oscine.ops.packed import ALIGNED, PackedSizes, PackedStep
from oscine.system.collector import paused
from oscine.types import NewSequence

_MAX_RECORDED = 8  # sequences
_PIECE = 2048  # tokens of a prompt whose inputs are made at once: they take more memory than the target's own


class EagleDrafter:
    """A DeviceDrafter of one executor."""

    def __init__(self, head: EagleHead, state: DeviceState, kv_pages: Tensor, group: int, records: bool) -> None:
        """kv_pages: the head's layer, [pages, 2, G, P, D], in the page group with index `group`. `records`: drafts are
        calls of the C library alone, so they are recorded."""
        self._head, self._ops, self._kv_pages, self._group = head, head.draft_ops, kv_pages, group
        self._state, self._device, rows = state, state.device, state.padding_slot + 1
        self._held = DraftState(
            features=torch.zeros(rows, head.config.hidden_size, dtype=head.dtype, device=state.device),
            lens=torch.ones(rows, dtype=torch.int32, device=state.device),
            temperatures=torch.zeros(rows, dtype=torch.float32, device=state.device),
            seeds=torch.zeros(rows, dtype=torch.int64, device=state.device),
        )
        self._records = records
        self._recorded: dict[tuple[int, int], tuple[ColumnArray, Recording]] = {}  # by sequences and drafts
        self._sizes: list[int] = []  # sequences of a graph, ascending
        self._graphs: dict[tuple[int, int], tuple[Tensor, torch.cuda.CUDAGraph]] = {}  # by sequences and drafts

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return self._head.aux_layers

    def assign(self, new: NewSequence) -> None:
        """A sequence takes a slot."""
        self._held.temperatures[new.slot] = new.sampling.temperature
        self._held.seeds[new.slot] = new.sampling.seed

    def features(self, streams: dict[int, Tensor]) -> Tensor:
        """[T, H]: what the head reads of a step."""
        pieces = zip(*(torch.split(stream, _PIECE) for stream in streams.values()), strict=True)
        found = [self._head.features(dict(zip(streams, piece, strict=True))) for piece in pieces]
        return found[0] if len(found) == 1 else torch.cat(found)

    def follow(self, packed: PackedStep[Tensor], batch: Batch, features_TH: Tensor, ids_M: Tensor) -> None:
        """After a step of one sampled token per row; ids_M as Ops.accept returns them, of the first rows."""
        next_ids_M = self._ops.hold(packed, batch, ids_M, features_TH, self._held)
        self._fill(features_TH[: len(ids_M)], next_ids_M, batch)

    def follow_any(
        self, packed: PackedStep[Tensor], batch: Batch, features_TH: Tensor, ids_M: Tensor | None, known_S: ColumnArray
    ) -> None:
        """After any step. known_S: the token after each sequence of the batch, where it samples none."""
        next_ids_T = torch.cat((batch.token_ids_T[1:], batch.token_ids_T[:1]))
        next_ids_T[batch.query_starts_S1[1:].long() - 1] = upload(known_S, self._device).long()
        if ids_M is not None:
            next_ids_M = self._ops.hold(packed, batch, ids_M, features_TH, self._held)
            next_ids_T[packed.logits_rows_N[: len(ids_M)].long()] = next_ids_M
        self._fill(features_TH, next_ids_T, batch)

    def _fill(self, features_TH: Tensor, next_ids_T: Tensor, batch: Batch) -> None:
        slots_T = batch.groups[self._group].slots_T
        for start in range(0, len(features_TH), _PIECE):
            part = slice(start, min(start + _PIECE, len(features_TH)))
            places = batch.positions_T[part], slots_T[part]
            self._head.fill(features_TH[part], next_ids_T[part], *places, self._kv_pages)

    def draft(self, slots_D: IntArray, counts_D: IntArray, last_places_D: IntArray) -> None:
        """As in DeviceDrafter."""
        asked = np.stack((slots_D, counts_D, last_places_D))
        if self._sizes and len(slots_D) <= self._sizes[-1]:
            size = self._sizes[bisect_left(self._sizes, len(slots_D))]
            steps, graph = self._graphs[size, int(counts_D.max())]
            upload_into(steps, _pack(*np.pad(asked, ((0, 0), (0, size - len(slots_D))), "edge")))
            graph.replay()
        elif self._records and len(slots_D) <= _MAX_RECORDED:
            self._draft_recorded(_pack(*asked), len(slots_D))
        else:
            self._draft(upload(_pack(*asked), self._device), len(slots_D))

    @torch.inference_mode()
    def run_eagerly(self, sizes: list[int], most_drafts: int) -> None:
        """As in DeviceDrafter."""
        for size in sorted(sizes, reverse=True):
            self._draft(self._blank(size, most_drafts), size)

    @torch.inference_mode()
    def capture(self, sizes: list[int], most_drafts: int) -> None:
        """As in DeviceDrafter."""
        pool = torch.cuda.graph_pool_handle()
        with paused():
            for size in sorted(sizes, reverse=True):
                for num_drafts in range(most_drafts, 0, -1):
                    steps, graph = self._blank(size, num_drafts), torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, pool=pool):
                        self._draft(steps, size)
                    self._graphs[size, num_drafts] = steps, graph
        self._sizes = sorted(sizes)

    def _blank(self, size: int, num_drafts: int) -> Tensor:
        """Drafts at position 0 of slot 0."""
        zeros = np.zeros(size, np.int64)
        return upload(_pack(zeros, zeros + num_drafts, zeros), self._device)

    def _draft_recorded(self, steps: ColumnArray, count: int) -> None:
        key = count, len(steps)
        recorded = self._recorded.get(key)
        if recorded is not None:
            recorded[0][:] = steps
            recorded[1].run()
            return
        with (recording := Recording()):
            self._draft(torch.from_numpy(steps), count)
        self._recorded[key] = steps, recording

    def _draft(self, steps: Tensor, count: int) -> None:
        """One packed step per draft, of so many sequences."""
        sizes = PackedSizes(count, count, count, count)
        features_DH: Tensor | None = None
        for place, flat in enumerate(steps.unbind(0)):
            packed = PackedStep.of(flat, sizes)
            batch = self._state.batch(packed, sizes.sequences, all_rows=True, lens=self._held.lens)
            slots_D, group = packed.slots_S, batch.groups[self._group]
            if features_DH is None:
                features_DH = self._ops.held(slots_D, self._held)
            drafted = self._head.step(features_DH, batch.token_ids_T, batch, group, self._kv_pages)
            noise = self._ops.sampling(slots_D, batch.positions_T, self._held)
            self._ops.put(self._state.drafts, place, slots_D, self._head.choose(drafted.normed_TH, noise))
            features_DH = drafted.feature_TH


def _pack(slots_D: IntArray, counts_D: IntArray, last_places_D: IntArray) -> ColumnArray:
    """[drafts, aligned size of a packed step]: the j-th reads the token sampled last, or the draft before.

    A sequence with fewer drafts than others may have no page for theirs. It then computes any token at its last place,
    whose keys and values are written anew before they are read.
    """
    count = len(slots_D)
    sizes = PackedSizes(count, count, count, count)
    steps = np.zeros((counts_D.max(), -(-sizes.total // ALIGNED) * ALIGNED), np.int32)
    for place, flat in enumerate(steps):
        packed = PackedStep.of(flat, sizes)
        packed.given_T[:] = np.where(place < counts_D, -1 - place, 0)
        packed.positions_T[:] = last_places_D
        packed.token_slots_T[:] = packed.slots_S[:] = packed.sampled_slots_M[:] = slots_D
        packed.query_starts_S1[:] = np.arange(count + 1)
        packed.logits_rows_N[:] = np.arange(count)
    return steps
