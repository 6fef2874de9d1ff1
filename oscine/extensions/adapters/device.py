"""The adapters on the device: a number of slots of equal size, and the slot of each running sequence."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from oscine.executor.adapters import NoAdapters
from oscine.executor.batch.copies import Mark
from oscine.executor.batch.slots import IntArray
from oscine.extensions.adapters.host import HostAdapter, HostAdapters
from oscine.extensions.adapters.layout import Layout
from oscine.extensions.adapters.products import Backend
from oscine.extensions.adapters.steps import Layer
from oscine.model.gpt_oss import GptOss
from oscine.ops.interface import AddedLayer, Ops
from oscine.types import AdapterChange, AdapterPlace, NewSequence


class DeviceAdapters(NoAdapters):
    def __init__(
        self, host: HostAdapters, layout: Layout, memory: Tensor, num_seqs: int, backend: Backend, ops: Ops
    ) -> None:
        """`memory` [slots, layout.size]: of the dtype of the activations. `ops`: of steps with adapters."""
        self.host = host
        self._layout, self._memory, self._backend, self._ops = layout, memory, backend, ops
        self._there = [-1] * len(memory)  # number of the adapter in each slot
        self._leaving: list[tuple[HostAdapter, Mark]] = []  # that the device may still copy from host memory
        self._of_sequences = np.full(num_seqs + 1, -1, np.int64)  # slot of the adapter of the sequence in each slot
        # The same on the device; the last row is of the padding slot.
        self._slots = torch.full((num_seqs + 1,), -1, dtype=torch.int32, device=memory.device)
        queries, keys, values = layout.qkv_rows
        self._ends = queries, queries + keys, queries + keys + values
        self._factors = [self._factors_of(layer) for layer in range(len(layout.layers))]

    def _factors_of(self, layer: int) -> dict[str, Tensor]:
        views = {name: self._layout.view(self._memory, layer, name) for name in self._layout.layers[layer]}
        return {name: view for name, view in views.items() if view is not None}

    def change(self, changes: Sequence[AdapterChange]) -> None:
        for number, path in changes:
            if path is None:
                self.host.drop(number)
            else:
                self.host.begin(number, path)

    def assign(self, new: NewSequence) -> None:
        if self._leaving:
            self._leaving = [(adapter, mark) for adapter, mark in self._leaving if not mark.passed]
        slot = -1 if new.adapter is None else new.adapter.slot
        if new.adapter is not None:
            self._bring(new.adapter)
        if self._of_sequences[new.slot] != slot:
            self._of_sequences[new.slot] = slot
            self._slots[new.slot].fill_(slot)

    def _bring(self, place: AdapterPlace) -> None:
        """Queues the copy of an adapter, unless it is there. No earlier step that still runs reads the slot's former
        one: the copy comes after it."""
        if place.number < 0 or self._there[place.slot] == place.number:
            return
        adapter, start = self.host.get(place.number), 0
        for piece in adapter.pieces:
            self._memory[place.slot, start : start + len(piece)].copy_(piece, non_blocking=True)
            start += len(piece)
        self._there[place.slot] = place.number
        self._leaving.append((adapter, Mark(self._memory.device)))

    def are_used(self, slots_S: IntArray) -> bool:
        return bool((self._of_sequences[slots_S] >= 0).any())

    def adapted(self, model: GptOss) -> GptOss:
        return model.with_ops(self._ops)

    def of_step(self, token_slots_T: Tensor) -> Sequence[AddedLayer]:
        rows = self._backend.rows(self._slots[token_slots_T.long()], len(self._memory))
        return [Layer(self._backend, rows, factors, self._ends) for factors in self._factors]

    def of_layers(self, layers: Sequence[int]) -> NoAdapters:
        others = self._memory, len(self._slots) - 1, self._backend, self._ops
        return DeviceAdapters(self.host, self._layout.of_layers(layers), *others)
