"""Steps that several engines run together: the seam of the runner. Who meets whom is an extension."""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from torch import Tensor

from oscine.ops.target import Exchange


class Agreed(NamedTuple):
    """A step of all ranks."""

    tokens: tuple[int, ...]  # by rank
    replays: bool  # whether a CUDA graph can run it on every rank


class OwnSteps:
    """The steps of an engine that shares no experts, and the base of those that are shared."""

    shares_experts = False
    exchange: Exchange | None = None  # of tokens between the ranks

    @property
    def failed(self) -> Tensor | None:
        """On the device: not zero if another rank did not come in time."""
        return None

    @property
    def is_awaited(self) -> bool:
        """Whether other ranks have begun a step that this one has not."""
        return False

    def begin(self, num_tokens: int, replays: bool) -> Agreed:
        """Agrees on a step that has `num_tokens` here, and that a CUDA graph can run here or not; see `pad`."""
        return Agreed((num_tokens,), replays)

    def pad(self, num_tokens: int) -> None:
        """The step has as many tokens on every rank: what a CUDA graph holds."""

    def least_of_all(self, number: int) -> int:
        """The least number of all ranks. They call it together, on GPUs."""
        return number

    def rehearsal(self) -> AbstractContextManager[None]:
        """Meanwhile this rank runs steps that others do not take part in."""
        return nullcontext()

    def serve(self) -> None:
        """Returns when all ranks are ready."""
