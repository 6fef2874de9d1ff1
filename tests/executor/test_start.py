"""Reports of a start about the chosen ops."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from oscine.checkpoint.hub import NANO_FOLDER, SINGLE
from oscine.executor.start import load, shared
from oscine.executor.start.stopwatch import Stopwatch
from oscine.ops import triton_range
from oscine.ops.choose import hopper as screened
from oscine.ops.native.library import unavailable
from oscine.ops.platforms.table import choose, named
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
from tests.model.saved import save
from tests.model.tiny import tensors
from tests.tiny import SMALL, TINY

from .tiny import PAGE

LOST = "the head has no screen, as it does not suit these weights: all logits are made"


@pytest.mark.parametrize("most_doubt", [1.0, 0.0])
def test_a_head_that_cannot_be_screened_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_doubt: float
) -> None:
    monkeypatch.setattr(shared, "choose", lambda platform: choose(platform, {"chooser": "screened"}))
    monkeypatch.setattr(screened, "MAX_DOUBT", most_doubt)
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_dict()))
    options = EngineOptions(
        model=ModelOptions(random_weights=str(tmp_path), device="cpu", cpu_weights="float32"),
        cache=CacheOptions(page_size=PAGE, kv_cache_bytes=1 << 20),
        scheduler=replace(SchedulerOptions(), max_num_seqs=2, max_num_batched_tokens=64),
        cuda_graphs=False,  # a screened head cannot be recorded, which would be reported too
    )
    said: list[str] = []
    load.load_executor(options, said.append, Stopwatch())
    assert f"\nops: rms_norm={'reference' if unavailable() else 'native'}, " in said[0]
    assert "chooser=screened (up to 64 rows; else reference)" in said[0]
    assert said[1:] == ([] if most_doubt else [LOST])


def test_calibrated_scales_of_a_kv_cache_are_reported_as_not_needed(tmp_path: Path) -> None:
    made = tensors(SMALL)
    save(tmp_path, SMALL, made)
    scales = {f"model.layers.{layer}.self_attn.k_scale": torch.ones(()) for layer in (0, 2)}
    save_file(made | scales, tmp_path / SINGLE)
    options = EngineOptions(
        model=ModelOptions(str(tmp_path), tokenizer=str(NANO_FOLDER), device="cpu"),
        cache=CacheOptions(page_size=PAGE, kv_cache_bytes=1 << 20),
        scheduler=replace(SchedulerOptions(), max_num_seqs=2, max_num_batched_tokens=64),
        quiet=True,
    )
    said: list[str] = []
    load.load_executor(options, said.append, Stopwatch())
    assert [text for text in said if text.startswith("2 calibrated scales of an FP8 KV cache are not needed")]


def start_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str | None, platform: str | None = "hopper"
) -> list[str]:
    """The reports of a start with this version of Triton. `platform`: given for the CPU when Triton is checked."""
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_dict()))
    monkeypatch.setattr(triton_range, "installed", lambda: version)
    taken_for = iter([] if platform is None else [named(platform)])
    real = shared.platform_of
    monkeypatch.setattr(shared, "platform_of", lambda *given: next(taken_for, None) or real(*given))
    options = EngineOptions(
        model=ModelOptions(random_weights=str(tmp_path), device="cpu", cpu_weights="float32"),
        cache=CacheOptions(page_size=PAGE, kv_cache_bytes=1 << 20),
        scheduler=replace(SchedulerOptions(), max_num_seqs=2, max_num_batched_tokens=64),
        cuda_graphs=False,
    )
    said: list[str] = []
    load.load_executor(options, said.append, Stopwatch())
    return said


@pytest.mark.parametrize("version", ["3.10.0", "3.5.1", "4.0.0", "2.6", "3.10.0rc1+git1a2b3c", "unknown"])
def test_a_triton_that_was_not_tested_is_refused_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str
) -> None:
    monkeypatch.delenv("OSCINE_UNTESTED_TRITON", raising=False)
    with pytest.raises(ValueError, match="is not supported") as found:
        start_on(monkeypatch, tmp_path, version)
    assert str(found.value) == (
        f"Triton {version} is not supported: Oscine was tested with 3.6 to 3.9. "
        "`pip install 'torch>=2.11,<2.16' 'triton>=3.6,<3.10'` installs one of them; "
        "OSCINE_UNTESTED_TRITON=1 tries this one"
    )
    monkeypatch.setenv("OSCINE_UNTESTED_TRITON", "0")
    with pytest.raises(ValueError, match="is not supported"):
        start_on(monkeypatch, tmp_path, version)


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1", "3.8.0", "3.9.0", "3.9.2+gitabc", None])
def test_a_tested_triton_is_accepted_without_a_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str | None
) -> None:
    assert not [text for text in start_on(monkeypatch, tmp_path, version) if "Triton" in text]


def test_an_untested_triton_is_used_with_a_warning_if_the_variable_is_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OSCINE_UNTESTED_TRITON", "1")
    first, *_ = start_on(monkeypatch, tmp_path, "3.10.0")
    assert first == (
        "warning: Triton 3.10.0 is used, as OSCINE_UNTESTED_TRITON is set: Oscine was tested with 3.6 to 3.9"
    )


def test_a_cpu_accepts_any_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OSCINE_UNTESTED_TRITON", raising=False)
    assert not [text for text in start_on(monkeypatch, tmp_path, "3.10.0", platform=None) if "Triton" in text]


def test_experts_on_host_need_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_dict()))
    options = EngineOptions(model=ModelOptions(random_weights=str(tmp_path), device="cpu", experts_on_host="2"))
    with pytest.raises(ValueError, match="--experts-on-host needs a GPU and --dtype bfloat16"):
        load.load_executor(options, lambda text: None, Stopwatch())
