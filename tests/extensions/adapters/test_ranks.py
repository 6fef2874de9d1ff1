"""Adapters of a model on two ranks, of two engines, and of a cluster."""

from pathlib import Path

import pytest

from oscine.checkpoint.hub import NANO_FOLDER, config_at
from oscine.extensions.cluster.cli.deployment_file import read_deployment
from oscine.llm import LLM

from .adapters import ATTENTION, EXPERTS, random_adapter, write_peft

TEXT = "What is 27 + 58?"


def logprobs(folders: list[Path], **options: object) -> list[list[float]]:
    """Of the first token of each adapter: one is there from the start, the other one comes later."""
    parts = ["attention", "router", "experts"]
    modules = [f"first={folders[0]}"]
    with LLM(enable_lora=True, lora_target_modules=parts, lora_modules=modules, **options) as llm:  # type: ignore[arg-type]
        llm.load_adapter("second", folders[1])
        found = []
        for name in ("first", "second", "oscine-nano", "second"):
            (choice,) = llm.generate(TEXT, max_tokens=2, temperature=0, model=name, logprobs=5).choices
            assert choice.logprobs is not None
            found.append(sorted(choice.logprobs.top_logprobs[0].values()))
        return found


@pytest.mark.slow
def test_two_ranks_compute_what_one_does(tmp_path: Path) -> None:
    config = config_at(NANO_FOLDER)
    parts = (*ATTENTION, "router", *EXPERTS), ("q_proj", "o_proj", *EXPERTS)
    adapters = [random_adapter(config, names, seed=i, size=1.0) for i, names in enumerate(parts)]
    folders = [write_peft(tmp_path / str(i), adapter) for i, adapter in enumerate(adapters)]
    options = {"cpu_weights": "float32", "threads": 1}
    one, two = logprobs(folders, **options), logprobs(folders, tensor_parallel_size=2, device="cpu", **options)
    for own, other in zip(one, two, strict=True):
        assert max(abs(a - b) for a, b in zip(own, other, strict=True)) < 0.05
    assert abs(one[0][-1] - one[1][-1]) > 0.1
    assert abs(one[0][-1] - one[2][-1]) > 0.1


@pytest.mark.slow
def test_two_engines_both_have_the_adapters(tmp_path: Path) -> None:
    config = config_at(NANO_FOLDER)
    folders = [write_peft(tmp_path / str(i), random_adapter(config, ATTENTION, seed=i, size=1.0)) for i in range(2)]
    options = {"cpu_weights": "float32", "threads": 1}
    one, two = logprobs(folders, **options), logprobs(folders, data_parallel_size=2, device="cpu", **options)
    for own, other in zip(one, two, strict=True):
        assert max(abs(a - b) for a, b in zip(own, other, strict=True)) < 0.05


def test_a_deployment_file_names_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "cluster.yaml"
    engine = "{enable-lora: true, lora-modules: [sql=adapters/sql, law=/law], max-loras: 2}"
    file.write_text(f"models: [{{name: nano, model: oscine-nano, engine: {engine}}}]\n")
    (model,) = read_deployment(file).models
    adapters = model.serving.engine.adapters
    assert adapters.modules == [("sql", str(tmp_path / "adapters/sql")), ("law", "/law")]
    assert adapters.max_loras == 2
