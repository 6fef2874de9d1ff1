"""Communicators between ranks that are threads, or that run one after the other."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier, BrokenBarrierError
from typing import TypeVar

import torch
from torch import Tensor

from oscine.ops.target import Alone, Communicator, best_of_gathered
from tests.waiting import DEADLINE_S

T = TypeVar("T")


class Threads:
    """One of several ranks that share a list."""

    error = None

    def __init__(self, rank: int, shared: list[Tensor], meeting: Barrier) -> None:
        self.rank, self.num_ranks, self._shared, self._meeting = rank, len(shared), shared, meeting

    def _all(self, mine: Tensor) -> list[Tensor]:
        self._shared[self.rank] = mine
        self.barrier()
        found = list(self._shared)
        self.barrier()
        return found

    def all_reduce(self, partial: Tensor) -> Tensor:
        return torch.stack(self._all(partial)).sum(0)

    def all_gather(self, part: Tensor) -> Tensor:
        return torch.cat(self._all(part), -1)

    def best(self, values_N: Tensor, ids_N: Tensor) -> Tensor:
        return best_of_gathered(self, values_N, ids_N)

    def barrier(self) -> None:
        self._meeting.wait(DEADLINE_S)

    def serve(self) -> None:
        pass


def on_every_rank(num_ranks: int, call: Callable[[Communicator], T]) -> list[T]:
    """What it returns on each rank, in a thread of its own. Raises what a rank raised."""
    if num_ranks == 1:
        return [call(Alone())]
    shared, meeting = [torch.empty(0)] * num_ranks, Barrier(num_ranks)

    def on_rank(rank: int) -> T:
        try:
            return call(Threads(rank, shared, meeting))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(num_ranks) as threads:
        ranks = [threads.submit(on_rank, rank) for rank in range(num_ranks)]
        errors = [error for rank in ranks if (error := rank.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, BrokenBarrierError)), errors[0])
        return [rank.result() for rank in ranks]


@dataclass
class InTurn(Alone):
    """One of several ranks that never meet; keeps what it says is best."""

    rank: int
    num_ranks: int
    said: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def best(self, values_N: Tensor, ids_N: Tensor) -> Tensor:
        self.said.append((values_N, ids_N))
        return ids_N


def best_in_turn(num_ranks: int, choose: Callable[[Communicator], Tensor]) -> Tensor:
    """What `choose` returns on ranks that meet once, to find the best. For kernels that cannot run in threads."""
    said: list[tuple[Tensor, Tensor]] = []
    for rank in range(num_ranks):
        choose(InTurn(rank, num_ranks, said))
    values_RN, ids_RN = (torch.stack(parts) for parts in zip(*said, strict=True))
    assert len(values_RN) == num_ranks
    assert values_RN.dtype == torch.float32
    assert ids_RN.dtype == torch.int64
    return ids_RN.gather(0, values_RN.max(0, keepdim=True).indices)[0]
