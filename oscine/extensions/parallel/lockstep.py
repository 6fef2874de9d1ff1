"""Steps that ranks which share experts run together: each waits for the others at the start of a step."""

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:  # it needs torch
    from oscine.ops.target import Exchange


class Agreed(NamedTuple):
    """A step of all ranks."""

    tokens: tuple[int, ...]  # by rank
    replays: bool  # whether a CUDA graph can run it on every rank


class Clock(Protocol):
    """See oscine.extensions.parallel.clock."""

    @property
    def num_ranks(self) -> int: ...

    @property
    def is_awaited(self) -> bool:
        """Whether other ranks have begun a step that this one has not."""
        ...

    def agree(self, num_tokens: int, replays: bool) -> Agreed:
        """Begins a step. Returns when all ranks have. Raises RankLostError."""
        ...

    def serve(self) -> None:
        """Returns when all ranks have called it. From then on, one that does not come in time is lost."""
        ...

    def fileno(self) -> int:
        """Can be read once another rank has come to a step; see `rest`."""
        ...

    def rest(self) -> None:
        """Forgets what woke this rank. Call it before `is_awaited`, and sleep if that is false."""
        ...


class Lockstep:
    """What the runner uses in each step: the clock, and the exchange of tokens."""

    def __init__(self, clock: Clock, exchange: "Exchange") -> None:
        self.clock, self.exchange = clock, exchange

    @property
    def is_awaited(self) -> bool:
        """Whether other ranks have begun a step that this one has not."""
        return self.clock.is_awaited

    def begin(self, num_tokens: int, replays: bool) -> Agreed:
        """Agrees on a step that has `num_tokens` here, and that a CUDA graph can run here or not; see `pad`."""
        agreed = self.clock.agree(num_tokens, replays)
        if not agreed.replays:
            self.exchange.tokens = agreed.tokens
        return agreed

    def pad(self, num_tokens: int) -> None:
        """The step has as many tokens on every rank: what a CUDA graph holds."""
        self.exchange.tokens = (num_tokens,) * self.clock.num_ranks
