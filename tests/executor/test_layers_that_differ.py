"""A variant whose layers differ in window and in number of experts, through the engine, against plain loops in float32.

Windows of 64 and 128 tokens and full attention are three page groups. The oracle shares nothing with the model but the
published tensors.
"""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from oscine.engine.core.loop import EngineLoop
from oscine.executor.kv.allocate import allocate_kv
from oscine.executor.kv.memory import MemoryPlan
from oscine.executor.runner import TorchExecutor
from oscine.executor.threaded import ThreadedExecutor
from oscine.kv_group import apart
from oscine.model.config import ModelConfig
from oscine.model.gpt_oss import GptOss
from oscine.model.tensors import tensor_specs
from oscine.model.weights import load_weights
from tests.model.tiny import relative_error, whole
from tests.ops.bound import reference_ops
from tests.tiny import TINY

from .tiny import CPU, PAGE, LivelyTensors, options, prompt, request, run

MAX_MODEL_LEN = 512
WINDOWS = (64, None, 128, None, 64, 128)
CONFIG = replace(
    TINY,
    num_hidden_layers=6,
    num_local_experts=(4, 6, 2, 4, 9, 5),
    sliding_window=WINDOWS,
    layer_types=tuple("full_attention" if window is None else "sliding_attention" for window in WINDOWS),
    max_position_embeddings=MAX_MODEL_LEN,
)
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


@cache
def tensors() -> dict[str, Tensor]:
    source = LivelyTensors(CONFIG, 5, CPU)
    return {name: source.get(name) for name in tensor_specs(CONFIG)}


# ---- the oracle: one token after the other, one head after the other ----


def dequantized(name: str) -> Tensor:
    """[experts, rows, columns]"""
    blocks, scales = tensors()[f"{name}_blocks"].long(), tensors()[f"{name}_scales"].float()
    values = torch.stack((FP4[blocks & 15], FP4[blocks >> 4]), -1).flatten(-2)
    return (values * torch.exp2(scales - 127)[..., None]).flatten(-2)


def normed(x: Tensor, weight: str) -> Tensor:
    return x / (x.square().mean() + 1e-5).sqrt() * tensors()[weight].float()


@cache
def frequencies() -> Tensor:
    """YaRN of factor 32 over 4096 tokens, base 150,000; radians per token."""
    half = CONFIG.head_dim // 2
    low, high = (half * math.log(4096 / (beta * 2 * math.pi)) / math.log(150_000) for beta in (32.0, 1.0))
    found = []
    for i in range(half):
        frequency = 150_000 ** (-i / half)
        ramp = min(1.0, max(0.0, (i - low) / (high - low)))
        found.append(frequency / 32 * ramp + frequency * (1 - ramp))
    return torch.tensor(found)


def rotated(x_HD: Tensor, position: int) -> Tensor:
    first, second = x_HD.chunk(2, -1)
    cos, sin = ((0.1 * math.log(32) + 1) * f(position * frequencies()) for f in (torch.cos, torch.sin))
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Oracle:
    """Logits of a growing sequence; keys and values are kept in lists."""

    def __init__(self) -> None:
        self.keys: list[list[Tensor]] = [[] for _ in WINDOWS]
        self.values: list[list[Tensor]] = [[] for _ in WINDOWS]

    def next_logits(self, token: int) -> Tensor:
        x = tensors()["model.embed_tokens.weight"][token].float()
        for layer, window in enumerate(WINDOWS):
            x = x + self.attended(layer, window, normed(x, f"model.layers.{layer}.input_layernorm.weight"))
            x = x + mixed(layer, normed(x, f"model.layers.{layer}.post_attention_layernorm.weight"))
        return tensors()["lm_head.weight"].float() @ normed(x, "model.norm.weight")

    def attended(self, layer: int, window: int | None, x: Tensor) -> Tensor:
        position, dim = len(self.keys[layer]), CONFIG.head_dim
        q, k, v = (linear(f"model.layers.{layer}.self_attn.{name}_proj", x).view(-1, dim) for name in "qkv")
        self.keys[layer].append(rotated(k, position))
        self.values[layer].append(v)
        first = 0 if window is None else max(0, position - window + 1)
        q, outputs = rotated(q, position), []
        keys, values = torch.stack(self.keys[layer][first:], 1), torch.stack(self.values[layer][first:], 1)
        for head, query in enumerate(q):
            of = head // (CONFIG.num_attention_heads // CONFIG.num_key_value_heads)
            scores = keys[of] @ query / math.sqrt(dim)
            sink = tensors()[f"model.layers.{layer}.self_attn.sinks"][head].float()
            weights = torch.cat((scores, sink[None])).softmax(0)[:-1]
            outputs.append(weights @ values[of])
        return linear(f"model.layers.{layer}.self_attn.o_proj", torch.cat(outputs))


