"""Drafts: guesses of the next tokens of a sequence, so that a step can verify several at once. The seam of the runner.

Who drafts is an extension (oscine/extensions/speculation). Steps know how drafts are verified: StepArrays, Rows.
"""

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from torch import Tensor

from oscine.executor.batch.device_state import DeviceState
from oscine.executor.batch.slots import IntArray, Slots
from oscine.executor.batch.step_arrays import StepArrays
from oscine.executor.known import KnownTokens
from oscine.executor.sampling.rules import Rules
from oscine.ops.interface import Batch
from oscine.ops.packed import PackedStep
from oscine.types import NewSequence, StepPlan


class Drafts(NamedTuple):
    """What the sequences of a plan verify."""

    counts: list[int]  # per sequence
    ids: Callable[[], IntArray]  # per row of StepArrays; anything in rows that compute no draft; may wait


class NoDrafts:
    """A runner without drafts, and the base of those with drafts. A runner calls these in each step, in this order."""

    aux_layers: Collection[int] = ()  # of GptOss.hidden_and_aux, what a head on the device reads; empty: there is none

    def before_placing(self, plan: StepPlan) -> Drafts | None:
        """The drafts to verify. Slots are still those of the step before. May wait for its tokens."""
        return None

    def ends(self, new: list[NewSequence]) -> None:
        """New sequences take these slots: the last moment to read the tokens of those that had them."""

    def assign(self, new: NewSequence) -> None:
        """A sequence takes a slot."""

    def after_placing(self, plan: StepPlan) -> Drafts | None:
        """The drafts to verify, where before_placing gave none. Pages are in place. Does not wait."""
        return None

    def follows(self, plan: StepPlan, step: StepArrays) -> bool:
        """Whether the head follows this step."""
        return False

    def features(self, streams: dict[int, Tensor]) -> Tensor:
        """[T, H]: what is kept of a step, until the head has followed it."""
        raise NotImplementedError

    def follow(self, packed: PackedStep[Tensor], batch: Batch, features_TH: Tensor, ids_M: Tensor) -> None:
        """After a step of one sampled token per row; ids_M as Ops.accept returns them, of the first rows."""

    def follow_any(
        self, packed: PackedStep[Tensor], batch: Batch, features_TH: Tensor, ids_M: Tensor | None, step: StepArrays
    ) -> None:
        """After any step."""

    def append(self, slot: int, token_ids: list[int]) -> None:
        """Tokens that the sequence of a slot has generated, in order, once they are read."""

    def run_eagerly(self, decode_sizes: Sequence[int]) -> None:
        """Runs what `capture` captures, which compiles its kernels. Writes page 0."""

    def capture(self, decode_sizes: Sequence[int]) -> None:
        """Captures CUDA graphs of drafts for these sizes of decode steps. Call run_eagerly first. Writes page 0."""


class StepParts(NamedTuple):
    """Parts of a runner that drafts need."""

    state: DeviceState
    slots: Slots
    known: KnownTokens
    rules: Rules
    page_size: int  # tokens


MakeDrafts = Callable[[StepParts], NoDrafts]


def no_drafts(parts: StepParts) -> NoDrafts:
    return NoDrafts()
