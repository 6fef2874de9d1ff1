"""The model over its cache: a packed step in, the input of the head out."""

from torch import Tensor

from oscine.executor.batch.device_state import Computed, DeviceState
from oscine.executor.drafts import NoDrafts
from oscine.executor.lockstep import OwnSteps
from oscine.model.gpt_oss import GptOss
from oscine.ops.interface import Batch, KVCache
from oscine.ops.packed import PackedStep


class Forward:
    def __init__(self, model: GptOss, kv: KVCache, state: DeviceState, steps: OwnSteps, drafts: NoDrafts) -> None:
        self._model, self._kv, self._state, self._steps, self._drafts = model, kv, state, steps, drafts

    def decode(self, packed: PackedStep[Tensor], *, follows: bool = False) -> Computed:
        """One token per sequence: a CUDA graph. `follows`: a draft head does."""
        self._steps.pad(len(packed.slots_S))
        batch = self._state.batch(packed, len(packed.slots_S), all_rows=True)
        return Computed(packed, batch, *self._hidden(batch, follows))

    def decode_followed(self, packed: PackedStep[Tensor]) -> Computed:
        return self.decode(packed, follows=True)

    def prompts(self, packed: PackedStep[Tensor]) -> Computed:
        """Any step, as a CUDA graph. The last sequence is padding."""
        batch = self._state.batch(packed, len(packed.slots_S) - 1, counted=True)
        return Computed(packed, batch, *self._hidden(batch, follows=True))

    def any(self, packed: PackedStep[Tensor], num_decodes: int, *, follows: bool) -> Computed:
        """Any step. `num_decodes` as in Batch."""
        batch = self._state.batch(packed, num_decodes)
        return Computed(packed, batch, *self._hidden(batch, follows))

    def _hidden(self, batch: Batch, follows: bool) -> tuple[Tensor, Tensor | None]:
        """The input of the head [N, H], and what a draft head reads [T, H]."""
        if not (follows and self._drafts.aux_layers):
            return self._model.hidden(batch, self._kv), None
        x_NH, streams = self._model.hidden_and_aux(batch, self._kv, self._drafts.aux_layers)
        return x_NH, self._drafts.features(streams)
