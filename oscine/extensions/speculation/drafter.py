"""What guesses the next tokens of a sequence: on the host, or on the device."""

from collections.abc import Collection
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from oscine.ops.interface import Batch
from oscine.ops.packed import PackedStep
from oscine.types import NewSequence


class HostDrafter(Protocol):
    """Drafts from tokens that the host knows. It depends on these calls alone: all ranks draft the same."""

    def assign(self, new: NewSequence) -> None:
        """A sequence takes a slot."""
        ...

    def keeps(self, slot: int) -> bool:
        """Whether later drafts depend on what else the sequence of the slot generates, though it may have ended."""
        ...

    def append(self, slot: int, token_ids: list[int]) -> None:
        """Tokens that the sequence has generated since, in order. Those after the one that ends it must be ignored."""
        ...

    def propose(self, slot: int, most: int, forced: list[int]) -> list[int]:
        """Up to `most` tokens, >= 1, that may come next, `forced` first; [] without a good guess."""
        ...


class DeviceDrafter(Protocol):
    """Drafts on the device, which knows tokens that the host does not know yet. Nothing here waits for the device.

    All is queued in the order of the calls. Shape suffixes as in ops/interface.py.
    """

    @property
    def aux_layers(self) -> Collection[int]:
        """Of GptOss.hidden_and_aux."""
        ...

    def assign(self, new: NewSequence) -> None:
        """A sequence takes a slot."""
        ...

    def features(self, streams: dict[int, Tensor]) -> Tensor:
        """[T, H]: what is kept of a step, until it is followed."""
        ...

    def follow(self, packed: PackedStep[Tensor], batch: Batch, features_TH: Tensor, ids_M: Tensor) -> None:
        """After a step of one sampled token per row; ids_M as Ops.accept returns them, of the first rows."""
        ...

    def follow_any(
        self,
        packed: PackedStep[Tensor],
        batch: Batch,
        features_TH: Tensor,
        ids_M: Tensor | None,
        known_S: NDArray[np.int32],
    ) -> None:
        """After any step. known_S: the token after each sequence of the batch, where it samples none."""
        ...

    def draft(self, slots_D: NDArray[np.int64], counts_D: NDArray[np.int64], last_places_D: NDArray[np.int64]) -> None:
        """Writes the next counts_D >= 1 tokens of these sequences to the drafts of BatchState.

        last_places_D: the last position on the pages of each sequence, which only a draft or a later token can have.
        """
        ...

    def run_eagerly(self, sizes: list[int], most_drafts: int) -> None:
        """Runs what `capture` captures, with `most_drafts` drafts, which compiles its kernels. Writes page 0."""
        ...

    def capture(self, sizes: list[int], most_drafts: int) -> None:
        """Captures a CUDA graph for each of these numbers of sequences and each number of drafts. Writes page 0.

        Call run_eagerly first, with the same arguments.
        """
        ...
