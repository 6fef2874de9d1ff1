"""For benchmarks.draft: a head with the shape of NVIDIA's EAGLE3-v3 and random weights, its targets, and forced
acceptance."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from oscine.checkpoint.hub import NANO_FOLDER
from oscine.engine.core.extension import EngineExtension
from oscine.engine.core.request import Request
from oscine.executor.batch.device_state import DeviceState
from oscine.extensions.speculation.eagle.config import HeadConfig
from oscine.extensions.speculation.eagle.weights import head_specs
from oscine.model.config import ModelConfig
from oscine.ops.interface import Batch
from oscine.ops.packed import PackedStep
from oscine.settings.config import ModelOptions

Rates = tuple[float, ...]  # share of steps that accept the draft at each position


def model_options(model: str, device: str) -> ModelOptions:
    if model == "nano":
        return ModelOptions(str(NANO_FOLDER), device=device)
    return ModelOptions(random_weights=model, device=device)


def head_config(target: ModelConfig) -> dict[str, Any]:
    """As NVIDIA's EAGLE3-v3 for gpt-oss-120b, in the proportions of the target."""
    layers, yarn = target.num_hidden_layers, target.yarn
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": 6 * target.hidden_size,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": None,
        "num_hidden_layers": 1,
        "rms_norm_eps": target.rms_norm_eps,
        "layer_types": ["sliding_attention"],
        "sliding_window": target.sliding_window,
        "rope_theta": yarn.rope_theta,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "original_max_position_embeddings": yarn.original_max_position_embeddings,
            "truncate": False,
        },
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [2 * layers // 3, 5 * layers // 6, layers],
            "norm_before_fc": True,
        },
    }


def write_head(folder: Path, target: ModelConfig) -> None:
    """Norms 1, matrices N(0, 1 / columns)."""
    values = head_config(target)
    (folder / "config.json").write_text(json.dumps(values))
    draw = torch.Generator().manual_seed(0)
    specs = head_specs(HeadConfig.from_dict(values, target), ["fc.weight"])

    def tensor(shape: tuple[int, ...]) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16)
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0, shape[1] ** -0.5, generator=draw)

    save_file({name: tensor(spec.shape) for name, spec in specs.items()}, folder / "model.safetensors")


def forced(packed: PackedStep[Tensor], batch: Batch, ids_M: Tensor, chance_K: Tensor) -> Tensor:
    """Sampled ids of which draft j + 1 is accepted with chance_K[j], if all before it are; 0 in the last place.

    Chances are hashed from position and row of the state, so that a CUDA graph draws anew in each replay.
    """
    rows_M = packed.logits_rows_N[: len(ids_M)].long()
    given_M, next_id_M = packed.given_T[rows_M].long(), batch.token_ids_T[rows_M].roll(-1)
    place_M = (-1 - given_M).clamp(0, len(chance_K) - 1)
    verifies_M = (given_M < 0) & (given_M.roll(-1) == given_M - 1)
    verifies_M[-1:] = False
    drawn_M = batch.positions_T[rows_M] * 0x9E3779B1 + packed.sampled_slots_M[: len(ids_M)].long() * 0x85EBCA6B
    drawn_M = ((drawn_M ^ (drawn_M >> 15)) * 0x2C1B3C6D >> 12 & 0xFFFF) / 65536
    other_M = torch.where(ids_M == next_id_M, ids_M ^ 1, ids_M)
    chosen_M = torch.where(drawn_M < chance_K[place_M], next_id_M, other_M)
    return torch.where(verifies_M, chosen_M, ids_M)


class Always(EngineExtension):
    """The same number of drafts for each request and step."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts

    def first_token(self, request: Request) -> None:
        request.num_drafts = self._num_drafts


class ForcedAcceptance:
    """Replaces acceptance in this process once it is constructed. At first nothing is accepted."""

    def __init__(self, device: str, most_drafts: int) -> None:
        accept: Callable[..., Tensor] = DeviceState.accept
        self._chance_K = chance_K = torch.zeros(most_drafts + 1, device=device)  # 0 behind the last draft
        change = forced
        if device != "cpu":
            from benchmarks.kernels.forced import forced as change  # needs Triton

        def accept_forced(self: DeviceState, packed: PackedStep[Tensor], batch: Batch, ids_M: Tensor) -> Tensor:
            return accept(self, packed, batch, change(packed, batch, ids_M, chance_K))

        DeviceState.accept = accept_forced  # type: ignore[method-assign]

    def set(self, rates: Rates) -> None:
        """Also changes CUDA graphs that are already captured."""
        chances = [rate / before for rate, before in zip(rates, (1.0, *rates), strict=False)]
        self._chance_K[:-1] = torch.tensor(chances)
