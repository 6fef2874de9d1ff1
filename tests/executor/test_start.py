"""Reports of a start about the chosen ops."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from oscine.checkpoint.hub import NANO_FOLDER, SINGLE
from oscine.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
from oscine.executor.start import load
from oscine.executor.start.stopwatch import Stopwatch
from oscine.ops.choose import screened
from oscine.ops.native.library import unavailable
from oscine.ops.table import choose
from tests.model.saved import save
from tests.model.tiny import tensors
from tests.tiny import SMALL, TINY

from .tiny import PAGE

LOST = "chooser=screened is not used: it does not suit the weights of this head, so all logits are made"


@pytest.mark.parametrize("most_doubt", [1.0, 0.0])
def test_a_head_that_cannot_be_screened_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_doubt: float
) -> None:
    monkeypatch.setattr(load, "choose", lambda platform: choose(platform, {"chooser": "screened"}))
    monkeypatch.setattr(screened, "MOST_DOUBT", most_doubt)
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


def test_experts_on_host_need_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY.to_dict()))
    options = EngineOptions(model=ModelOptions(random_weights=str(tmp_path), device="cpu", experts_on_host="2"))
    with pytest.raises(ValueError, match="--experts-on-host needs a GPU and --dtype bfloat16"):
        load.load_executor(options, lambda text: None, Stopwatch())
