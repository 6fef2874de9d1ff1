from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from oscine.checkpoint.opened import OpenedModel
from oscine.executor.kv import memory
from oscine.executor.kv.allocate import allocate_kv
from oscine.executor.kv.fit import plan_on_gpus
from oscine.executor.kv.late_cache import filled
from oscine.executor.kv.memory import DeviceMemory, MemoryPlan, OnHost, WeightBytes, leave_on_host
from oscine.executor.start import load
from oscine.executor.start import plan as plan_module
from oscine.executor.start.device_memory import Budget, capped, with_cache
from oscine.executor.start.stopwatch import Stopwatch
from oscine.executor.start.weight_bytes import torch_bytes
from oscine.kv_group import Slots
from oscine.model.config import ModelConfig, gpt_oss_20b, gpt_oss_120b
from oscine.model.random_weights import RandomTensors
from oscine.model.tensors import tensor_specs
from oscine.model.weights import load_weights
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions, SpeculationOptions
from tests.model.tiny import checkpoint_bytes
from tests.tiny import TINY

from .tiny import CPU

GPT_20B = gpt_oss_20b()
# 12 layers of each kind, keys and values, 8 heads of 64, page of 64 tokens, bfloat16.
PAGE_20B = 12 * 2 * 8 * 64 * 64 * 2
GIB = 1 << 30
H200 = DeviceMemory(total=150_110_011_392, free=149_000_000_000)


def options(
    kv_cache_bytes: int | None, max_model_len: int | None = None, max_num_seqs: int = 64, max_tokens: int = 1024
) -> EngineOptions:
    return EngineOptions(
        model=ModelOptions(max_model_len=max_model_len),
        cache=CacheOptions(kv_cache_bytes=kv_cache_bytes),
        scheduler=SchedulerOptions(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens),
    )


def plan_memory(config: ModelConfig, asked: EngineOptions, *given: object, **named: object) -> MemoryPlan:
    """A plan whose keys and values are as wide as activations."""
    width = named.get("activation_bytes", given[1] if len(given) > 1 else None)
    groups = config.kv_groups(asked.cache.page_size, {2: "bfloat16", 4: "float32"}[width])  # type: ignore[index]
    return memory.plan_memory(config, groups, asked, *given, **named)  # type: ignore[arg-type]


def test_the_plan_uses_the_bytes_given_and_no_more() -> None:
    """Both kinds of pages have the same size, so a slot is a page of either, and each group could have them all."""
    plan = plan_memory(GPT_20B, options(16 << 30), weights=1, activation_bytes=2)
    assert [group.page_bytes for group in plan.groups] == [PAGE_20B, PAGE_20B]
    count = (16 << 30) // PAGE_20B
    assert plan.slots == [Slots((0, 1), (1, 1), count, PAGE_20B)]
    assert plan.num_pages == [count, count]
    assert plan.kv_bytes == count * PAGE_20B
    assert plan.max_model_len == 131072
    assert plan.total == 1 + plan.kv_bytes + plan.workspace


