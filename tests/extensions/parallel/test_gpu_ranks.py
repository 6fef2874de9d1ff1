"""The whole model on two GPUs, as test_gpu_model.py has it on one.

Weights are random, so the router's logits of some tokens are nearly equal. Another rounding then selects other experts,
and the error of that row is ten times that of others. So rows are judged by their median, and such rows are counted.
"""

import pytest

from benchmarks.kernels.ranks import Ranks, run_ranks
from oscine.extensions.parallel.comm.tokens import SymmetricExchange
from oscine.model.tensors import Part, Shard
from oscine.ops.target import Target
from tests.model.test_gpu_model import SHAPES, STEPS, Error, check_rows, errors

TOKENS = [sum(count for _, count in step) for step in STEPS]


def errors_on_a_rank(ranks: Ranks) -> list[list[Error]]:
    target = ranks.target(max(TOKENS), SHAPES[0].config.hidden_size)
    return [errors(shape, target) for shape in SHAPES]


def errors_over_nccl(ranks: Ranks) -> list[list[Error]]:
    """As where no GPU can reach the memory of another."""
    target = Target.of(ranks.device, ranks.collectives())
    return [errors(shape, target) for shape in SHAPES]


@pytest.mark.multi_gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("function", ["errors_on_a_rank", "errors_over_nccl"])
def test_two_ranks_cost_at_most_twice_what_bfloat16_costs(function: str) -> None:
    ranks = run_ranks(__name__, function, limit=200)
    found, others = ([[Error(*error) for error in steps] for steps in rank] for rank in ranks)
    for shape, steps, other in zip(SHAPES, found, others, strict=True):
        check_rows(shape.name, steps)
        assert [error.bits for error in steps] == [error.bits for error in other], "the ranks have other logits"


def errors_with_shared_experts(ranks: Ranks) -> list[Error]:
    """Every other rank runs the steps in the opposite order, so that many tokens meet few."""
    shape = SHAPES[0]
    exchange = SymmetricExchange(ranks.communicator(max(TOKENS), shape.config.hidden_size))

    def begin(index: int) -> None:
        exchange.tokens = tuple(TOKENS[~index if rank % 2 else index] for rank in range(ranks.num_ranks))

    shard = Shard(experts=Part(ranks.rank, ranks.num_ranks))
    target = Target.of(ranks.device, exchange=exchange)
    found = errors(shape, target, shard, STEPS[::-1] if ranks.rank % 2 else STEPS, begin)
    assert not exchange.failed.item()  # type: ignore[union-attr]
    return found


@pytest.mark.multi_gpu
@pytest.mark.timeout(300)
def test_ranks_that_share_experts_cost_at_most_twice_what_bfloat16_costs() -> None:
    for steps in run_ranks(__name__, "errors_with_shared_experts", limit=200):
        check_rows(SHAPES[0].name, [Error(*error) for error in steps])
