"""The whole model on two GPUs, as test_gpu_model.py has it on one."""

import pytest

from benchmarks.kernels.ranks import Ranks, run_ranks
from tests.model.test_gpu_model import SHAPES, STEPS, Error, check, errors


def errors_on_a_rank(ranks: Ranks) -> list[list[Error]]:
    most = max(sum(count for _, count in step) for step in STEPS)
    target = ranks.target(most, SHAPES[0].config.hidden_size)
    return [errors(shape, target) for shape in SHAPES]


@pytest.mark.multi_gpu
@pytest.mark.timeout(300)
def test_two_ranks_cost_at_most_twice_what_bfloat16_costs() -> None:
    ranks = run_ranks(__name__, "errors_on_a_rank", limit=200)
    found, others = ([[Error(*error) for error in steps] for steps in rank] for rank in ranks)
    for shape, steps, other in zip(SHAPES, found, others, strict=True):
        check(shape, steps)
        assert [error.bits for error in steps] == [error.bits for error in other], "the ranks have other logits"
