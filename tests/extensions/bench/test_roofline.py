"""The limits that the goals were set against, and the arithmetic behind them."""

import math

import pytest

from oscine.extensions.bench.roofline import (
    H200,
    ceiling_of,
    decode_bytes,
    decode_step_s,
    expected_experts,
    expert_bytes,
    fixed_bytes,
    kv_bytes,
    token_flops,
)
from oscine.model.config import ModelConfig, gpt_oss_20b, gpt_oss_120b

MODELS = {"120b": gpt_oss_120b(), "20b": gpt_oss_20b()}


@pytest.mark.parametrize(
    ("model", "concurrency", "osl", "limit"),
    [("120b", 1, 256, 860), ("120b", 8, 256, 256), ("120b", 64, 256, 73), ("20b", 1, 256, 1160), ("20b", 64, 256, 294)],
)
def test_the_limits_of_one_user(model: str, concurrency: int, osl: int, limit: float) -> None:
    step_s = decode_step_s(MODELS[model], concurrency, 1024 + osl / 2, H200)
    assert 1 / step_s == pytest.approx(limit, rel=0.03)


@pytest.mark.parametrize(("model", "gigabytes"), [("120b", 60.9), ("20b", 10.2)])
def test_a_large_batch_reads_every_expert_as_published(model: str, gigabytes: float) -> None:
    config = MODELS[model]
    assert expected_experts(config.experts[0], 4, 10_000) == pytest.approx(config.experts[0])
    total = sum(config.experts) * expert_bytes(config)
    assert total / 1e9 == pytest.approx(gigabytes, rel=0.005)


@pytest.mark.parametrize(("model", "gigaflops"), [("120b", 10.2), ("20b", 7.2)])
def test_arithmetic_of_a_token(model: str, gigaflops: float) -> None:
    assert token_flops(MODELS[model], 1) / 1e9 == pytest.approx(gigaflops, rel=0.01)


def test_one_token_uses_just_its_own_experts() -> None:
    assert expected_experts(128, 4, 1) == pytest.approx(4)
    assert expected_experts(128, 4, 2) == pytest.approx(8 - 16 / 128)


def test_keys_and_values_of_a_window_stop_growing() -> None:
    config = MODELS["120b"]
    assert kv_bytes(config, 100) == 72 * 1024 * 100
    assert kv_bytes(config, 1_128) - kv_bytes(config, 128) == 36 * 1024 * 1000


def test_the_parts_add_up() -> None:
    config = ModelConfig()
    whole = decode_bytes(config, 3, 50)
    experts = config.num_hidden_layers * expected_experts(32, 4, 3) * expert_bytes(config)
    assert math.isclose(whole, fixed_bytes(config) + experts + 3 * kv_bytes(config, 50))


def test_many_tokens_are_bound_by_arithmetic() -> None:
    few, many = (decode_step_s(MODELS["20b"], n, 1, H200) / n for n in (4096, 8192))
    assert few == pytest.approx(many)
    assert token_flops(MODELS["20b"], 1) / H200.flops_per_s == pytest.approx(many)


def test_ceilings_are_those_of_measured_chips_only() -> None:
    assert ceiling_of("NVIDIA H200") == H200
    assert ceiling_of("cpu") is None
