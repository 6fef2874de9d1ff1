"""A model with the experts of some layers on the host generates the same tokens. The device is also the CPU here."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from oscine.extensions.experts_on_host.layers import MAX_TOKENS, HostExperts, HostLayers
from oscine.model.gpt_oss import GptOss
from oscine.model.weights import load_weights
from oscine.ops.moe import native
from oscine.ops.native.library import unavailable
from oscine.ops.native.weights import PackedExperts
from oscine.ops.target import Target
from tests.executor.tiny import CPU, LivelyTensors, executor, loop, options, prompt, request, run
from tests.tiny import DEEP

ON_HOST = range(2, 4)

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")


@cache
def model(on_host: bool) -> GptOss:
    """A model whose layers all use the native experts, so that only their place differs."""
    from tests.ops.bound import reference_ops

    ops = replace(reference_ops(), moe=native.moe, prepare_experts=native.prepare_experts)
    host = None
    if on_host:
        host = HostLayers(Target(CPU), ON_HOST, DEEP.hidden_size, DEEP.num_experts_per_tok)
        ops = replace(ops, moe=host.beside(ops.moe))
    source = LivelyTensors(DEEP, 3, CPU)
    return GptOss(DEEP, load_weights(DEEP, source, CPU, torch.float32, ops=ops, on_host=host), ops)


def generated(model: GptOss) -> dict[str, list[int]]:
    """Generated tokens, in steps that are small enough for the host to compute."""
    asked = options(max_num_batched_tokens=MAX_TOKENS)
    runner = executor(model, asked, 64, 64)
    requests = [request(str(n), prompt(n, n), max_tokens=12) for n in (3, 50, 100)]
    return {name: output.token_ids for name, output in run(loop(runner, asked, runner.memory), *requests).items()}


def test_tokens_equal_those_of_a_model_on_one_device() -> None:
    assert [type(layer.experts) for layer in model(on_host=True).weights.layers[1:3]] == [
        PackedExperts,
        HostExperts,
    ]
    assert generated(model(on_host=True)) == generated(model(on_host=False))


def test_layers_on_the_host_are_rehearsed_too() -> None:
    assert model(on_host=True).layer_of_each_kind == (0, 1, 2, 3)
    assert model(on_host=False).layer_of_each_kind == (0, 1)
