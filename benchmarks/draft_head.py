"""A head with the shape of NVIDIA's EAGLE3-v3 and random weights, and the targets that benchmarks.draft gives it."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from oscine.checkpoint.hub import NANO_FOLDER
from oscine.config import ModelOptions
from oscine.model.config import ModelConfig
from oscine.model.eagle.config import HeadConfig
from oscine.model.eagle.weights import head_specs


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
