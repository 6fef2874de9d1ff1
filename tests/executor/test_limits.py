"""Default limits of a batch by the memory of a GPU, against arithmetic that shares no code with the plan."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from oscine.executor.kv.fit import plan_on_gpus
from oscine.executor.kv.limits import with_sequences, with_step_tokens
from oscine.executor.kv.memory import DeviceMemory, MemoryPlan
from oscine.executor.lockstep import OwnSteps
from oscine.executor.start.fit import plan_on_cpu
from oscine.executor.start.shared import Start
from oscine.model.config import gpt_oss_20b, gpt_oss_120b
from oscine.settings.config import Config, EngineOptions, SpeculationOptions
from oscine.settings.devices import engines_of

GIB = 1 << 30
H, V, D = 2880, 201_088, 64
CONFIGS = {"20b": gpt_oss_20b(), "120b": gpt_oss_120b()}
LAYERS = {"20b": (24, 32), "120b": (36, 128)}  # and experts per layer
SIZES = [*range(8, 17, 4), *range(24, 65, 8), *range(80, 257, 16), *range(288, 513, 32)]  # of graphs


def card(gib: float) -> DeviceMemory:
    return DeviceMemory(int(gib * GIB), int(gib * GIB) - GIB // 2)


def plan(model: str, gib: float, ranks: int = 1, **values: object) -> MemoryPlan:
    given = {name.replace("_", "-"): value for name, value in values.items()}
    return plan_on_gpus(CONFIGS[model], Config.of(given).engine, card(gib), ranks)


def weights_by_hand(model: str) -> int:
    """In bfloat16, with packed experts and a head in int8 beside its own."""
    layers, experts = LAYERS[model]
    attention = 2 * (H * 80 * D + 80 * D + 64 * D * H + H + 64)  # q, k, v and output with biases, and sinks
    router = 2 * (experts * H + experts)
    mxfp4 = experts * 3 * H * H * 17 // 32  # half a byte per weight, and a scale per 32
    biases = 2 * experts * 3 * H
    norms = 2 * 2 * H
    embedding_and_head, last_norm = 2 * 2 * V * H, 2 * H
    return layers * (attention + router + mxfp4 + biases + norms) + embedding_and_head + last_norm


def sequences_by_hand(model: str, gib: int, tokens: int) -> int:
    """The largest size whose prompts of 1,024 tokens fit beside the weights and the largest step."""
    page = LAYERS[model][0] // 2 * 2 * 8 * D * 64 * 2  # of 64 tokens: half of the layers, K and V, 8 heads, bfloat16
    small = gib <= 24
    screen = V * H + 4 * V  # the head in int8 with a scale per token
    reserve = (5 if small else 6) * GIB // 4
    graphs = min(tokens, 256 if small else 2048)  # tokens of the largest one
    activations = (tokens + graphs) * 2 * (4 * H + 2 * 80 * D + 4 * 3 * H)
    fixed = weights_by_hand(model) + screen + activations + 4 * 131_072 * D + reserve
    limit = (gib - 0.5 - max(0.25, gib / 64)) * GIB  # half a GiB is in use, and a margin stays

    def needed(count: int, logits_of: int) -> int:
        logits = 8 * min(logits_of, 512) * V + 20 * min(logits_of, 128) * V
        return logits + count * (16 + 3) * page

    if small or fixed + needed(512, 512) > limit:
        fixed -= 2 * V * H  # the embedding stays on the host
    padding = page
    return max((count for count in SIZES if fixed + padding + needed(count, count) <= limit), default=0)


@pytest.mark.parametrize(
    ("model", "gib", "tokens", "seqs"),
    [
        ("20b", 16, 1024, 40),
        ("20b", 24, 2048, 288),
        ("20b", 32, 4096, 512),
        ("20b", 48, 4096, 512),
        ("20b", 80, 8192, 512),
        ("20b", 141, 8192, 512),
        ("120b", 80, 8192, 320),
        ("120b", 96, 8192, 512),
        ("120b", 141, 8192, 512),
    ],
)
def test_limits_are_those_of_a_calculation_by_hand(model: str, gib: int, tokens: int, seqs: int) -> None:
    found = plan(model, gib)
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (seqs, tokens)
    assert sequences_by_hand(model, gib, tokens) == seqs
    assert f"limits        {seqs} sequences, {tokens} tokens per step" in str(found)


def test_the_plan_holds_its_sequences_and_stays_within_the_memory() -> None:
    for model, gib in (("20b", 16), ("20b", 40), ("120b", 80), ("120b", 141)):
        found = plan(model, gib)
        assert found.slots[0].count >= (16 + 3) * found.max_num_seqs
        assert found.total <= (gib - 0.5 - max(0.25, gib / 64)) * GIB


@pytest.mark.parametrize(("model", "gib"), [("20b", 12), ("120b", 12), ("120b", 16), ("120b", 24), ("120b", 48)])
def test_what_does_not_fit_is_refused_as_before(model: str, gib: int) -> None:
    with pytest.raises(ValueError, match=r"do not fit .* bytes of the GPU.*--experts-on-host auto"):
        plan(model, gib)
    offloaded = plan(model, gib, experts_on_host="auto")
    assert offloaded.on_host.num_layers
    assert (offloaded.max_num_seqs, offloaded.max_num_batched_tokens) == (64, 8192)


@pytest.mark.long
@pytest.mark.parametrize(("model", "ranks", "least"), [("20b", 1, 16), ("120b", 1, 76), ("120b", 8, 12)])
def test_more_memory_never_means_lower_limits(model: str, ranks: int, least: int) -> None:
    plans = [plan(model, gib, ranks) for gib in range(least, 145, 6)]
    for one, larger in pairwise(plans):
        assert one.max_num_batched_tokens <= larger.max_num_batched_tokens
        # On the smallest GPUs of a class the larger step leaves fewer, as does the embedding above 24 GiB.
        if one.max_num_batched_tokens == larger.max_num_batched_tokens:
            assert one.max_num_seqs <= larger.max_num_seqs
    assert plans[-1].max_num_seqs > plans[0].max_num_seqs


@pytest.mark.parametrize(("model", "sizes"), [("20b", (16, 24, 32, 40, 48, 80, 96, 141)), ("120b", (80, 96, 141, 180))])
def test_gpus_as_they_are_sold_run_more_sequences_with_more_memory(model: str, sizes: tuple[int, ...]) -> None:
    found = [plan(model, gib).max_num_seqs for gib in sizes]
    assert found == sorted(found)


def test_values_that_are_given_are_taken() -> None:
    both = plan("120b", 141, max_num_seqs=100, max_num_batched_tokens=3000)
    assert (both.max_num_seqs, both.max_num_batched_tokens) == (100, 3000)
    sequences = plan("120b", 141, max_num_seqs=2000)
    assert (sequences.max_num_seqs, sequences.max_num_batched_tokens) == (2000, 8192)
    more = plan("120b", 141, max_num_seqs=9000)
    assert (more.max_num_seqs, more.max_num_batched_tokens) == (9000, 9000)
    tokens = plan("120b", 141, max_num_batched_tokens=300)
    assert (tokens.max_num_seqs, tokens.max_num_batched_tokens) == (300, 300)
    with pytest.raises(ValueError, match="the workspace shrinks with --max-num-seqs"):
        plan("20b", 16, max_num_seqs=4096, max_num_batched_tokens=4096)


def test_short_contexts_and_a_given_cache_count() -> None:
    assert plan("120b", 80, max_model_len=512).max_num_seqs > plan("120b", 80).max_num_seqs == 320
    assert plan("120b", 80, max_model_len=100_000).max_num_seqs == 320, "sequences need not use their whole context"
    page = 18 * 2 * 8 * D * 64 * 2
    cache = page * 24 * (16 + 3)
    assert plan("120b", 141, kv_cache_bytes=cache).max_num_seqs == 24
    assert plan("120b", 141, kv_cache_bytes=cache - 1).max_num_seqs == 16
    drafts = replace(Config.of({"kv-cache-bytes": cache}).engine, speculation=SpeculationOptions("ngram"))
    assert plan_on_gpus(CONFIGS["120b"], drafts, card(141)).max_num_seqs == 16, "with drafts a window has a page more"
    assert plan("120b", 141, kv_cache_bytes=page * 200).max_num_seqs == 8, "the least, if none fits"


def test_cpus_keep_their_limits() -> None:
    found = plan_on_cpu(CONFIGS["20b"], Config.of({}).engine, None)
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (64, 1024)


def test_sizes_as_drivers_report_them() -> None:
    reported = {11.6: 1024, 15.6: 1024, 23.7: 2048, 31.8: 4096, 44.4: 4096, 79.1: 8192, 139.8: 8192}
    left = Config.of({}).engine
    for gib, tokens in reported.items():
        assert with_step_tokens(left, int(gib * GIB)).scheduler.max_num_batched_tokens == tokens
    given = EngineOptions()
    assert with_step_tokens(given, 12 * GIB) is given, "limits of a program are its own"
    assert with_sequences(given, lambda options: pytest.fail("nothing is left to plan")) is given


def test_profiles_keep_their_meaning() -> None:
    assert plan("20b", 80, max_num_seqs=16, max_num_batched_tokens=2048).max_num_seqs == 16
    scheduler = Config.of({"max-num-seqs": 16, "max-num-batched-tokens": 2048}).engine.scheduler
    assert scheduler.by_memory == ()
    assert scheduler.most_seqs == 16
    assert Config.of({}).engine.scheduler.most_seqs == 512


def test_engines_that_share_experts_divide_a_step_before_they_meet() -> None:
    config = Config.of({"data-parallel-size": 8, "enable-expert-parallel": True})
    for engine in engines_of(config, 8):
        assert engine.scheduler.max_num_batched_tokens == 1024
        assert engine.scheduler.by_memory == ("max_num_seqs",)
        assert with_step_tokens(engine, 141 * GIB) is engine
    on_cpus = engines_of(config, 0)
    assert {engine.scheduler.max_num_batched_tokens for engine in on_cpus} == {128}


class Ranks:
    """A communicator whose other ranks have told their numbers."""

    def __init__(self, *others: int) -> None:
        self.others = others

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        return torch.cat([part, torch.tensor(self.others, dtype=part.dtype)])


def test_ranks_agree_on_the_least() -> None:
    for others, least in ((Ranks(512, 448), 448), (Ranks(), 480)):
        start = SimpleNamespace(lockstep=OwnSteps(), target=SimpleNamespace(communicator=others))
        assert Start.least_of_all(start, 480) == least  # type: ignore[arg-type]


def test_the_search_takes_the_last_size_that_fits() -> None:
    """A plan that holds a given number of sequences, whatever the number."""
    example, left = plan("20b", 80), Config.of({"max-num-batched-tokens": 4096}).engine
    for held in (1, 8, 11, 12, 100, 511, 512, 10_000):
        slots = replace(example.slots[0], count=held * 19)
        holding = replace(example, slots=[slots])
        chosen = with_sequences(left, lambda options, holding=holding: holding).scheduler  # type: ignore[misc]
        assert chosen.max_num_seqs == max((size for size in SIZES if size <= held), default=8)
        assert chosen.by_memory == ()