def linear(name: str, x: Tensor) -> Tensor:
    return tensors()[f"{name}.weight"].float() @ x + tensors()[f"{name}.bias"].float()


@cache
def experts(layer: int) -> tuple[Tensor, Tensor]:
    name = f"model.layers.{layer}.mlp.experts"
    return dequantized(f"{name}.gate_up_proj"), dequantized(f"{name}.down_proj")


def mixed(layer: int, x: Tensor) -> Tensor:
    name = f"model.layers.{layer}.mlp"
    top = linear(f"{name}.router", x).topk(CONFIG.num_experts_per_tok)
    out = torch.zeros_like(x)
    for weight, expert in zip(top.values.softmax(0), top.indices, strict=True):
        both = experts(layer)[0][expert] @ x + tensors()[f"{name}.experts.gate_up_proj_bias"][expert].float()
        gate, up = both[::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
        hidden = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        down = experts(layer)[1][expert] @ hidden + tensors()[f"{name}.experts.down_proj_bias"][expert].float()
        out += weight * down
    return out


@cache
def naive_greedy(prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    oracle, said = Oracle(), list[int]()
    for token in prompt:
        logits = oracle.next_logits(token)
    for _ in range(num_tokens):
        said.append(int(logits.argmax()))
        logits = oracle.next_logits(said[-1])
    return said


# ---- the engine ----


@cache
def model(config: ModelConfig = CONFIG) -> GptOss:
    torch.set_num_threads(1)
    return GptOss(config, load_weights(config, LivelyTensors(config, 5, CPU), CPU, torch.float32), reference_ops())


def engine(num_pages: tuple[int, int, int], *, overlap: bool, chunk: int) -> EngineLoop:
    """Pages of full attention, of windows of 128 tokens, and of 64."""
    asked = options(max_num_batched_tokens=chunk, overlap=overlap, max_num_seqs=4)
    groups = CONFIG.kv_groups(PAGE, "float32")
    assert [group.window for group in groups] == [None, 128, 64]
    assert [group.layers for group in groups] == [(1, 3), (2, 5), (0, 4)]
    plan = MemoryPlan(0, 0, groups, apart(num_pages, groups), MAX_MODEL_LEN, MAX_MODEL_LEN)
    runner = TorchExecutor(model(), plan, allocate_kv(plan, CPU), asked.scheduler.max_num_seqs)
    executor = ThreadedExecutor(runner) if overlap else runner
    return EngineLoop(executor, asked, groups=groups, memory=plan.slots, max_model_len=MAX_MODEL_LEN)


NUM_TOKENS = 60
LENGTHS = (100, 90, 30)  # with the answers, past both windows
ROOMY, TIGHT = (64, 64, 64), (17, 12, 8)


@pytest.mark.long
@pytest.mark.parametrize(
    ("num_pages", "overlap", "chunk"), [(ROOMY, False, 64), (ROOMY, True, 7), (TIGHT, False, 24), (TIGHT, True, 64)]
)
def test_tokens_are_those_of_plain_loops_through_chunks_hits_and_preemptions(
    num_pages: tuple[int, int, int], overlap: bool, chunk: int
) -> None:
    prompts = {str(length): prompt(length) for length in LENGTHS}
    expected = {name: naive_greedy(tuple(tokens), NUM_TOKENS) for name, tokens in prompts.items()}
    assert len({token for said in expected.values() for token in said}) > 10, "a model that only repeats shows nothing"
    loop = engine(num_pages, overlap=overlap, chunk=chunk)
    found = run(loop, *(request(name, tokens, max_tokens=NUM_TOKENS) for name, tokens in prompts.items()))
    assert {name: output.token_ids for name, output in found.items()} == expected
    assert (loop.stats().preemptions > 0) == (num_pages == TIGHT)
    history = prompts["100"] + expected["100"][:50]
    again = run(loop, request("again", history, max_tokens=10))["again"]
    assert again.token_ids == expected["100"][50:]
    assert again.num_cached_tokens == (144 if num_pages == ROOMY else again.num_cached_tokens)
    stats = loop.stats()
    assert stats.full_pages_used == stats.sliding_pages_used == 0


@pytest.mark.long
def test_logits_are_those_of_plain_loops() -> None:
    tokens, oracle = torch.tensor(prompt(200)), Oracle()
    expected = torch.stack([oracle.next_logits(int(token)) for token in tokens])
    assert relative_error(whole(model(), tokens), expected) < 1e-5


def test_one_layer_of_each_kind_is_rehearsed() -> None:
    assert model().layer_of_each_kind == (0, 1, 2, 3, 4, 5)
    alike = replace(CONFIG, num_local_experts=(4, 6, 5, 4, 4, 5))
    assert model(alike).layer_of_each_kind == (0, 1, 2, 3)
    assert alike.of_layers((0, 1, 2, 3)).layers_by_window == {None: (1, 3), 128: (2,), 64: (0,)}
