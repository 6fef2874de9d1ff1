"""The model over its cache: a packed step in, the input of the head out."""

from torch import Tensor

from oscine.executor.adapters import NoAdapters
from oscine.executor.batch.device_state import Computed, DeviceState
from oscine.executor.drafts import NoDrafts
from oscine.executor.lockstep import OwnSteps
from oscine.model.gpt_oss import GptOss
from oscine.ops.interface import Batch, KVCache
from oscine.ops.packed import PackedStep


class Forward:
    def __init__(
        self,
        model: GptOss,
        kv: KVCache,
        state: DeviceState,
        steps: OwnSteps,
        drafts: NoDrafts,
        adapters: NoAdapters,
    ) -> None:
        self._model, self._kv, self._state, self._steps, self._drafts = model, kv, state, steps, drafts
        self._adapters, self._adapted = adapters, adapters.adapted(model)

    def decode(self, packed: PackedStep[Tensor], *, follows: bool = False, adapted: bool = False) -> Computed:
        """One token per sequence: a CUDA graph. `follows`: a draft head does. `adapted`: sequences may have adapters,
        here and below."""
        self._steps.pad(len(packed.slots_S))
        batch = self._state.batch(packed, len(packed.slots_S), all_rows=True)
        return Computed(packed, batch, *self._hidden(packed, batch, follows, adapted))

    def decode_followed(self, packed: PackedStep[Tensor]) -> Computed:
        return self.decode(packed, follows=True)

    def decode_adapted(self, packed: PackedStep[Tensor]) -> Computed:
        return self.decode(packed, follows=True, adapted=True)

    def prompts(self, packed: PackedStep[Tensor], *, adapted: bool = False) -> Computed:
        """Any step, as a CUDA graph. The last sequence is padding."""
        batch = self._state.batch(packed, len(packed.slots_S) - 1, counted=True)
        return Computed(packed, batch, *self._hidden(packed, batch, True, adapted))

    def prompts_adapted(self, packed: PackedStep[Tensor]) -> Computed:
        return self.prompts(packed, adapted=True)

    def any(self, packed: PackedStep[Tensor], num_decodes: int, *, follows: bool, adapted: bool) -> Computed:
        """Any step, eagerly. `num_decodes` as in Batch. Steps with prompts use the kernel variants of their graphs."""
        batch = self._state.batch(packed, num_decodes, counted=num_decodes < len(packed.slots_S))
        return Computed(packed, batch, *self._hidden(packed, batch, follows, adapted))

    def _hidden(
        self, packed: PackedStep[Tensor], batch: Batch, follows: bool, adapted: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The input of the head [N, H], and what a draft head reads [T, H]."""
        model = self._adapted if adapted else self._model
        added = self._adapters.of_step(packed.token_slots_T) if adapted else None
        if not (follows and self._drafts.aux_layers):
            return model.hidden(batch, self._kv, added), None
        x_NH, streams = model.hidden_and_aux(batch, self._kv, self._drafts.aux_layers, added)
        return x_NH, self._drafts.features(streams)
