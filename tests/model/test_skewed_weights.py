"""A forward pass with skewed random weights has the statistics of trained models."""

from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from oscine.model.config import ModelConfig
from oscine.model.gpt_oss import GptOss
from oscine.model.skewed_weights import OUTLIERS, SkewedTensors, router_bias
from oscine.model.tensors import tensor_specs
from oscine.model.weights import load_weights
from oscine.ops.interface import Batch, PageGroup
from tests.model.tiny import CPU, random_tokens, whole
from tests.ops.bound import reference_ops
from tests.tiny import SMALL

TOKENS = 768
CONFIG = ModelConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=64,
    num_attention_heads=16,
    num_key_value_heads=2,
    num_hidden_layers=4,
    num_local_experts=64,
    layer_types=("sliding_attention", "full_attention") * 2,
    eos_token_ids=(),
)


class Seen(NamedTuple):
    tokens: Tensor
    logits: Tensor
    popularity: list[Tensor]  # by layer: the share of tokens that choose an expert, falling
    streams: list[Tensor]  # by layer: [T, H] before the experts
    first: list[Tensor]  # by full-attention layer: [T, Q], how much of the attention the first position has


@cache
def seen(dtype: torch.dtype = torch.float32) -> Seen:
    torch.set_num_threads(1)
    ops, found = reference_ops(), Seen(random_tokens(CONFIG, TOKENS), torch.empty(0), [], [], [])

    def norm_route(*arguments: Any) -> Any:
        y_TH, total_TH, routing = ops.norm_route(*arguments)
        chosen = torch.bincount(routing.expert_ids_TK.flatten(), minlength=CONFIG.experts[0])
        found.popularity.append(chosen.sort(descending=True).values.double() / TOKENS)
        found.streams.append(total_TH.float())
        return y_TH, total_TH, routing

    def attention(
        q: Tensor, pages: Tensor, batch: Batch, group: PageGroup, sinks: Tensor, window: int | None
    ) -> Tensor:
        if window is None:
            found.first.append(first_share(q, pages, group, sinks))
        return ops.attention(q, pages, batch, group, sinks, window)

    weights = load_weights(CONFIG, SkewedTensors(CONFIG, 0, CPU), CPU, dtype)
    model = GptOss(CONFIG, weights, replace(ops, norm_route=norm_route, attention=attention))
    return found._replace(logits=whole(model, found.tokens))


def first_share(q_TQD: Tensor, pages: Tensor, group: PageGroup, sinks_Q: Tensor) -> Tensor:
    """By the definition, for one sequence."""
    keys_GTD = torch.cat([pages[page, 0] for page in group.page_table_SB[0].tolist() if page >= 0], 1)[:, :TOKENS]
    keys_QTD = keys_GTD.repeat_interleave(q_TQD.shape[1] // len(keys_GTD), 0)
    scores_QTT = torch.einsum("tqd,qkd->qtk", q_TQD.float(), keys_QTD.float()) / q_TQD.shape[-1] ** 0.5
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    sinks_QT1 = sinks_Q.float()[:, None, None].expand(-1, TOKENS, 1)
    return torch.cat((scores_QTT.masked_fill(later, -torch.inf), sinks_QT1), -1).softmax(-1)[..., 0].T


def exponent(share_E: Tensor) -> float:
    """Of the power law that fits best, by least squares of logarithms."""
    rank = torch.arange(1, len(share_E) + 1).double().log()
    share = share_E.clamp(min=1 / TOKENS).log()
    return float(-((rank - rank.mean()) * (share - share.mean())).sum() / (rank - rank.mean()).square().sum())


def test_experts_are_popular_by_a_power_law() -> None:
    exponents = [exponent(share_E) for share_E in seen().popularity]
    assert 1.01 <= sum(exponents) / len(exponents) <= 1.2
    assert all(0.9 <= one <= 1.3 for one in exponents)
    assert all(share_E[0] > 0.8 and share_E[-1] < 0.02 for share_E in seen().popularity)


@pytest.mark.parametrize("num_experts", [4, 5, 32, 128])
def test_router_bias_is_finite_and_falls(num_experts: int) -> None:
    bias_E = router_bias(num_experts, 4)
    assert bias_E.isfinite().all()
    assert (bias_E.diff() <= 0).all()
    assert (router_bias(num_experts, 4, shared=0.2).abs() <= bias_E.abs()).all()


def test_few_channels_are_far_larger_than_others() -> None:
    for stream_TH in seen().streams:
        size_H = stream_TH[1:].square().mean(0).sqrt()
        ratio_H = (size_H / size_H.median()).sort(descending=True).values
        assert (ratio_H[:OUTLIERS] > 100).all()
        assert (ratio_H[:OUTLIERS] < 500).all()
        assert (ratio_H[OUTLIERS:] < 10).all()


def test_the_first_position_has_a_massive_activation_and_most_of_the_attention() -> None:
    for stream_TH in seen().streams:
        assert stream_TH[0].abs().max() > 1000 * stream_TH[1:].abs().median()
    share_TQ = torch.cat([share_TQ[TOKENS // 2 :] for share_TQ in seen().first], 1)
    assert (share_TQ.mean(0) > 0.5).float().mean() > 0.7


def test_bfloat16_tells_the_first_position_exactly() -> None:
    """The massive activation comes from a bias of all positions, which a head takes away from all others."""
    massive = SkewedTensors(CONFIG, 0, CPU).massive
    first, *others = seen(torch.bfloat16).streams[0][:, massive].tolist()
    assert first > 8000
    assert max(map(abs, others)) < 20


def test_the_likeliest_token_is_clear_and_follows_the_last_one() -> None:
    found = seen()
    top = found.logits.softmax(-1).max(-1)
    assert top.values.median() > 0.5
    assert (top.indices == (found.tokens + 1) % CONFIG.vocab_size).float().mean() > 0.9


def test_tensors_repeat_and_have_the_published_shapes() -> None:
    once, again, other = (SkewedTensors(SMALL, seed, CPU) for seed in (1, 1, 2))
    for name, spec in tensor_specs(SMALL).items():
        tensor = once.get(name)
        assert (tuple(tensor.shape), tensor.dtype == torch.uint8) == (spec.shape, spec.dtype == "U8")
        assert torch.equal(tensor, again.get(name))
        assert "blocks" in name or tensor.float().isfinite().all()
    assert not torch.equal(once.get("lm_head.weight"), other.get("lm_head.weight"))
