from dataclasses import replace

import pytest
import torch

from oscine.checkpoint.opened import OpenedModel
from oscine.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions, SpeculationOptions
from oscine.executor.kv import memory
from oscine.executor.kv.allocate import allocate_kv
from oscine.executor.kv.memory import DeviceMemory, MemoryPlan, OnHost, WeightBytes, leave_on_host
from oscine.executor.start import load
from oscine.executor.start.device_memory import capped, with_cache
from oscine.executor.start.fit import plan_on_gpus
from oscine.executor.start.load import weight_bytes
from oscine.executor.start.stopwatch import Stopwatch
from oscine.model.config import ModelConfig, gpt_oss_20b, gpt_oss_120b
from oscine.model.random_weights import RandomTensors
from oscine.model.weights import load_weights
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
    plan = plan_memory(GPT_20B, options(16 << 30), weights=1, activation_bytes=2)
    assert [group.page_bytes for group in plan.groups] == [PAGE_20B, PAGE_20B]
    assert plan.kv_bytes == sum(plan.num_pages) * PAGE_20B
    assert 0 <= (16 << 30) - plan.kv_bytes < PAGE_20B
    assert plan.max_model_len == 131072
    # 64 sequences of 3 pages, 16 of a chunk, and 64 cached windows of 3.
    assert plan.num_pages[1] == 64 * 3 + 16 + 64 * 3
    assert plan.total == 1 + plan.kv_bytes + plan.workspace


def test_two_chunks_of_one_prompt_find_sliding_pages() -> None:
    plan = plan_memory(GPT_20B, options(16 << 30, max_num_seqs=2, max_tokens=4096), weights=1, activation_bytes=2)
    assert plan.num_pages[1] == 3 + 2 * 64 + 2 * 3


def test_with_drafts_a_sequence_may_hold_one_more_page_of_a_window() -> None:
    asked = replace(options(16 << 30), speculation=SpeculationOptions("ngram"))
    assert plan_memory(GPT_20B, asked, weights=1, activation_bytes=2).num_pages[1] == 64 * 4 + 16 + 64 * 3


def test_memory_that_gpu_and_cpu_share_keeps_more_free() -> None:
    """It holds the system, this process and all others."""
    gpus = [memory.DeviceMemory(120 << 30, 115 << 30, unified=unified) for unified in (False, True)]
    assert [gpu.share(options(None)) for gpu in gpus] == [0.958, 0.92]


