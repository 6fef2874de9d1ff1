"""Tokens that meet the experts of other GPUs: what is compiled for Hopper. See test_tokens_gpu.py for two GPUs."""

import re
from dataclasses import replace
from itertools import product

import pytest

from oscine.extensions.parallel.comm.tokens import SymmetricExchange
from oscine.ops.norm import hopper
from tests.extensions.parallel.test_comm import HIDDEN, communicator, elements_per_store, empty
from tests.ops.chips import CHIPS
from tests.ops.compile_ahead import TO_E4M3, marked
from tests.ops.launches import noted


class Nowhere(SymmetricExchange):
    """Of GPUs that are not there."""

    def _upload(self, tokens: tuple[int, ...]) -> None:
        pass


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("tokens", "num_ranks"), marked(product((1, 32, 700), (2, 4, 8)), newest=[(1, 8)], oldest=[(32, 4), (700, 2)])
)
def test_kernels_push_and_poll_whole_words(tokens: int, num_ranks: int) -> None:
    exchange = Nowhere(communicator(1, num_ranks))
    exchange._options = CHIPS[90].launch_options
    exchange.tokens = tuple(tokens + rank for rank in range(num_ranks))
    own, everyone = exchange.tokens[1], sum(exchange.tokens)
    target = replace(CHIPS[90], exchange=exchange)
    residual_TH, weight_H, router, bias_E = empty(own, HIDDEN), empty(HIDDEN), empty(128, HIDDEN), empty(128)
    with noted(target) as launches:
        all_nH, sum_TH, routing = hopper.norm_route(
            target, empty(own, 12, HIDDEN), weight_H, 1e-5, residual_TH, router, bias_E, 4
        )
        total_TH = exchange.share(lambda x: empty(len(x), 4, HIDDEN))(all_nH)
    assert all_nH.shape == (everyone, HIDDEN)
    assert sum_TH.shape == total_TH.shape == (own, HIDDEN)
    assert routing.expert_ids_TK.shape == (everyone, 4)
    exchanging = {
        launch.name: launch.compile(90)
        for launch in launches
        if launch.signature.get("addresses", "constexpr") != "constexpr"
    }
    assert exchanging.keys() == {"_dispatch_kernel", "_combine_kernel"}
    assert exchanging["_dispatch_kernel"].unpacked_after <= TO_E4M3  # few tokens are planes
    for compiled in exchanging.values():
        assert set(re.findall(r"st\.relaxed\.sys\.global\.(\w+)\.b32 \[at", compiled.ptx)) == {"v4"}
        assert set(re.findall(r"ld\.relaxed\.sys\.global\.(\w+)\.b32 {%", compiled.ptx)) == {"v4"}
        assert not re.search("multimem|multicast|membar|fence", compiled.ptx)
        assert all(consecutive % packed == 0 for consecutive, packed in elements_per_store(compiled.ttgir))
