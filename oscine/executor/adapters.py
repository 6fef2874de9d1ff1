"""Low-rank adapters of sequences: the seam of the runner. An extension has them (oscine/extensions/adapters)."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from oscine.executor.batch.slots import IntArray
from oscine.model.gpt_oss import GptOss
from oscine.ops.interface import AddedLayer, Ops
from oscine.types import AdapterChange, NewSequence


class NoAdapters:
    """Of a runner without adapters, and the base of those with some."""

    host: Any = None  # the adapters in host memory, where there are any

    def change(self, changes: Sequence[AdapterChange]) -> None:
        """Adapters come into host memory, or go. Does not wait."""

    def assign(self, new: NewSequence) -> None:
        """A sequence takes a slot. Its adapter is brought to the device."""

    def are_used(self, slots_S: IntArray) -> bool:
        """Whether a sequence in one of these slots has an adapter."""
        return False

    def adapted(self, model: GptOss) -> GptOss:
        """The model for steps with adapters."""
        return model

    def of_step(self, token_slots_T: Tensor) -> Sequence[AddedLayer]:
        """What adapters add to the layers of a step whose tokens are of the sequences in these slots."""
        raise NotImplementedError

    def of_layers(self, layers: Sequence[int]) -> "NoAdapters":
        """Of a model of these layers, to rehearse. It shares the memory on the device."""
        return self


class Adapting:
    """What the start of an executor asks of the extension: of a model without adapters, and the base of those with
    some."""

    num_bytes = 0  # on the device
    is_on = False
    reads_choice = False  # whether adapters change the router

    def load(self, model: GptOss, ops: Ops, num_seqs: int) -> NoAdapters:
        """Allocates memory on the device. `ops`: those of steps with adapters. `num_seqs`: that run at once."""
        return NoAdapters()


# Its argument is the Start of executor/start/shared.py. Raises ValueError for options that do not go together.
MakeAdapting = Callable[[Any], Adapting]
