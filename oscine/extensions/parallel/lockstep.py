"""Steps that ranks which share experts run together: each waits for the others at the start of a step."""

from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from oscine.executor.lockstep import Agreed, OwnSteps
from oscine.ops.target import Exchange


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


class Lockstep(OwnSteps):
    """What the runner uses in each step: the clock, and the exchange of tokens."""

    shares_experts = True
    exchange: Exchange

    def __init__(self, clock: Clock, exchange: Exchange) -> None:
        self.clock, self.exchange = clock, exchange

    @property
    def failed(self) -> Tensor | None:
        return self.exchange.failed

    @property
    def is_awaited(self) -> bool:
        return self.clock.is_awaited

    def begin(self, num_tokens: int, replays: bool) -> Agreed:
        agreed = self.clock.agree(num_tokens, replays)
        if not agreed.replays:
            self.exchange.tokens = agreed.tokens
        return agreed

    def pad(self, num_tokens: int) -> None:
        self.exchange.tokens = (num_tokens,) * self.clock.num_ranks

    def least_of_all(self, number: int) -> int:
        found = torch.tensor([number])
        dist.all_reduce(found, op=dist.ReduceOp.MIN)  # the engines are the ranks of the process group
        return int(found)

    def rehearsal(self) -> AbstractContextManager[None]:
        return self.exchange.rehearsal()

    def serve(self) -> None:
        self.clock.serve()
        self.exchange.serve()