@pytest.mark.parametrize(
    ("max_num_seqs", "gib", "cached"),
    [(512, 30, 256), (640, 30, 128), (640, 60, 256), (1024, 30, 0), (1024, 50, 0), (1024, 90, 256)],
)
def test_above_768_windows_the_plan_has_as_many_as_sequences_fit(max_num_seqs: int, gib: int, cached: int) -> None:
    """gpt-oss-20b: a sequence of 2,048 tokens has 32 pages of full attention."""
    plan = plan_memory(GPT_20B, options(gib << 30, None, max_num_seqs, 8192), weights=1, activation_bytes=2)
    assert plan.num_pages[1] == 3 * max_num_seqs + 128 + 3 * cached
    assert max_num_seqs + cached <= max(768, plan.num_pages[0] // 32) or not cached


def test_a_small_cache_shortens_the_context_that_nobody_asked_for_and_says_so() -> None:
    plan = plan_memory(GPT_20B, options(1 << 30), weights=1, activation_bytes=2)
    assert plan.num_pages[0] == plan.num_pages[1]  # the windows of 64 sequences would take more
    assert plan.max_model_len == plan.num_pages[0] * 64 < 131072
    assert "131072" in str(plan)
    assert str(replace(plan, max_model_len=131072)).endswith(" 131072 tokens")


def test_a_context_that_was_asked_for_is_given_at_the_expense_of_sliding_pages() -> None:
    plan = plan_memory(GPT_20B, options(1 << 30, max_model_len=30000), weights=1, activation_bytes=2)
    assert plan.max_model_len == 30000
    assert plan.num_pages[0] == 469
    assert plan.kv_bytes <= 1 << 30


def test_what_does_not_fit_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(
        ValueError, match=rf"44032 tokens.* 688 full pages x {PAGE_20B} bytes \+ 4 window-128 .*1073741824"
    ):
        plan_memory(GPT_20B, options(1 << 30, max_model_len=44000), weights=1, activation_bytes=2)
    with pytest.raises(ValueError, match=r"64 tokens.* 1 full pages"):
        plan_memory(GPT_20B, options(1 << 20), weights=1, activation_bytes=2)
    with pytest.raises(ValueError, match="--max-model-len 300000 is above the model's own 131072"):
        plan_memory(GPT_20B, options(64 << 30, max_model_len=300000), weights=1, activation_bytes=2)


def test_every_window_gets_what_it_can_use_and_full_attention_the_rest() -> None:
    config = replace(GPT_20B, sliding_window=(128, 128, 8192, 128) * 6)
    plan = plan_memory(config, options(16 << 30, max_num_seqs=8), weights=1, activation_bytes=2)
    assert [group.window for group in plan.groups] == [None, 8192, 128]
    assert plan.num_pages[1] == 8 * 129 + 16 + 8 * 129
    assert plan.num_pages[2] == 8 * 3 + 16 + 8 * 3
    assert 0 <= (16 << 30) - plan.kv_bytes < PAGE_20B
    few = plan_memory(config, options(1 << 30), weights=1, activation_bytes=2)
    assert max(few.num_pages) - min(few.num_pages) <= 1, "none has what it can use"
    long = plan_memory(config, options(1 << 30, max_model_len=30000), weights=1, activation_bytes=2)
    assert (long.num_pages[0], long.max_model_len) == (469, 30000)
    assert long.num_pages[1] >= 130
    assert long.num_pages[2] >= 4
    assert long.kv_bytes <= 1 << 30


def test_without_windows_full_attention_has_it_all() -> None:
    plan = plan_memory(replace(TINY, layer_types=("full_attention",) * 2), options(1 << 30), 1, 2)
    assert len(plan.num_pages) == 1
    assert 0 <= (1 << 30) - plan.kv_bytes < plan.groups[0].page_bytes


def test_1024_sequences_of_gpt_oss_120b_on_one_h200() -> None:
    """As --profile max_throughput asks for them. A page of 64 tokens takes 2.25 MiB: 18 layers, keys and values."""
    page, mib = 18 * 2 * 8 * 64 * 64 * 2, 1 << 20
    assert page == 2.25 * mib
    for tokens, least in ((8192, 870), (16384, 854)):
        plan = plan_on_gpus(gpt_oss_120b(), options(None, None, 1024, tokens), H200, hopper=True)
        assert plan.num_pages[0] // 32 >= least
        assert plan.num_pages[1] == 3 * 1024 + tokens // 64, "full attention holds fewer sequences than may run"
        logits, sampling = 2 * 4 * 512 * 201_088, 20 * 128 * 201_088
        activations = 2 * (tokens + 2048) * (4 * 2880 + 2 * 80 * 64 + 4 * 3 * 2880)
        rotary, padding = 4 * 131_072 * 64, 2 * page
        assert plan.workspace == logits + sampling + activations + rotary + padding + 1536 * mib


@pytest.mark.parametrize(
    ("gib", "left"), [(12, 0.96), (24, 1.92), (48, 3.84), (62, 4.96), (63, 5), (80, 5), (141, 5), (180, 5)]
)
def test_by_default_a_gpu_keeps_8_percent_free_but_no_more_than_5_gib(gib: int, left: float) -> None:
    gpu = DeviceMemory(gib * GIB, gib * GIB)
    assert gpu.total - gpu.allowed(options(None)) == pytest.approx(left * GIB, abs=0.0006 * gpu.total)
    assert replace(gpu, free=GIB).allowed(options(None)) == GIB
    asked = replace(options(None), cache=CacheOptions(gpu_memory_utilization=0.5))
    assert gpu.allowed(asked) == gpu.total // 2


def test_in_fp8_a_gpu_holds_twice_the_sequences() -> None:
    """gpt-oss-120b on one H200: a token takes 18 layers x 2 x 8 heads x 65 bytes, where it took 128 for 65."""
    asked = options(None, max_num_seqs=1024, max_tokens=16384)
    held = {}
    for dtype in ("auto", "fp8"):
        cache = CacheOptions(kv_cache_dtype=dtype, prefix_caching=False)  # type: ignore[arg-type]
        plan = plan_on_gpus(gpt_oss_120b(), replace(asked, cache=cache), H200, hopper=True)
        held[dtype] = plan.num_pages[0] * 64 // 2048
        assert plan.num_pages[1] == 1024 * 3 + 256, "windows are as they were"
    assert plan.groups[0].page_bytes == 18 * 2 * 8 * 64 * 65
    assert plan.groups[1].page_bytes == 18 * 2 * 8 * 64 * 128
    assert held["fp8"] >= max(1680, int(1.96 * held["auto"]))
    assert held["auto"] >= 854
    assert " pages of 64 tokens in FP8\n  KV window-128 " in str(plan)
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
    assert plan.num_pages[0] * 64 > 1024 * 1400, "a thousand sequences of the benchmarks run at once"
    assert plan.num_pages[1] >= 1024 * 3
    less = plan_memory(config, asked, weights, 2, replace(H200, free=100 << 30))
    assert less.total <= 100 << 30, "somebody else's memory is not ours"
    given = plan_memory(config, options(20 << 30), weights, 2, H200)
    assert given.kv_bytes <= 20 << 30


def test_a_share_of_what_is_free_counts_after_weights_and_workspace() -> None:
    config, weights = gpt_oss_20b(), checkpoint_bytes(gpt_oss_20b())
    asked = options(None)
    half = replace(asked, cache=CacheOptions(kv_cache_free_gpu_memory_fraction=0.5, gpu_memory_utilization=0.1))
    plan = plan_memory(config, half, weights, 2, H200)
    free = H200.free - weights - plan.workspace
    assert free / 2 - 2 * PAGE_20B < plan.kv_bytes <= free / 2


def test_a_model_that_a_gpu_cannot_hold_is_refused_with_the_arithmetic() -> None:
    config = gpt_oss_120b()
    weights = checkpoint_bytes(config)
    small = DeviceMemory(total=80 << 30, free=60 << 30)
    with pytest.raises(
        ValueError,
        match=rf"{weights} bytes .* {60 << 30} bytes of the GPU: of {80 << 30} .*--gpu-memory-utilization 0.938 allows",
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
        assert plan.total <= 16 * GB
        assert plan.num_pages[0] * 64 >= 32768
        assert (plan.on_host.embedding, plan.on_host.num_layers) == (2 * 201088 * 2880, 0)
    assert "embedding" in str(plan)


@pytest.mark.parametrize("size", [12 << 30, 16 << 30, 24 << 30])
@pytest.mark.parametrize("config", [GPT_20B, gpt_oss_120b()], ids=["20b", "120b"])
def test_auto_offloads_no_more_layers_than_needed(config: ModelConfig, size: int) -> None:
    asked = asked_on_host("auto", 32768, max_num_seqs=8, max_tokens=4096)
    plan = planned(config, asked, card(size))
    assert plan.total <= 0.92 * size
    assert plan.num_pages[0] * 64 >= 32768
    left = plan.on_host
    assert left.experts == left.num_layers * expert_bytes(config)
    assert (left.num_layers == 0) == (config is GPT_20B and size >= 16 << 30)
    if left.num_layers:
        assert left.workspace > expert_bytes(config)
        fewer = asked_on_host(str(left.num_layers - 1), 32768, max_num_seqs=8, max_tokens=4096)
        assert num_window_pages(config, fewer, card(size)) < plan.num_pages[1]


def num_window_pages(config: ModelConfig, asked: EngineOptions, gpu: DeviceMemory) -> int:
    """Pages of the window group in the plan; 0 if the model does not fit."""
    try:
        return planned(config, asked, gpu).num_pages[1]
    except ValueError:
        return 0


def test_small_gpus_leave_the_embedding_on_the_host() -> None:
    asked = asked_on_host(None)
    assert planned(GPT_20B, asked, card(24 << 30)).on_host == OnHost(embedding=2 * 201088 * 2880)
    assert planned(GPT_20B, asked, card(32 << 30)).on_host == OnHost()
    unified = planned(GPT_20B, asked, DeviceMemory(24 << 30, 20 << 30, unified=True))
    assert unified.on_host == OnHost(), "GPU and host share one memory"
    with pytest.raises(ValueError, match="--experts-on-host gains nothing here"):
        planned(GPT_20B, asked_on_host("auto"), DeviceMemory(24 << 30, 20 << 30, unified=True))


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


def test_planned_bytes_are_allocated_bytes() -> None:
    weights = load_weights(TINY, RandomTensors(TINY, 3, CPU), CPU, torch.float32)
    plan = plan_memory(TINY, options(1 << 22), weights=0, activation_bytes=4)
    kv = allocate_kv(plan, weights.embed_VH.device)
    assert [pages.nbytes for pages in kv] == [
        g.page_bytes * n for g, n in zip(plan.groups, plan.num_pages, strict=True)
    ]
    assert sum(pages.nbytes for pages in kv) == plan.kv_bytes
    held = [weights.embed_VH, weights.norm_H, weights.head_VH]
    for layer in weights.layers:
        held += [getattr(layer, name) for name in layer.__slots__ if name != "experts"]
        held += [getattr(layer.experts, name) for name in layer.experts.__slots__]
    assert sum(tensor.nbytes for tensor in held) == weight_bytes(TINY, weights.embed_VH.dtype)


def test_a_model_on_a_cpu_must_fit_the_memory() -> None:
    weights = weight_bytes(gpt_oss_120b(), torch.float32)
    asked = options(None)
    plan = plan_memory(gpt_oss_120b(), asked, weights, activation_bytes=4)
    assert plan_memory(gpt_oss_120b(), asked, weights, 4, host_bytes=plan.total) == plan
    said = r"weights of 6\d\.\d GiB \+ KV cache of 1\.0 GiB \+ workspace of 1\.\d GiB = 6.* GiB .* 23\.0 GiB are free"
    with pytest.raises(ValueError, match=said):
        plan_memory(gpt_oss_120b(), asked, weights, 4, host_bytes=23 << 30)
    assert plan_memory(gpt_oss_120b(), asked, weights, 4, H200, host_bytes=1), "on a GPU it is the GPU's that counts"


def test_nothing_is_loaded_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "available_bytes", lambda: 1 << 20)
    monkeypatch.setattr(OpenedModel, "load", lambda self, **given: pytest.fail("the weights are loaded"))
    with pytest.raises(ValueError, match=r"do not fit the memory: 0\.0 GiB are free"):
        load.load_executor(EngineOptions(model=ModelOptions(device="cpu")), lambda text: None, Stopwatch())