@pytest.mark.parametrize(("num_seqs", "tokens", "drafts"), [(1, 64, False), (64, 1024, False), (512, 8192, True)])
def test_the_shares_of_groups_do_not_depend_on_the_limits(num_seqs: int, tokens: int, drafts: bool) -> None:
    """Neither sequences nor chunks nor drafts set memory aside for windows."""
    asked = options(16 << 30, None, num_seqs, tokens)
    plan = plan_memory(GPT_20B, replace(asked, speculation=SpeculationOptions("ngram" if drafts else "none")), 1, 2)
    assert plan.num_pages == [(16 << 30) // PAGE_20B] * 2


def test_memory_that_gpu_and_cpu_share_keeps_more_free() -> None:
    """It holds the system, this process and all others."""
    gpus = [memory.DeviceMemory(120 << 30, 115 << 30, unified=unified) for unified in (False, True)]
    assert [gpu.share(options(None)) for gpu in gpus] == [0.958, 0.92]


def test_a_small_cache_shortens_the_context_that_was_not_asked_for_and_says_so() -> None:
    """1 GiB has 682 slots. A sequence has 4 pages of the window: 3 that it touches, and the next one."""
    plan = plan_memory(GPT_20B, options(1 << 30), weights=1, activation_bytes=2)
    assert plan.num_pages == [682, 682]
    assert plan.max_model_len == (682 - 4) * 64 < 131072
    assert "131072" in str(plan)
    assert str(replace(plan, max_model_len=131072)).endswith(" 131072 tokens")
    assert " 682 slots for pages of 64 tokens: full or window-128\n" in str(plan)


def test_a_context_that_was_asked_for_is_the_longest_there_is() -> None:
    plan = plan_memory(GPT_20B, options(1 << 30, max_model_len=30000), weights=1, activation_bytes=2)
    assert plan.max_model_len == 30000
    assert plan.num_pages == [682, 682], "it takes nothing from the windows of others"
    assert plan.kv_bytes == 682 * PAGE_20B


def test_what_does_not_fit_is_refused_with_the_arithmetic() -> None:
    longest = plan_memory(GPT_20B, options(1 << 30, max_model_len=678 * 64), weights=1, activation_bytes=2)
    assert longest.max_model_len == 678 * 64
    with pytest.raises(
        ValueError, match=rf"43456 tokens needs 683 x {PAGE_20B} = {683 * PAGE_20B} bytes .*-bytes is 1073741824$"
    ):
        plan_memory(GPT_20B, options(1 << 30, max_model_len=678 * 64 + 1), weights=1, activation_bytes=2)
    with pytest.raises(ValueError, match=rf"64 tokens needs 2 x {PAGE_20B} "):
        plan_memory(GPT_20B, options(PAGE_20B), weights=1, activation_bytes=2)
    with pytest.raises(ValueError, match="--max-model-len 300000 is above the model's own 131072"):
        plan_memory(GPT_20B, options(64 << 30, max_model_len=300000), weights=1, activation_bytes=2)


def test_three_groups_share_the_memory() -> None:
    """12 layers of full attention, 6 of each window: a slot is one page of the first or two of another."""
    config = replace(GPT_20B, sliding_window=(128, 128, 8192, 128) * 6)
    plan = plan_memory(config, options(1 << 30), weights=1, activation_bytes=2)
    assert [group.window for group in plan.groups] == [None, 8192, 128]
    assert plan.slots == [Slots((0, 1, 2), (1, 2, 2), 682, PAGE_20B)]
    assert plan.num_pages == [682, 1364, 1364]
    # One sequence has 130 pages of the window of 8,192, the next one included, in 65 slots; and 4 of the other, in 2.
    assert plan.max_model_len == (682 - 65 - 2) * 64
    assert " 682 slots for pages of 64 tokens: 1 full or 2 window-8192 or 2 window-128\n" in str(plan)


def test_without_windows_full_attention_has_it_all() -> None:
    plan = plan_memory(replace(TINY, layer_types=("full_attention",) * 2), options(1 << 30), 1, 2)
    assert len(plan.num_pages) == 1
    assert 0 <= (1 << 30) - plan.kv_bytes < plan.groups[0].page_bytes


def test_1024_sequences_of_gpt_oss_120b_on_one_h200() -> None:
    """As --profile max_throughput asks for them. A page of 64 tokens takes 2.25 MiB: 18 layers, keys and values."""
    page, mib = 18 * 2 * 8 * 64 * 64 * 2, 1 << 20
    assert page == 2.25 * mib
    for tokens, least in ((8192, 880), (16384, 860)):
        plan = plan_on_gpus(gpt_oss_120b(), options(None, None, 1024, tokens), H200, hopper=True)
        (slots,) = plan.slots
        assert slots.count == (int(0.964 * H200.total) - plan.weights - plan.workspace) // page
        assert slots.count >= 1024 * (24 + 3), "over their lives, sequences of 1,024/1,024 have 1,536 tokens"
        assert slots.count // (32 + 3) >= least, "at their full length"
        logits, sampling = 2 * 4 * 512 * 201_088, 20 * 128 * 201_088
        activations = 2 * (tokens + 2048) * (4 * 2880 + 2 * 80 * 64 + 4 * 3 * 2880)
        rotary, padding = 4 * 131_072 * 64, page
        assert plan.workspace == logits + sampling + activations + rotary + padding + 1536 * mib


@pytest.mark.parametrize(("gib", "left"), [(24, 1.92), (48, 3.84), (62, 4.96), (63, 5), (80, 5), (141, 5), (180, 5)])
def test_beside_other_processes_8_percent_stay_free_but_no_more_than_5_gib(gib: int, left: float) -> None:
    gpu = DeviceMemory(gib * GIB, (gib - 1) * GIB - 1)
    assert not gpu.is_alone
    assert gpu.total - gpu.allowed(options(None)) == pytest.approx(left * GIB, abs=0.0006 * gpu.total)
    asked = replace(options(None), cache=CacheOptions(gpu_memory_utilization=0.5))
    assert gpu.allowed(asked) == gpu.total // 2


@pytest.mark.parametrize(
    ("gib", "margin"), [(8, 1 / 4), (12, 1 / 4), (16, 1 / 4), (24, 3 / 8), (80, 5 / 4), (128, 2), (192, 3)]
)
def test_alone_on_a_gpu_a_margin_stays_free(gib: int, margin: float) -> None:
    """A 64th, at least 256 MiB, of what is free before the engine takes anything."""
    for in_use in (0, GIB // 2, GIB):
        gpu = DeviceMemory(gib * GIB, gib * GIB - in_use)
        assert gpu.is_alone
        assert gpu.allowed(options(None)) == gpu.free - margin * GIB
    asked = replace(options(None), cache=CacheOptions(gpu_memory_utilization=0.5))
    assert gpu.allowed(asked) == gpu.total // 2
    everything = replace(options(None), cache=CacheOptions(gpu_memory_utilization=1.0))
    assert gpu.allowed(everything) == gpu.free - margin * GIB, "the margin stays in any case"
    limited = DeviceMemory(gib * GIB, gib * GIB - 3 * GIB, capped=True)
    assert limited.is_alone
    assert limited.allowed(options(None)) == limited.free - margin * GIB
    assert not replace(gpu, unified=True).is_alone, "the memory of the CPU has everything else in it"


def test_in_fp8_a_gpu_holds_twice_the_sequences() -> None:
    """gpt-oss-120b on one H200: a token takes 18 layers x 2 x 8 heads x 65 bytes, where it took 128 for 65."""
    asked = options(None, max_num_seqs=512, max_tokens=16384)
    held = {}
    for dtype, slots_of_one in (("auto", 32 + 3), ("fp8", 32 + 3)):
        cache = CacheOptions(kv_cache_dtype=dtype, prefix_caching=False)  # type: ignore[arg-type]
        plan = plan_on_gpus(gpt_oss_120b(), replace(asked, cache=cache), H200, hopper=True)
        held[dtype] = plan.slots[0].count // slots_of_one  # sequences of 2,048 tokens
    assert {group.page_bytes for group in plan.groups} == {18 * 2 * 8 * 64 * 65}
    assert (plan.slots[0].per_slot, plan.slots[0].slot_bytes) == ((1, 1), 18 * 2 * 8 * 64 * 65)
    assert held["fp8"] / held["auto"] == pytest.approx(128 / 65, rel=0.01)
    assert held["auto"] >= 860
    assert " slots for pages of 64 tokens: full in FP8 or window-128 in FP8\n" in str(plan)
    assert plan.total <= H200.total - 5 * GIB + 1e-3 * H200.total


def test_projections_have_a_second_form_where_it_takes_little_of_the_cache() -> None:
    """12 bits per weight: 36 layers x (5,120 x 2,880 + 2,880 x 4,096) x 1.5 bytes, and a scale for each row."""
    second = 36 * ((5120 + 4096) * 2880 * 3 // 2 + 4 * (5120 + 2880))
    told = "with 1.336 GiB of projections in 12 bits, for steps of up to 32 tokens"
    for num_seqs in (1, 512, 513, 1024):  # a lone user has them, however many more could come
        asked = options(None, max_num_seqs=num_seqs)
        plan, without = (plan_on_gpus(gpt_oss_120b(), asked, H200, hopper=hopper) for hopper in (True, False))
        assert plan.weights - without.weights == plan.second_form == second
        assert 0.97 * without.num_pages[0] < plan.num_pages[0] < without.num_pages[0], "what the others pay"
        assert told in str(plan)
    h100 = DeviceMemory(total=85_000_000_000, free=84_500_000_000)
    plan, without = (plan_on_gpus(gpt_oss_120b(), options(None), h100, hopper=hopper) for hopper in (True, False))
    assert plan == without, "it would take a fifth of the cache"
    assert "12 bits" not in str(plan)


def test_a_gpu_gives_the_cache_what_is_left_of_its_share() -> None:
    config, asked = gpt_oss_120b(), options(None, max_num_seqs=1024, max_tokens=8192)
    weights = checkpoint_bytes(config)
    plan = plan_memory(config, asked, weights, 2, H200)
    assert 5 * GIB - 36 * PAGE_20B // 12 <= H200.total - plan.total <= 5 * GIB + 36 * PAGE_20B // 12 + 1e-3 * H200.total
    assert plan.max_model_len == 131072
    assert plan.slots[0].count >= 1024 * (24 + 3), "a thousand sequences of the benchmarks run at once"
    less = plan_memory(config, asked, weights, 2, replace(H200, free=100 << 30))
    page = 36 * PAGE_20B // 24
    assert 0 <= (100 << 30) - H200.total // 64 - less.total < page, "memory of others is not ours, and a margin stays"
    given = plan_memory(config, options(20 << 30), weights, 2, H200)
    assert given.kv_bytes <= 20 << 30


def test_a_share_of_what_is_free_counts_after_weights_and_workspace() -> None:
    config, weights = gpt_oss_20b(), checkpoint_bytes(gpt_oss_20b())
    asked = options(None)
    half = replace(asked, cache=CacheOptions(kv_cache_free_gpu_memory_fraction=0.5, gpu_memory_utilization=0.1))
    plan = plan_memory(config, half, weights, 2, H200)
    free = H200.free - H200.total // 64 - weights - plan.workspace
    assert free / 2 - PAGE_20B < plan.kv_bytes <= free / 2


def test_a_model_that_a_gpu_cannot_hold_is_refused_with_the_arithmetic() -> None:
    config = gpt_oss_120b()
    weights = checkpoint_bytes(config)
    small = DeviceMemory(total=80 << 30, free=60 << 30)  # of which 1.25 GiB stay free
    with pytest.raises(
        ValueError,
        match=rf"{weights} bytes .* {235 << 28} bytes of the GPU: of {80 << 30} .*-utilization 0.938 allows",
    ):
        plan_memory(config, options(None), weights, 2, small)
    with pytest.raises(ValueError, match=rf"a KV cache of {90 << 30} bytes do not fit"):
        plan_memory(config, options(90 << 30), weights, 2, H200)


GB = 10**9


def card(size: int, **changes: bool) -> DeviceMemory:
    """A GPU with a CUDA context and nothing else on it."""
    return DeviceMemory(size, size - 6 * GB // 10, **changes)


def asked_on_host(layers: str | None, max_model_len: int | None = None, **changes: int) -> EngineOptions:
    asked = options(None, max_model_len, **changes)
    return replace(asked, model=replace(asked.model, experts_on_host=layers))


def planned(config: ModelConfig, asked: EngineOptions, gpu: DeviceMemory) -> MemoryPlan:
    """Bytes of the published weights."""
    groups = config.kv_groups(asked.cache.page_size, "bfloat16")
    experts = [expert_bytes(config)] * config.num_hidden_layers
    weights = WeightBytes(checkpoint_bytes(config), 2 * config.vocab_size * config.hidden_size, experts)
    left = leave_on_host(config, groups, asked, weights, 2, gpu)
    return memory.plan_memory(config, groups, asked, weights.total - left.total, 2, gpu, on_host=left)


def expert_bytes(config: ModelConfig) -> int:
    """Bytes per layer: half a byte for each weight of three matrices, and one scale per 32 weights."""
    assert isinstance(config.num_local_experts, int)
    return config.num_local_experts * 3 * config.hidden_size * config.intermediate_size * 17 // 32


def test_20b_with_32k_tokens_fits_16_gb() -> None:
    for gpu in (DeviceMemory(16 * GB, 16 * GB, capped=True), card(16 << 30)):
        plan = planned(GPT_20B, asked_on_host(None, 32768, max_num_seqs=1), gpu)
        assert plan.total <= gpu.free - GIB // 4
        assert plan.max_model_len == 32768
        assert (plan.on_host.embedding, plan.on_host.num_layers) == (2 * 201088 * 2880, 0)
    assert "embedding" in str(plan)


@pytest.mark.parametrize("size", [12 << 30, 16 << 30, 24 << 30])
@pytest.mark.parametrize("config", [GPT_20B, gpt_oss_120b()], ids=["20b", "120b"])
def test_auto_offloads_no_more_layers_than_needed(config: ModelConfig, size: int) -> None:
    asked = asked_on_host("auto", 32768, max_num_seqs=8, max_tokens=4096)
    plan = planned(config, asked, card(size))
    most = card(size).free - max(GIB // 4, size // 64)
    assert most - plan.slots[0].slot_bytes < plan.total <= most
    assert plan.slots[0].count >= 32768 // 64 + 4, "a sequence of that length, and its window"
    left = plan.on_host
    assert left.experts == left.num_layers * expert_bytes(config)
    assert (left.num_layers == 0) == (config is GPT_20B and size >= 16 << 30)
    if left.num_layers:
        assert left.workspace > expert_bytes(config)
        fewer = asked_on_host(str(left.num_layers - 1), 32768, max_num_seqs=8, max_tokens=4096)
        with pytest.raises(ValueError, match=r"do not fit .* bytes of the GPU|needs 516 x "):
            planned(config, fewer, card(size))


@pytest.mark.long
def test_experts_on_the_host_leave_room_for_the_padding_too() -> None:
    """The least GPU on which 9 layers suffice; a byte fewer, and it is 10."""
    asked = asked_on_host("auto", 32768, max_num_seqs=8, max_tokens=4096)

    def num_layers(free: int) -> int:
        gpu = DeviceMemory(16 * GIB, free, capped=True)
        return planned(GPT_20B, asked, gpu).on_host.num_layers

    low, high = 11 * GIB, 14 * GIB
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if num_layers(middle) < 10 else (middle, high)
    assert (num_layers(low), num_layers(high)) == (10, 9)


def test_small_gpus_leave_the_embedding_on_the_host() -> None:
    asked = asked_on_host(None)
    assert planned(GPT_20B, asked, card(24 << 30)).on_host == OnHost(embedding=2 * 201088 * 2880)
    assert planned(GPT_20B, asked, card(32 << 30)).on_host == OnHost()
    unified = planned(GPT_20B, asked, DeviceMemory(24 << 30, 20 << 30, unified=True))
    assert unified.on_host == OnHost(), "GPU and host share one memory"
    with pytest.raises(ValueError, match="--experts-on-host gains nothing here"):
        planned(GPT_20B, asked_on_host("auto"), DeviceMemory(24 << 30, 20 << 30, unified=True))


def test_the_embedding_makes_room_for_sequences_that_may_run() -> None:
    """gpt-oss-120b on 80 GB: 17 GiB hold some 250 sequences of 24 + 3 pages, with or without its 1.1 GiB."""
    config, embedding = gpt_oss_120b(), OnHost(embedding=2 * 201088 * 2880)
    gpu, page = card(80 << 30), 36 * PAGE_20B // 24
    for num_seqs, on_host in ((64, OnHost()), (512, embedding)):
        plan = planned(config, asked_on_host(None, max_num_seqs=num_seqs), gpu)
        assert plan.on_host == on_host
        assert (plan.slots[0].count >= num_seqs * 27) == (num_seqs == 64)
    given = options(100 * 27 * page, max_num_seqs=512)
    assert planned(config, given, gpu).on_host == OnHost(), "it would make no room: the cache has its size"
    short = asked_on_host(None, max_model_len=256, max_num_seqs=512)
    assert planned(config, short, gpu).on_host == OnHost(), "512 sequences of 4 + 3 pages fit"


def test_the_embedding_makes_room_for_answers_too() -> None:
    """gpt-oss-120b on 96 GB: 512 prompts of 16 + 3 pages fit beside the embedding, but not with 16 pages of answers."""
    asked = asked_on_host(None, max_num_seqs=512)
    plan = planned(gpt_oss_120b(), asked, card(96 << 30))
    assert plan.on_host == OnHost(embedding=2 * 201088 * 2880)
    room = plan.slots[0].count - plan.on_host.embedding // plan.slots[0].slot_bytes
    assert 512 * 19 < room < 512 * 35
    assert planned(gpt_oss_120b(), asked, card(141 << 30)).on_host == OnHost(), "with answers they fit"


def test_too_many_layers_and_too_little_host_memory_are_refused() -> None:
    with pytest.raises(ValueError, match="--experts-on-host 25 is above the model's number of layers, 24"):
        planned(GPT_20B, asked_on_host("25"), card(16 << 30))
    left = OnHost(embedding=1 << 30, num_layers=3, experts=4 << 30, workspace=1 << 20)
    with pytest.raises(
        ValueError, match=r"embedding and experts of 3 layers, together 5.0 GiB, do not fit .*: 2.0 GiB are free"
    ):
        plan_memory(GPT_20B, options(None), 1 << 30, 2, card(24 << 30), host_bytes=2 << 30, on_host=left)


def test_offloaded_pages_count_as_host_memory() -> None:
    def asked(size: int) -> EngineOptions:
        return EngineOptions(cache=CacheOptions(kv_cache_bytes=1 << 30, kv_offload_bytes=size))

    on_cpu = plan_memory(GPT_20B, asked(0), 1 << 30, 4)
    free = on_cpu.total + (3 << 30)
    assert "KV offload" not in str(on_cpu)
    assert "KV offload        3.000 GiB  of host memory" in str(
        plan_memory(GPT_20B, asked(3 << 30), 1 << 30, 4, None, free)
    )
    with pytest.raises(ValueError, match=r"\+ 4.0 GiB of --kv-offload-bytes = .* do not fit the memory"):
        plan_memory(GPT_20B, asked(4 << 30), 1 << 30, 4, None, free)
    plan_memory(GPT_20B, asked(3 << 30), 1 << 30, 2, H200, 3 << 30)
    with pytest.raises(ValueError, match=r"--kv-offload-bytes, 4.0 GiB, do not fit the host memory: 3.0 GiB are free"):
        plan_memory(GPT_20B, asked(4 << 30), 1 << 30, 2, H200, 3 << 30)


def test_a_model_that_does_not_fit_names_the_options_that_help() -> None:
    with pytest.raises(ValueError, match=r"--gpu-memory-bytes allows 8000000000, .*--experts-on-host auto"):
        planned(GPT_20B, asked_on_host(None), DeviceMemory(8 * GB, 8 * GB, capped=True))


def test_gpu_memory_bytes_limits_a_large_gpu() -> None:
    assert capped(H200, None) == H200
    assert capped(H200, H200.total + 1) == H200
    assert capped(H200, 16 * GB) == DeviceMemory(16 * GB, 16 * GB, capped=True)
    crowded = DeviceMemory(H200.total, 3 * GB)
    assert capped(crowded, 16 * GB).free == 3 * GB
    assert capped(crowded, 16 * GB, held=5 * GB).free == 8 * GB


def test_cached_files_count_as_free_on_unified_memory() -> None:
    jetson = DeviceMemory(64 << 30, 2 << 30, unified=True)
    assert with_cache(jetson, 50 << 30).free == 50 << 30, "cached files are not in the way"
    assert with_cache(jetson, None) == jetson
    assert with_cache(H200, 50 << 30) == H200


def test_without_a_gpu_the_cache_has_a_gibibyte() -> None:
    assert plan_memory(GPT_20B, options(None), 1, 2) == plan_memory(GPT_20B, options(1 << 30), 1, 2)


def test_the_cache_that_is_left_decides_the_context() -> None:
    """The plan is for more or less than there is in the end."""
    plan = plan_memory(GPT_20B, options(None), 1 << 30, 2, card(16 << 30))
    for count, tokens in ((682, 678 * 64), (5, 128), (40_000, 131072)):
        found = filled(plan, GPT_20B, None, count)
        assert (found.kv_bytes, found.max_model_len) == (count * PAGE_20B, tokens)
        assert found.max_num_seqs == plan.max_num_seqs
    assert filled(plan, GPT_20B, 678 * 64, 682).max_model_len == 678 * 64
    with pytest.raises(
        ValueError, match=r"the GPU has 1\.00 GiB for the KV cache, too little .* 43393 tokens; .*num-seqs"
    ):
        filled(plan, GPT_20B, 678 * 64 + 1, 682)
    for count in (-3, 0, 1):
        with pytest.raises(
            ValueError, match=r"the GPU has 0\.00 GiB for the KV cache, too little for a sequence of 1 to"
        ):
            filled(plan, GPT_20B, None, count)


@pytest.mark.parametrize(
    ("asked", "others", "allowed"),
    [
        ({}, 0, 80 - 0.5 - 1.25),  # alone: a 64th stays free
        ({}, 2, 80 * 0.938 - 1),  # 5 GiB for others, and a GiB of what is in use
        ({}, 30, 49.5 - 1.25),  # all that is free, but for the margin
        ({"gpu_memory_utilization": 0.5}, 0, 40 - 0.5),
        ({"gpu_memory_utilization": 1.0}, 0, 79.5 - 1.25),
        ({"gpu_memory_bytes": 40 * GIB}, 0, 40 * 63 / 64 - 0.5),
        ({"gpu_memory_bytes": 40 * GIB}, 60, 19.5 - 40 / 64),
        ({"kv_cache_free_gpu_memory_fraction": 0.5}, 30, 49.5 - 1.25),
    ],
)
def test_what_an_engine_may_take_leaves_the_margin(
    asked: dict[str, float], others: int, allowed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU of 80 GiB with a context of half a GiB. The cache gets what is left of it, or the share of that."""
    free = 80 * GIB - GIB // 2 - others * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(is_integrated=False))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    budget = Budget(torch.device("cuda", 0), EngineOptions(cache=CacheOptions(**asked)))  # type: ignore[arg-type]
    share = asked.get("kv_cache_free_gpu_memory_fraction", 1)
    assert budget.cache_bytes(0) == pytest.approx(share * allowed * GIB, abs=2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free - 10 * GIB, 80 * GIB))
    assert budget.taken == 10 * GIB
    assert budget.cache_bytes(GIB) == pytest.approx(share * (allowed - 9) * GIB, abs=2)


def test_planned_bytes_are_allocated_bytes() -> None:
    weights = load_weights(TINY, RandomTensors(TINY, 3, CPU), CPU, torch.float32)
    plan = plan_memory(TINY, options(1 << 22), weights=0, activation_bytes=4)
    kv = allocate_kv(plan, weights.embed_VH.device)
    for pages, group, count in zip(kv, plan.groups, plan.num_pages, strict=True):
        assert pages.nbytes == group.page_bytes * count
        assert pages.untyped_storage().nbytes() == plan.kv_bytes
        assert pages.untyped_storage().data_ptr() == kv[0].untyped_storage().data_ptr(), "they share the memory"
    held = [weights.embed_VH, weights.norm_H, weights.head_VH]
    for layer in weights.layers:
        held += [getattr(layer, name) for name in layer.__slots__ if name != "experts"]
        held += [getattr(layer.experts, name) for name in layer.experts.__slots__]
    assert sum(tensor.nbytes for tensor in held) == sum(
        torch_bytes(tensor_specs(TINY), weights.embed_VH.dtype).values()
    )


def test_a_model_on_a_cpu_must_fit_the_memory() -> None:
    weights = sum(torch_bytes(tensor_specs(gpt_oss_120b()), torch.float32).values())
    asked = options(None)
    plan = plan_memory(gpt_oss_120b(), asked, weights, activation_bytes=4)
    assert plan_memory(gpt_oss_120b(), asked, weights, 4, host_bytes=plan.total) == plan
    said = r"weights of 6\d\.\d GiB \+ KV cache of 1\.0 GiB \+ workspace of 1\.\d GiB = 6.* GiB .* 23\.0 GiB are free"
    with pytest.raises(ValueError, match=said):
        plan_memory(gpt_oss_120b(), asked, weights, 4, host_bytes=23 << 30)
    assert plan_memory(gpt_oss_120b(), asked, weights, 4, H200, host_bytes=1), "on a GPU it is the GPU's that counts"


def test_nothing_is_loaded_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_module, "available_bytes", lambda: 1 << 20)
    monkeypatch.setattr(OpenedModel, "load", lambda self, **given: pytest.fail("the weights are loaded"))
    with pytest.raises(ValueError, match=r"do not fit the memory: 0\.0 GiB are free"):
        load.load_executor(EngineOptions(model=ModelOptions(device="cpu")), lambda text: None, Stopwatch())
