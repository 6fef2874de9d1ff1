"""Ranks on a CPU exchange through shared memory: here threads, with a numpy sum in the order of ranks as the oracle."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pytest
import torch

from oscine.extensions.parallel.comm.host import HostCommunicator, Watch, bytes_of
from tests.waiting import wait_until

T = TypeVar("T")
SLOT = 1 << 20  # bytes


def never() -> Callable[[], None]:
    return lambda: None


def ranks(num_ranks: int, watch: Watch = never) -> list[HostCommunicator]:
    memory = bytearray(bytes_of(num_ranks))
    return [HostCommunicator(rank, num_ranks, memory, watch) for rank in range(num_ranks)]


def on_all(own: list[HostCommunicator], call: Callable[[HostCommunicator], T]) -> list[T]:
    with ThreadPoolExecutor(len(own)) as threads:
        return [one.result(timeout=60) for one in [threads.submit(call, rank) for rank in own]]


def part(rank: int, call: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * call + rank))


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_in_the_order_of_ranks_to_the_last_bit(num_ranks: int, dtype: torch.dtype) -> None:
    """Sizes: nothing, less than a slot, a slot of float32, one more, and several slots."""
    sizes = (0, 1, 33, SLOT // 4, SLOT // 4 + 1, 700_001)

    def run(own: HostCommunicator) -> list[torch.Tensor]:
        return [own.all_reduce(part(own.rank, call, size).to(dtype)) for call, size in enumerate(sizes)]

    found = on_all(ranks(num_ranks), run)
    for call, size in enumerate(sizes):
        expected = np.zeros(size, np.float32)
        for rank in range(num_ranks):
            expected += part(rank, call, size).to(dtype).float().numpy()
        for of_rank in found:
            assert torch.equal(of_rank[call], torch.from_numpy(expected).to(dtype))


def test_parts_are_gathered_along_the_last_dimension() -> None:
    shapes = ((3,), (2, 5), (4, 1, 3), (3, 200_000), (1,))

    def run(own: HostCommunicator) -> list[torch.Tensor]:
        found = [own.all_gather(part(own.rank, call, *shape)) for call, shape in enumerate(shapes)]
        return [*found, own.all_gather(torch.arange(6).view(2, 3).T + own.rank)]  # not contiguous

    for of_rank in on_all(ranks(4), run):
        for call, shape in enumerate(shapes):
            assert torch.equal(of_rank[call], torch.cat([part(rank, call, *shape) for rank in range(4)], -1))
        assert torch.equal(of_rank[-1], torch.cat([torch.arange(6).view(2, 3).T + rank for rank in range(4)], -1))


def test_the_best_is_that_of_the_lowest_rank_that_has_it() -> None:
    nan, low = torch.nan, -torch.inf
    values_RN = torch.tensor([[1.0, 3.0, nan, low], [2.0, 3.0, 1.0, low], [2.0, 3.0, 5.0, low], [0.0, 4.0, nan, low]])
    ids_RN = torch.arange(16).view(4, 4)
    found = on_all(ranks(4), lambda own: own.best(values_RN[own.rank], ids_RN[own.rank]).tolist())
    assert found == [[4, 13, 10, -1]] * 4


@pytest.mark.long
def test_thousands_of_exchanges_in_a_row_stay_in_step() -> None:
    """Ranks that are late in turn: a slot that is written too early would show."""

    def run(own: HostCommunicator) -> int:
        wrong = 0
        for call in range(1500):
            if call % 300 == own.rank:
                threading.Event().wait(0.003)
            total = own.all_reduce(torch.full((7,), float(call + own.rank)))
            wrong += not bool((total == 4 * call + 6).all())
        return wrong

    assert on_all(ranks(4), run) == [0] * 4


def test_no_rank_leaves_a_barrier_before_all_have_come() -> None:
    own = ranks(4)
    with ThreadPoolExecutor(4) as threads:
        early = [threads.submit(rank.barrier) for rank in own[:3]]
        wait_until(lambda: all(memory_count(rank) == 1 for rank in own[:3]), "three ranks at the barrier")
        assert not any(one.done() for one in early)
        threads.submit(own[3].barrier).result(timeout=60)
        for one in early:
            one.result(timeout=60)


def memory_count(rank: HostCommunicator) -> int:
    """Exchanges that a rank has begun."""
    return rank._counters[8 * rank.rank]


def test_what_a_watch_raises_ends_a_wait() -> None:
    def fail() -> None:
        raise RuntimeError("rank 1 is gone")

    with pytest.raises(RuntimeError, match="rank 1 is gone"):
        ranks(2, lambda: fail)[0].barrier()
