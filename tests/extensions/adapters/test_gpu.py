"""Adapters on a GPU: against merged models in bfloat16, in CUDA graphs, and while others come and go."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from oscine.checkpoint.hub import NANO_FOLDER, config_at
from oscine.extensions.adapters.device import DeviceAdapters
from oscine.extensions.adapters.host import HostAdapters
from oscine.extensions.adapters.kernels import Kernels
from oscine.extensions.adapters.layout import Layout, Packing
from oscine.llm import AsyncLLM
from oscine.model.config import gpt_oss_20b
from oscine.model.gpt_oss import GptOss
from oscine.model.tensors import WHOLE, tensor_specs
from oscine.ops.moe.hopper_repack import UNIT, gate_up_order
from oscine.ops.platforms.table import choose, platform_of, resolve
from oscine.ops.target import Target
from oscine.settings.adapters import TARGETS
from oscine.types import AdapterPlace, NewSequence, SamplingParams
from tests.model.test_gpu_model import build
from tests.model.tiny import Sequence as Tokens
from tests.model.tiny import Stepper, random_tokens
from tests.ops.bound import reference_ops

from .adapters import ATTENTION, EXPERTS, merged, random_adapter, write_peft
from .test_merged import AdaptedStepper

pytestmark = pytest.mark.gpu
LENGTHS = (300, 40, 70)
STEPS = (((0, 250), (1, 1), (2, 33)), ((0, 1), (1, 1), (2, 1)), ((1, 1), (0, 20)))
TEXT = "What is 27 + 58?"


def logits(stepper: Stepper) -> Tensor:
    sequences = [Tokens(random_tokens(stepper.model.config, n, seed=i), 0) for i, n in enumerate(LENGTHS)]
    found = []
    for step in STEPS:
        ordered = sorted(step, key=lambda work: work[1])  # single tokens first
        found += [rows.cpu() for rows in stepper.step(*((sequences[i], count) for i, count in ordered))]
    return torch.cat(found)


@pytest.mark.parametrize("names", [ATTENTION, (*ATTENTION, *EXPERTS), ("router", *EXPERTS)])
def test_the_error_in_bfloat16_is_at_most_twice_that_of_the_merged_model(names: Sequence[str], tmp_path: Path) -> None:
    whole = gpt_oss_20b()
    config = replace(whole, num_hidden_layers=2, layer_types=whole.layer_types[:2])
    adapter = random_adapter(config, names, rank=16, size=0.3, dtype=torch.bfloat16)
    truth = logits(Stepper(merged(build(config, torch.float32, reference_ops()), adapter)))
    plain = logits(Stepper(merged(build(config, torch.bfloat16, reference_ops()), adapter)))
    target = Target.of(torch.device("cuda"))
    choice = choose(platform_of(target).name)
    base = build(config, torch.bfloat16, resolve(target, choice))
    adapters = on_gpu(base, write_peft(tmp_path, adapter), target, resolve(target, choice, leave_choice=False))
    for sequence in range(len(LENGTHS)):
        adapters.assign(NewSequence(sequence, [1], 1, 0, [], SamplingParams(1), adapter=AdapterPlace(1, 0)))
    ours = logits(AdaptedStepper(adapters.adapted(base), adapters))
    assert (ours - truth).norm() <= 2 * (plain - truth).norm()


def on_gpu(base: GptOss, folder: Path, target: Target, ops: object) -> DeviceAdapters:
    order = None
    if platform_of(target).name == "hopper":
        order = gate_up_order(base.config.intermediate_size, torch.device("cpu"))
        order = torch.nn.functional.pad(order, (0, -len(order) % UNIT), value=-1)
    layout = Layout.of(base.config, TARGETS, 16, None if order is None else len(order))
    packing = Packing(layout, base.config, WHOLE, order)
    host = HostAdapters(packing, tensor_specs(base.config), TARGETS, 16, torch.bfloat16, target.device)
    host.begin(0, str(folder)).result()
    memory = torch.zeros(2, layout.size, dtype=torch.bfloat16, device=target.device)
    return DeviceAdapters(host, layout, memory, 16, Kernels(target), ops)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder, config = tmp_path_factory.mktemp("adapters"), config_at(NANO_FOLDER)
    parts = (ATTENTION, (*ATTENTION, "router", *EXPERTS), EXPERTS)
    made = [random_adapter(config, names, seed=i, size=0.5) for i, names in enumerate(parts)]
    return [write_peft(folder / str(i), adapter) for i, adapter in enumerate(made)]


async def first_logprobs(llm: AsyncLLM, models: Sequence[str], count: int = 4) -> list[float]:
    """Of the first token of a request for each model, all at once."""

    async def one(model: str) -> float:
        parameters = {"max_tokens": count, "temperature": 0, "logprobs": 1, "ignore_eos": True}
        (choice,) = (await llm.generate(TEXT, model=model, **parameters)).choices
        assert choice.logprobs is not None
        assert len(choice.token_ids) == count
        return float(choice.logprobs.token_logprobs[0] or 0.0)

    return [*await asyncio.gather(*map(one, models))]


def options(folders: list[Path], **more: object) -> dict[str, object]:
    modules = [f"{i}={folder}" for i, folder in enumerate(folders)]
    return {"enable_lora": True, "lora_modules": modules, "device": "cuda", "no_prefix_caching": True, **more}


def test_graphs_serve_any_mix_of_adapters(folders: list[Path]) -> None:
    models = ["0", "oscine-nano", "1", "2", "1", "0", "oscine-nano", "2"]

    async def run(**more: object) -> list[float]:
        async with AsyncLLM(**options(folders, max_loras=3, **more)) as llm:  # type: ignore[arg-type]
            alone = [(await first_logprobs(llm, [model], 40))[0] for model in models[:4]]
            mixed = await first_logprobs(llm, models, 40)
            assert mixed == pytest.approx([alone[models[:4].index(model)] for model in models], abs=0.1)
            return alone

    graphs, eager = asyncio.run(run()), asyncio.run(run(enforce_eager=True))
    assert graphs == pytest.approx(eager, abs=0.1)
    assert len({round(found, 1) for found in graphs}) > 1


def test_adapters_of_the_attention_leave_the_choice_of_experts_to_them(folders: list[Path]) -> None:
    """The same answers as where adapters of experts could come, and so the choice is known before the experts run."""

    async def run(targets: Sequence[str]) -> list[float]:
        async with AsyncLLM(**options(folders[:1], lora_target_modules=list(targets), kv_cache_bytes=1 << 26)) as llm:  # type: ignore[arg-type]
            return [(await first_logprobs(llm, [model], 40))[0] for model in ("0", "oscine-nano")]

    own, any_targets = asyncio.run(run(["attention"])), asyncio.run(run(TARGETS))
    assert own == pytest.approx(any_targets, abs=0.1)


def test_adapters_come_and_go_under_streams(folders: list[Path]) -> None:
    """Forty loads with two places; nothing stays behind, and no stream ends early."""

    async def run() -> None:
        async with AsyncLLM(**options(folders[:1], lora_target_modules=list(TARGETS), max_loras=2)) as llm:  # type: ignore[arg-type]
            streams = asyncio.gather(*(first_logprobs(llm, ["0", "oscine-nano"], 400) for _ in range(8)))
            for i in range(40):
                await llm.load_adapter("other", folders[1 + i % 2])
                await first_logprobs(llm, ["other"])
                await llm.unload_adapter("other")
            found = await streams
            assert max(one[0] for one in found) - min(one[0] for one in found) < 0.1
            assert max(one[1] for one in found) - min(one[1] for one in found) < 0.1
            await first_logprobs(llm, ["oscine-nano"])
            assert llm._served.engine.stats.adapters_loaded == 1

    asyncio.run(run())
