"""Engines that have keys and values in FP8, or whose experts multiply FP8 activations.

Answers, prefixes, offloaded pages, and refusals.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch

from oscine.checkpoint.hub import NANO_FOLDER
from oscine.engine.build import build_engine
from oscine.engine.core.loop import EngineLoop
from oscine.executor.kv.allocate import allocate_kv, groups_of
from oscine.executor.kv.memory import MemoryPlan
from oscine.executor.runner import TorchExecutor
from oscine.executor.start import load
from oscine.executor.start.fit import plan_on_cpu
from oscine.executor.start.stopwatch import Stopwatch
from oscine.kv_dtype import KVDtype
from oscine.ops.platforms import cuda, hopper, native, reference
from oscine.ops.target import Target
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
from tests.tiny import TINY

from .tiny import CPU, PAGE, loop, memory, model, naive_greedy, options, prompt, request, run

FP8 = KVDtype.FP8
SHOWN = ("addition, up to 3 digits", "tool call", "JSON valid for the schema", "recall at 500 tokens")
IN_FP8 = CacheOptions(page_size=PAGE, kv_cache_dtype="fp8")


def plan(cache: CacheOptions = IN_FP8) -> MemoryPlan:
    return replace(memory(40, 40), groups=groups_of(TINY, cache, torch.float32))


def engine(**changes: object) -> EngineLoop:
    asked = options(**changes)
    executor = TorchExecutor(model(), plan(), allocate_kv(plan(), CPU), asked.scheduler.max_num_seqs)
    return loop(executor, asked, executor.memory)


def test_all_groups_are_in_fp8() -> None:
    exact = plan(CacheOptions(page_size=PAGE)).groups
    for group, exact_group in zip(plan().groups, exact, strict=True):
        assert (group.dtype, exact_group.dtype) == (FP8, "float32")
        assert group.page_bytes == exact_group.page_bytes // 4 * 17 // 16


def test_most_greedy_tokens_are_those_of_exact_keys() -> None:
    """Of a random model, whose logits are nearer to each other than those of a trained one."""
    prompts = {str(i): prompt(20 + 9 * i, i + 1) for i in range(6)}
    answers = run(engine(), *(request(name, ids) for name, ids in prompts.items()))
    first = [answers[name].token_ids[0] == naive_greedy(tuple(ids), 1)[0] for name, ids in prompts.items()]
    assert sum(first) >= 5


@pytest.mark.parametrize("max_num_batched_tokens", [64, 17])
def test_a_cached_prefix_gives_the_answer_of_a_cold_run(max_num_batched_tokens: int) -> None:
    ids = prompt(90)
    cold = run(engine(prefix_caching=False, max_num_batched_tokens=max_num_batched_tokens), request("a", ids))["a"]
    warm = engine(max_num_batched_tokens=max_num_batched_tokens)
    run(warm, request("before", ids[:70]))
    found = run(warm, request("a", ids))["a"]
    assert found.token_ids == cold.token_ids
    assert found.num_cached_tokens >= 64


def at(folder: Path) -> EngineOptions:
    (folder / "config.json").write_text(json.dumps(TINY.to_dict()))
    return EngineOptions(model=ModelOptions(random_weights=str(folder), device="cpu"), cache=IN_FP8, quiet=True)


def test_what_has_no_fp8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = at(tmp_path)
    monkeypatch.setattr(native, "unavailable", lambda: None)
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8 needs a GPU, as the C kernels for CPUs have no FP8"):
        load.load_executor(asked, lambda text: None, Stopwatch())
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8 needs a GPU"):
        plan_on_cpu(TINY, asked, None)
    with pytest.raises(ValueError, match="--kv-cache-dtype fp8 needs a model: --executor fake has none"):
        build_engine(EngineOptions(cache=IN_FP8, executor="fake"))
    a100, l4, h200 = (Target(torch.device("cuda"), capability) for capability in ((8, 0), (8, 9), (9, 0)))
    lacking = cuda.PLATFORM.lacking_for_keys
    assert lacking(a100, FP8) == "a GPU of compute capability 8.9, not 8.0"
    assert lacking(l4, FP8) is lacking(a100, KVDtype.BFLOAT16) is hopper.PLATFORM.lacking_for_keys(h200, FP8) is None


def test_the_reference_ops_of_a_cpu_serve_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no C compiler."""
    monkeypatch.setattr(native, "unavailable", lambda: "no compiler")
    said: list[str] = []
    executor = load.load_executor(at(tmp_path), said.append, Stopwatch()).executor
    assert f"{executor.memory.slots[0].count} slots for pages of {PAGE} tokens: " in said[0]
    assert " full in FP8 or " in said[0]
    assert [pages.dtype for pages in executor.kv] == [torch.uint8, torch.uint8]


def test_fp8_activations_are_refused_where_experts_lack_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = ModelOptions(str(NANO_FOLDER), device="cpu", activation_dtype="fp8")
    asked = EngineOptions(rounded, num_threads=1, quiet=True)
    monkeypatch.setattr(native, "unavailable", lambda: None)
    needs = r"--activation-dtype fp8 needs a GPU of compute capability 9.0 \(Hopper\)"
    with pytest.raises(ValueError, match=needs):
        build_engine(asked)
    with pytest.raises(ValueError, match=needs):
        plan_on_cpu(TINY, asked, None)
    with pytest.raises(ValueError, match="--activation-dtype fp8 needs a model: --executor fake has none"):
        build_engine(replace(asked, executor="fake"))
    assert cuda.PLATFORM.lacking_for_fp8_experts(2880) is not None
    lacking = hopper.PLATFORM.lacking_for_fp8_experts
    assert lacking(2880) is reference.PLATFORM.lacking_for_fp8_experts(96) is None
    assert lacking(96) == "a hidden size in multiples of 64, not 96"
    with pytest.raises(ValueError, match="activation-dtype must be auto if --experts-on-host is given"):
        replace(rounded, experts_on_host="2")


@pytest.mark.long
@pytest.mark.parametrize("activation_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.hopper)])
@pytest.mark.needs("tools")
def test_the_embedded_model_answers_right(
    device: str, activation_dtype: Literal["auto", "fp8"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU by the reference ops. Prompts are longer than the window, and than a page."""
    pytest.importorskip("msgspec", reason="the skills of the embedded model need it")
    from training.evaluate import SKILLS, engine_generator
    from training.packing import Encoder
    from training.split import Draw

    monkeypatch.setattr(native, "unavailable", lambda: "no compiler")
    encoder = Encoder(NANO_FOLDER)
    asked = EngineOptions(
        ModelOptions(str(NANO_FOLDER), device=device, max_model_len=2048, activation_dtype=activation_dtype),
        replace(IN_FP8, page_size=64, kv_offload_bytes=None, kv_cache_bytes=1 << 28),
        replace(SchedulerOptions(), max_num_seqs=4, max_num_batched_tokens=512),
        num_threads=1,
        quiet=True,
    )
    generate = engine_generator(build_engine(asked).loop, encoder)
    skills = [skill for skill in SKILLS if skill.name in SHOWN]
    made = [skill.make(Draw(1, held_out=True)) for skill in skills]
    outputs = generate([encoder.prompt(one) for one in made], 160, [None] * len(made))
    for skill, one, output in zip(skills, made, outputs, strict=True):
        assert skill.right(one, encoder.tokenizer.decode(output)), skill.name
