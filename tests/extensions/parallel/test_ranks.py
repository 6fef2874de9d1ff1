"""Ranks in threads, each with its part of the weights, heads and vocabulary, answer as one does."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oscine.checkpoint import opened
from oscine.checkpoint.folder import Checkpoint
from oscine.executor.start.load import load_executor
from oscine.executor.start.stopwatch import Stopwatch
from oscine.executor.start.weight_bytes import torch_bytes
from oscine.model.config import ModelConfig, gpt_oss_20b, gpt_oss_120b
from oscine.model.random_weights import RandomTensors
from oscine.model.tensors import Part, Shard, tensor_specs
from oscine.model.weights import Weights, load_weights
from oscine.ops.target import Alone, Communicator
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
from oscine.types import GenerationOutput, GenerationRequest
from tests.executor.grammars import END as END_OF_TEXT
from tests.executor.grammars import TOKENS, grammar, tokenizer_file
from tests.executor.tiny import CPU, PAGE, LivelyTensors, loop, prompt, request, run
from tests.model.saved import save
from tests.ops.ranks import on_every_rank
from tests.tiny import TINY

# With 2 ranks a KV head each, with 4 and 8 ranks the same one on several. Three blocks of intermediate columns: parts
# are filled up with zeros, and some of 8 ranks have nothing else.
RANKED = replace(TINY, vocab_size=104, num_attention_heads=8, intermediate_size=96)

START, END, CHANNEL, MESSAGE = range(END_OF_TEXT - 4, END_OF_TEXT)
SPECIALS = {"<|start|>": START, "<|end|>": END, "<|channel|>": CHANNEL, "<|message|>": MESSAGE}
HEADERS = """%llguidance {"no_forcing": true}
start: (<|end|>? <|start|> "ab" | <|channel|>) ("ca" | "bb" | "cabba" | "bbab") <|message|>"""
NOISE: dict[str, object] = {"temperature": 1.0}
# Each kind in a batch of its own, as one row that needs all logits makes all rows do so.
KINDS: dict[str, tuple[dict[str, object], ...]] = {
    "greedy": ({},),
    "sampled": ({**NOISE, "seed": 1}, {"temperature": 0.4, "seed": 1 << 40}, {}),
    "penalties": ({"presence_penalty": 0.5, "frequency_penalty": 0.3}, {**NOISE, "repetition_penalty": 1.2}),
    "biases": ({"logit_bias": {3: 1.0, 103: 2.5}, "min_tokens": 3, "stop_token_ids": (103,)},),
    "truncated": ({**NOISE, "top_p": 0.7}, {**NOISE, "top_k": 9}, {**NOISE, "min_p": 0.1}),
    "log-probabilities": ({"logprobs": 3}, {**NOISE, "prompt_logprobs": 2}),
    "grammars": ({"grammar": grammar(2, 6)}, {**NOISE, "grammar": grammar(3, 9)}),
    "headers": ({"headers": HEADERS}, {**NOISE, "headers": HEADERS}),
    "mixed": ({**NOISE, "top_p": 0.9, "grammar": grammar(2, 6)}, {"headers": HEADERS}, {**NOISE, "logprobs": 0}),
}


def requests(kind: str) -> list[GenerationRequest]:
    """Prompts shorter and longer than a step; those with rules for headers end in a header."""
    begun = [START, TOKENS.index("ab")]
    found = []
    for n, length in enumerate((3, 70, 24, 1)):
        wishes = KINDS[kind][n % len(KINDS[kind])]
        given = [*prompt(length, n), *(begun if "headers" in wishes else [])]
        found.append(request(f"{kind} {n}", given, max_tokens=12, **wishes))
    return found


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> EngineOptions:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(RANKED.to_dict()))
    tokenizer_file(folder, SPECIALS)
    return EngineOptions(
        # In int8, ranks whose columns are no multiple of 32 would round otherwise than one rank does.
        model=ModelOptions(random_weights=str(folder), tokenizer=str(folder), device="cpu", cpu_weights="float32"),
        cache=CacheOptions(page_size=PAGE, kv_cache_bytes=1 << 20),
        scheduler=replace(SchedulerOptions(), max_num_seqs=4, max_num_batched_tokens=64, overlap=False),
        quiet=True,
    )


@pytest.fixture(scope="module", autouse=True)
def lively() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opened, "random_tensors", lambda *made, is_skewed: LivelyTensors(*made))
        yield


Answers = dict[str, GenerationOutput]


def answers(options: EngineOptions, communicator: Communicator) -> Answers:
    """To the requests of all kinds. Every rank has a scheduler here, so all must find each grammar compiled."""
    executor = load_executor(options, lambda text: None, Stopwatch(), lambda opened: communicator).executor
    kv_heads = max(1, RANKED.num_key_value_heads // communicator.num_ranks)
    assert {pages.shape[3] for pages in executor.kv} == {kv_heads}
    found: Answers = {}
    for kind in KINDS:
        deadline = time.monotonic() + 60
        while not all(executor.prepare(one.sampling) for one in requests(kind)):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        found |= run(loop(executor, options, executor.memory), *requests(kind))
    return {name: replace(one, queue_s=0) for name, one in found.items()}


@pytest.fixture(scope="module")
def alone(options: EngineOptions) -> Answers:
    found = answers(options, Alone())
    assert not any(one.error for one in found.values())
    for kind in KINDS:
        said = {token for name, one in found.items() if name.startswith(kind) for token in one.token_ids}
        assert len(said) > 3, f"{kind}: a model that says nothing"
    assert {token // (RANKED.vocab_size // 8) for one in found.values() for token in one.token_ids} == set(range(8))
    return found


def logprobs(output: GenerationOutput) -> list[tuple[int, float]]:
    entries = [*(output.logprobs or ()), *(output.prompt_logprobs or ())]
    return [pair for entry in entries for pair in ((entry.token_id, entry.logprob), *entry.top)]


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [2, 4, 8])  # 4: more than KV heads
def test_ranks_answer_as_one(options: EngineOptions, alone: Answers, num_ranks: int) -> None:
    first, *others = on_every_rank(num_ranks, lambda own: answers(options, own))
    assert all(other == first for other in others)
    for name, expected in alone.items():
        assert first[name].token_ids == expected.token_ids, name
        assert first[name].finish_reason == expected.finish_reason, name
        found_ids, found = zip(*logprobs(first[name]), strict=True) if logprobs(expected) else ((), ())
        ids, values = zip(*logprobs(expected), strict=True) if logprobs(expected) else ((), ())
        assert found_ids == ids, name
        assert found == pytest.approx(values, abs=1e-4), name


def test_the_best_of_all_ranks_is_that_of_the_lowest_that_has_it() -> None:
    nan, low = torch.nan, -torch.inf
    values_RN = torch.tensor([[1.0, 3.0, nan, low, nan, torch.inf, low], [2.0, 3.0, 1.0, low, low, torch.inf, -5.0]])
    ids_RN = torch.arange(14).view(2, 7)
    best = on_every_rank(2, lambda own: own.best(values_RN[own.rank], ids_RN[own.rank]).tolist())
    assert best == [[7, 1, 9, -1, -1, 5, 13]] * 2


def test_attention_data_parallelism_divides_only_experts() -> None:
    shard = Shard(experts=Part(1, 2))
    assert shard.config(RANKED) == replace(RANKED, intermediate_size=64)
    source = RandomTensors(RANKED, 0, CPU)
    for name in tensor_specs(RANKED):
        whole, part = source.get(name), shard.part(RANKED, name, source.get(name))
        assert (part.shape == whole.shape and torch.equal(part, whole)) == (".experts." not in name), name


def shards(num_ranks: int) -> list[Shard]:
    return [Shard.of_everything(rank, num_ranks) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("config", [RANKED, replace(RANKED, num_key_value_heads=8)], ids=["2 KV heads", "8 KV heads"])
def test_every_weight_is_on_one_rank_or_on_all(config: ModelConfig, num_ranks: int) -> None:
    """KV heads with equal queries on several; what is added to partial sums on the first; zeros fill up."""
    source, heads = RandomTensors(config, 0, CPU), config.num_key_value_heads
    for name in tensor_specs(config):
        whole = source.get(name)
        parts = [shard.part(config, name, whole) for shard in shards(num_ranks)]
        assert {part.shape for part in parts} == {Shard.of_everything(0, num_ranks).specs(config)[name].shape}
        [dimension] = [d for d, size in enumerate(whole.shape) if parts[0].shape[d] != size] or [None]
        if name.endswith(("o_proj.bias", "down_proj_bias")):
            assert torch.equal(sum(parts[1:], start=parts[0]), whole)
        elif dimension is None:
            assert all(torch.equal(part, whole) for part in parts), name
        else:
            if name.endswith(("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias")):
                holders = max(1, num_ranks // heads)
                assert all(torch.equal(one, next) for i, (one, next) in enumerate(pairwise(parts), 1) if i % holders)
                parts = parts[::holders]
            rows = [row for part in parts for row in without_filling(part, dimension)]
            assert torch.equal(torch.stack(rows, dimension), whole), name


def without_filling(part: Tensor, dimension: int) -> list[Tensor]:
    """The rows along a dimension, without the zeros at its end."""
    rows = [*part.unbind(dimension)]
    while rows and not rows[-1].any():
        rows.pop()
    return rows


# Query heads, KV heads and blocks of 32 intermediate columns of each rank.
PUBLISHED = {1: (64, 8, 90), 2: (32, 4, 45), 4: (16, 2, 23), 8: (8, 1, 12), 16: (4, 1, 6)}


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", PUBLISHED)
@pytest.mark.parametrize("config", [gpt_oss_20b(), gpt_oss_120b()], ids=["20b", "120b"])
def test_shards_of_published_models(config: ModelConfig, num_ranks: int) -> None:
    """One shape for all ranks, so that one compilation serves them. All ranks together have what the whole has, but for
    KV heads that several have and zeros that fill up."""
    config = config.of_layers((0, 1))
    heads, kv_heads, blocks = PUBLISHED[num_ranks]
    shares = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": 32 * blocks}
    of_rank = replace(config, **shares)  # type: ignore[arg-type]
    expected = tensor_specs(of_rank)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        expected[name] = replace(expected[name], shape=(201_088 // num_ranks, 2880))
    held = dict.fromkeys(expected, 0)
    for shard in shards(num_ranks):
        assert shard.config(config) == of_rank
        assert shard.specs(config) == expected
        for name, spec in tensor_specs(config).items():
            part = shard.part(config, name, torch.empty(spec.shape, device="meta"))
            assert part.shape == expected[name].shape
            held[name] += part.numel()
    for name, spec in tensor_specs(config).items():
        copies = held[name] / prod(spec.shape)
        if "k_proj" in name or "v_proj" in name:
            assert copies == max(1, num_ranks / 8)
        elif name.endswith(("_blocks", "_scales", "gate_up_proj_bias")):
            assert copies == num_ranks * blocks / 90
        else:
            assert copies in (1, num_ranks), name


# GB of weights of each rank of 120b: all is divided, or only the experts.
BYTES = {1: (65.2, 65.2), 2: (32.7, 34.8), 4: (16.7, 19.9), 8: (8.7, 12.4)}


@pytest.mark.parametrize("num_ranks", BYTES)
def test_bytes_of_published_shards(num_ranks: int) -> None:
    for rank in range(num_ranks):
        shares = Shard.of_everything(rank, num_ranks), Shard(experts=Part(rank, num_ranks))
        found = [sum(torch_bytes(shard.specs(gpt_oss_120b()), torch.bfloat16).values()) / 1e9 for shard in shares]
        assert found == pytest.approx(BYTES[num_ranks], abs=0.05)


class Reads(TorchDispatchMode):
    """Bytes of some tensors that operations read, by name. A view reads nothing; one element is only looked at."""

    def __init__(self, whole: dict[str, Tensor]) -> None:
        super().__init__()
        self._places = {name: range(t.data_ptr(), t.data_ptr() + t.nbytes) for name, t in whole.items()}
        self.found = dict.fromkeys(whole, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            for tensor in torch.utils._pytree.tree_leaves(args):
                if isinstance(tensor, Tensor) and tensor.dim():
                    for name, place in self._places.items():
                        self.found[name] += tensor.nbytes * (tensor.data_ptr() in place)
        return func(*args, **(kwargs or {}))


@pytest.mark.long
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_rank_reads_its_own_bytes_of_a_file(tmp_path: Path, num_ranks: int) -> None:
    config = replace(RANKED, num_key_value_heads=4, intermediate_size=128)
    source, names = RandomTensors(config, 0, CPU), tensor_specs(config)
    save(tmp_path, config, {name: source.get(name) for name in names})
    checkpoint = Checkpoint(tmp_path, config)
    whole = {name: checkpoint.get(name) for name in names}
    for shard in shards(num_ranks):
        with Reads(whole) as reads:
            load_weights(config, checkpoint, CPU, torch.float32, shard=shard)
        specs = shard.specs(config)
        for name, num_bytes in reads.found.items():
            assert num_bytes in (0, specs[name].num_bytes), name
            assert num_bytes or names[name].dtype == "U8" or name.endswith(("o_proj.bias", "down_proj_bias")), name
        assert num_ranks == 1 or reads.found["model.layers.0.mlp.experts.down_proj_blocks"]


def held_by(weights: Weights) -> list[Tensor]:
    held = [weights.embed_VH, weights.norm_H, weights.head_VH]
    for layer in weights.layers:
        held += [getattr(layer, name) for name in layer.__slots__ if name != "experts"]
        held += [getattr(layer.experts, name) for name in layer.experts.__slots__]
    return held


class OnDevice:
    """A source of tensors that are on the device already, as random ones are; here they have no memory."""

    def get(self, name: str) -> Tensor:
        spec = tensor_specs(RANKED)[name]
        return torch.empty(spec.shape, dtype={"BF16": torch.bfloat16, "U8": torch.uint8}[spec.dtype], device="meta")


def test_a_part_does_not_keep_the_rest_of_a_tensor_on_a_device() -> None:
    shard = Shard.of_everything(1, 2)
    weights = load_weights(RANKED, OnDevice(), torch.device("meta"), torch.bfloat16, shard=shard)
    for tensor in held_by(weights):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_planned_bytes_are_those_of_every_rank(num_ranks: int) -> None:
    source = RandomTensors(RANKED, 0, CPU)
    for shard in shards(num_ranks):
        weights = load_weights(RANKED, source, CPU, torch.float32, shard=shard)
        assert sum(tensor.nbytes for tensor in held_by(weights)) == sum(
            torch_bytes(shard.specs(RANKED), torch.float32).values()
        )


@pytest.mark.parametrize(
    ("change", "num_ranks", "named"),
    [
        ({}, 3, "3 ranks cannot divide a num_attention_heads of 8"),
        ({"vocab_size": 97}, 2, "2 ranks cannot divide a vocab_size of 97"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 108},
            6,
            "4 kv heads cannot be shared out among 6 ranks",
        ),
    ],
)
def test_ranks_that_cannot_divide_a_model_are_refused(change: dict[str, int], num_ranks: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Shard.of_everything(0, num_ranks).config(replace(RANKED, **change))  # type: ignore[arg-type]
