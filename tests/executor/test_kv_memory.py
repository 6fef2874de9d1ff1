from dataclasses import replace

import pytest
import torch

from oscine.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
from oscine.executor.kv import memory
from oscine.executor.kv.allocate import allocate_kv
from oscine.executor.kv.memory import DeviceMemory, MemoryPlan
from oscine.executor.start import load
from oscine.executor.start.load import weight_bytes
from oscine.executor.start.stopwatch import Stopwatch
from oscine.model.config import ModelConfig, gpt_oss_20b, gpt_oss_120b
from oscine.model.opened import OpenedModel
from tests.model.tiny import checkpoint_bytes

from .tiny import CONFIG, model

GPT_20B = gpt_oss_20b()
# 12 layers of each kind, keys and values, 8 heads of 64, page of 64 tokens, bfloat16.
PAGE_20B = 12 * 2 * 8 * 64 * 64 * 2
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
    """With keys and values as wide as activations."""
    width = named.get("activation_bytes", given[1] if len(given) > 1 else None)
    groups = config.kv_groups(asked.cache.page_size, {2: "bfloat16", 4: "float32"}[width])  # type: ignore[index]
    return memory.plan_memory(config, groups, asked, *given, **named)  # type: ignore[arg-type]


def test_the_plan_uses_the_bytes_given_and_no_more() -> None:
    plan = plan_memory(GPT_20B, options(16 << 30), weights=1, activation_bytes=2)
    assert [group.page_bytes for group in plan.groups] == [PAGE_20B, PAGE_20B]
    assert plan.kv_bytes == sum(plan.num_pages) * PAGE_20B
    assert 0 <= (16 << 30) - plan.kv_bytes < PAGE_20B
    assert plan.max_model_len == 131072
    # 64 sequences of 3 + 1 pages, 16 of a chunk, and 64 cached windows of 3.
    assert plan.num_pages[1] == 64 * 4 + 16 + 64 * 3
    assert plan.total == 1 + plan.kv_bytes + plan.workspace


def test_two_chunks_of_one_prompt_find_sliding_pages() -> None:
    plan = plan_memory(GPT_20B, options(16 << 30, max_num_seqs=2, max_tokens=4096), weights=1, activation_bytes=2)
    assert plan.num_pages[1] == 4 + 2 * 64 + 2 * 3


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
    assert plan.num_pages[1] == 8 * 130 + 16 + 8 * 129
    assert plan.num_pages[2] == 8 * 4 + 16 + 8 * 3
    assert 0 <= (16 << 30) - plan.kv_bytes < PAGE_20B
    few = plan_memory(config, options(1 << 30), weights=1, activation_bytes=2)
    assert max(few.num_pages) - min(few.num_pages) <= 1, "none has what it can use"
    long = plan_memory(config, options(1 << 30, max_model_len=30000), weights=1, activation_bytes=2)
    assert (long.num_pages[0], long.max_model_len) == (469, 30000)
    assert long.num_pages[1] >= 130
    assert long.num_pages[2] >= 4
    assert long.kv_bytes <= 1 << 30


def test_without_windows_full_attention_has_it_all() -> None:
    plan = plan_memory(replace(CONFIG, layer_types=("full_attention",) * 4), options(1 << 30), 1, 2)
    assert len(plan.num_pages) == 1
    assert 0 <= (1 << 30) - plan.kv_bytes < plan.groups[0].page_bytes


def test_a_gpu_gives_the_cache_what_is_left_of_its_share() -> None:
    config, asked = gpt_oss_120b(), options(None, max_num_seqs=1024, max_tokens=8192)
    weights = checkpoint_bytes(config)
    plan = plan_memory(config, asked, weights, 2, H200)
    ours = int(0.92 * H200.total)
    assert ours - 36 * PAGE_20B // 12 < plan.total <= ours
    assert plan.max_model_len == 131072
    assert plan.num_pages[0] * 64 > 1024 * 1400, "a thousand sequences of the benchmarks run at once"
    assert plan.num_pages[1] >= 1024 * 4
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
        match=rf"{weights} bytes .* {60 << 30} bytes of the GPU: of {80 << 30} .*--gpu-memory-utilization 0.92 allows",
    ):
        plan_memory(config, options(None), weights, 2, small)
    with pytest.raises(ValueError, match=rf"a KV cache of {90 << 30} bytes do not fit"):
        plan_memory(config, options(90 << 30), weights, 2, H200)


def test_without_a_gpu_the_cache_has_a_gibibyte() -> None:
    assert plan_memory(GPT_20B, options(None), 1, 2) == plan_memory(GPT_20B, options(1 << 30), 1, 2)


def test_planned_bytes_are_allocated_bytes() -> None:
    weights = model().weights
    plan = plan_memory(CONFIG, options(1 << 22), weights=0, activation_bytes=4)
    kv = allocate_kv(plan, weights.embed_VH.device)
    assert [pages.nbytes for pages in kv] == [
        g.page_bytes * n for g, n in zip(plan.groups, plan.num_pages, strict=True)
    ]
    assert sum(pages.nbytes for pages in kv) == plan.kv_bytes
    held = [weights.embed_VH, weights.norm_H, weights.head_VH]
    for layer in weights.layers:
        held += [getattr(layer, name) for name in layer.__slots__ if name != "experts"]
        held += [getattr(layer.experts, name) for name in layer.experts.__slots__]
    assert sum(tensor.nbytes for tensor in held) == weight_bytes(CONFIG, weights.embed_VH.dtype)


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
