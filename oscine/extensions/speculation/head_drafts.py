"""Drafts of a step, made by a head on the device. It knows tokens that the host does not know yet."""

from collections.abc import Sequence
from functools import cache

import numpy as np
from torch import Tensor

from oscine.executor.batch.copies import Mark, download
from oscine.executor.batch.slots import ColumnArray, IntArray
from oscine.executor.batch.step_arrays import StepArrays
from oscine.executor.drafts import Drafts, NoDrafts, StepParts
from oscine.extensions.speculation.drafter import DeviceDrafter
from oscine.ops.interface import Batch
from oscine.ops.packed import PackedStep
from oscine.types import NewSequence, StepPlan

_MAX_DRAFTING = 512  # sequences that draft in one CUDA graph
_FEW_DRAFTING = 64  # up to here there are such graphs of all sizes, above in multiples of it


class HeadDrafts(NoDrafts):
    def __init__(self, drafter: DeviceDrafter, most_drafts: int, parts: StepParts) -> None:
        """`most_drafts`: of a sequence in a step."""
        self._drafter, self._most_drafts, self.aux_layers = drafter, most_drafts, drafter.aux_layers
        self._state, self._slots, self._page_size = parts.state, parts.slots, parts.page_size
        # By slot: the last step did not fill the head's layer.
        self._is_behind = np.zeros(parts.state.padding_slot + 1, np.bool_)

    def assign(self, new: NewSequence) -> None:
        self._drafter.assign(new)

    def after_placing(self, plan: StepPlan) -> Drafts | None:
        """A sequence has no drafts in the first step after plain ones."""
        if not any(sequence.num_drafts for sequence in plan.sequences):
            return None
        counts = [0 if self._is_behind[sequence.slot] else sequence.num_drafts for sequence in plan.sequences]
        if not any(counts):
            return None
        slots_D = np.array([s.slot for s, count in zip(plan.sequences, counts, strict=True) if count], np.int64)
        last_places_D = self._slots.num_pages[slots_D] * self._page_size - 1
        self._drafter.draft(slots_D, np.array([count for count in counts if count], np.int64), last_places_D)
        told = download(self._state.drafts[:, : max(counts)])
        made = Mark(self._state.device)

        def ids() -> IntArray:
            made.wait()
            found = [(0, *told[s.slot, :n].tolist()) for s, n in zip(plan.sequences, counts, strict=True)]
            return np.array([id for ids in found for id in ids], np.int64)

        return Drafts(counts, cache(ids))

    def follows(self, plan: StepPlan, step: StepArrays) -> bool:
        """Unless all its sequences decode and none may have drafts."""
        decodes = not plan.new and step.num_decodes == len(step.slots_S)
        follows = not decodes or any(sequence.num_drafts for sequence in plan.sequences)
        self._is_behind[step.slots_S] = not follows
        return follows

    def features(self, streams: dict[int, Tensor]) -> Tensor:
        return self._drafter.features(streams)

    def follow(self, packed: PackedStep[Tensor], batch: Batch, features_TH: Tensor, ids_M: Tensor) -> None:
        self._drafter.follow(packed, batch, features_TH, ids_M)

    def follow_any(
        self, packed: PackedStep[Tensor], batch: Batch, features_TH: Tensor, ids_M: Tensor | None, step: StepArrays
    ) -> None:
        self._drafter.follow_any(packed, batch, features_TH, ids_M, self._known_next(step))

    def run_eagerly(self, decode_sizes: Sequence[int]) -> None:
        self._drafter.run_eagerly(self._sizes(decode_sizes), self._most_drafts)

    def capture(self, decode_sizes: Sequence[int]) -> None:
        self._drafter.capture(self._sizes(decode_sizes), self._most_drafts)

    def _sizes(self, decode_sizes: Sequence[int]) -> list[int]:
        """How many sequences draft in each graph."""
        most = min(_MAX_DRAFTING, self._state.padding_slot)
        sizes = [size for size in decode_sizes if size <= _FEW_DRAFTING or size % _FEW_DRAFTING == 0]
        return [*(size for size in sizes if size < most), most]

    def _known_next(self, step: StepArrays) -> ColumnArray:
        """[S]: the token after each sequence of the step, where the host knows it; else 0."""
        known_S = np.zeros(len(step.slots_S), np.int32)
        for i in (step.ends_S < self._slots.num_given[step.slots_S]).nonzero()[0].tolist():
            end = int(step.ends_S[i])
            known_S[i] = self._slots.given(int(step.slots_S[i]), end, end + 1)[0]
        return known_S
