"""Small random EAGLE-3 heads as their publishers write them, and what a head computes, in plain torch.

The reference knows each format by its own names and flags. It recomputes a whole sequence for every draft, in float64.
"""

import json
import math
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import silu

from oscine.model.config import ModelConfig

INNER, DRAFTED = 80, 120
YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
YARN |= {"original_max_position_embeddings": 4096}
PLAIN = {"rope_theta": 10000.0}


@dataclass(frozen=True)
class Format:
    """One way to write a head down, and the rules that it means."""

    name: str
    config: dict[str, Any]  # beside the geometry
    aux_layers: tuple[int, ...]  # boundaries
    layer: str = "midlayer."  # prefix of the layer's tensors
    inside: bool = False  # the geometry is in transformer_layer_config
    rope: dict[str, Any] = field(default_factory=lambda: PLAIN)
    tap_norms: tuple[str, ...] = ()
    combines: bool = True
    own_embedding: bool = False
    own_output: bool = False
    reduced: bool = False
    window: int | None = None
    through_final_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False


FORMATS = (
    Format(
        "nvidia v3",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 4], "norm_before_fc": True}}
        | {
            "draft_vocab_size": None,
            "target_layer_count": 4,
            "layer_types": ["sliding_attention"],
            "sliding_window": 9,
        },
        (2, 3, 4),
        rope={"rope_theta": 150000.0, "rope_scaling": YARN | {"truncate": False}},
        tap_norms=("input_norm.weight",),
        window=9,
    ),
    Format(
        "nvidia throughput",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1]}, "draft_vocab_size": None},
        (4,),
        combines=False,
        through_final_norm=True,
    ),
    Format(
        "nvidia v2",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "draft_vocab_size": None},
        (1, 2, 3),
        layer="model.layers.0.",
        own_embedding=True,
    ),
    Format(
        "SpecForge",
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 1]}, "draft_vocab_size": DRAFTED},
        (1, 3, 2),
        own_embedding=True,
        own_output=True,
        reduced=True,
    ),
    Format(
        "speculators",
        {"speculators_model_type": "eagle3", "eagle_aux_hidden_state_layer_ids": [1, 2, 3], "norm_before_fc": True}
        | {"norm_before_residual": True, "norm_output": True, "draft_vocab_size": DRAFTED},
        (1, 2, 3),
        layer="layers.0.",
        inside=True,
        rope={"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        tap_norms=("input_norm.weight",),
        own_output=True,
        reduced=True,
        norm_before_residual=True,
        norm_output=True,
    ),
    Format(
        "speculators with a norm for each layer",
        {"speculators_model_type": "eagle3", "fc_norm": True, "norm_before_residual": False, "draft_vocab_size": 211},
        (2, 2, 1),
        inside=True,
        tap_norms=("aux_norm_low.weight", "aux_norm_mid.weight", "aux_norm_high.weight"),
        own_output=True,
    ),
    Format(
        "Nebius",
        {"architectures": ["LlamaForCausalLM"], "truncated_vocab_size": DRAFTED},
        (2, 2, 1),
        rope={"rope_theta": 150000.0, "rope_scaling": YARN},  # with a rounded ramp
        own_output=True,
        reduced=True,
    ),
)


def config_of(format: Format, target: ModelConfig) -> dict[str, Any]:
    geometry = {
        "hidden_size": target.hidden_size,
        "intermediate_size": INNER,
        "num_attention_heads": 4,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": 2048,
        **format.rope,
    }
    own = deepcopy(format.config)
    return {**own, "transformer_layer_config": geometry} if format.inside else {**geometry, **own}


def tensors_of(format: Format, target: ModelConfig) -> dict[str, Tensor]:
    """bfloat16, by the names of the format."""
    hidden, dim, aux_layers = target.hidden_size, target.head_dim, len(format.aux_layers)
    queries, keys, each = 4 * dim, target.num_key_value_heads * dim, len(format.tap_norms) > 1
    shapes: dict[str, tuple[int, ...]] = {
        f"{format.layer}input_layernorm.weight": (hidden,),
        f"{format.layer}hidden_norm.weight": (hidden,),
        f"{format.layer}self_attn.q_proj.weight": (queries, 2 * hidden),
        f"{format.layer}self_attn.k_proj.weight": (keys, 2 * hidden),
        f"{format.layer}self_attn.v_proj.weight": (keys, 2 * hidden),
        f"{format.layer}self_attn.o_proj.weight": (hidden, queries),
        f"{format.layer}post_attention_layernorm.weight": (hidden,),
        f"{format.layer}mlp.gate_proj.weight": (INNER, hidden),
        f"{format.layer}mlp.up_proj.weight": (INNER, hidden),
        f"{format.layer}mlp.down_proj.weight": (hidden, INNER),
        "norm.weight": (hidden,),
        **dict.fromkeys(format.tap_norms, (hidden if each else aux_layers * hidden,)),
        **({"fc.weight": (hidden, aux_layers * hidden)} if format.combines else {}),
        **({"embed_tokens.weight": (target.vocab_size, hidden)} if format.own_embedding else {}),
        **({"lm_head.weight": (DRAFTED if format.reduced else target.vocab_size, hidden)} if format.own_output else {}),
    }
    draw = torch.Generator().manual_seed(7)
    made = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    made = {name: (t if t.dim() == 1 else t * t.shape[1] ** -0.5).bfloat16() for name, t in made.items()}
    if format.reduced:
        ids = torch.randperm(target.vocab_size, generator=draw)[:DRAFTED].sort().values
        made["d2t"] = ids - torch.arange(DRAFTED)
        made["t2d"] = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return made


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@dataclass(frozen=True)
class ReferenceHead:
    format: Format
    tensors: dict[str, Tensor]
    target: dict[str, Tensor]  # published tensors

    def features(self, streams: dict[int, Tensor]) -> Tensor:
        tapped = [streams[tap].double() for tap in self.format.aux_layers]
        if self.format.through_final_norm:
            tapped = [_norm(tapped[0], self.target["model.norm.weight"])]
        norms = [self.tensors[name] for name in self.format.tap_norms]
        if len(norms) > 1:
            tapped = [_norm(tap, weight) for tap, weight in zip(tapped, norms, strict=True)]
        joined = torch.cat(tapped, -1)
        if len(norms) == 1:
            joined = _norm(joined, norms[0])
        return joined @ self.tensors["fc.weight"].double().T if self.format.combines else joined

    def hidden(self, features: Tensor, next_ids: Tensor) -> Tensor:
        """Of a whole sequence from position 0 on: the hidden states before the final norm."""
        own = {name.removeprefix(self.format.layer): tensor.double() for name, tensor in self.tensors.items()}
        table = self.tensors if self.format.own_embedding else self.target
        embedding = table["embed_tokens.weight" if self.format.own_embedding else "model.embed_tokens.weight"]
        normed = _norm(features, own["hidden_norm.weight"])
        x = torch.cat((_norm(embedding.double()[next_ids], own["input_layernorm.weight"]), normed), -1)
        residual = normed if self.format.norm_before_residual else features
        residual = residual + self._attention(x, own) @ own["self_attn.o_proj.weight"].T
        inner = _norm(residual, own["post_attention_layernorm.weight"])
        gate, up = inner @ own["mlp.gate_proj.weight"].T, inner @ own["mlp.up_proj.weight"].T
        return residual + (silu(gate) * up) @ own["mlp.down_proj.weight"].T

    def logits(self, hidden: Tensor) -> Tensor:
        """Over the tokens of the target; -inf for those that the head cannot draft."""
        output = self.tensors["lm_head.weight"] if self.format.own_output else self.target["lm_head.weight"]
        logits = _norm(hidden, self.tensors["norm.weight"]) @ output.double().T
        if not self.format.reduced:
            return logits
        ids = self.tensors["d2t"] + torch.arange(DRAFTED)
        whole = torch.full((*logits.shape[:-1], self.target["lm_head.weight"].shape[0]), -math.inf).double()
        return whole.index_copy(-1, ids, logits)

    def drafts(self, features: Tensor, next_ids: Tensor, count: int) -> tuple[list[int], list[Tensor]]:
        """Greedy drafts after a sequence, and the logits that each was chosen from. next_ids[t]: the token at t + 1."""
        drafted: list[int] = []
        chosen_from: list[Tensor] = []
        for _ in range(count):
            hidden = self.hidden(features, next_ids)[-1:]
            chosen_from.append(self.logits(hidden)[0])
            drafted.append(int(chosen_from[-1].argmax()))
            fed_back = _norm(hidden, self.tensors["norm.weight"]) if self.format.norm_output else hidden
            features = torch.cat((features, fed_back))
            next_ids = torch.cat((next_ids, torch.tensor(drafted[-1:])))
        return drafted, chosen_from

    def _attention(self, x: Tensor, own: dict[str, Tensor]) -> Tensor:
        length, dim = len(x), own["self_attn.q_proj.weight"].shape[0] // 4
        q, k, v = ((x @ own[f"self_attn.{n}_proj.weight"].T).view(length, -1, dim).transpose(0, 1) for n in "qkv")
        angles, scale = self._angles(length, dim)
        q, k = (_rotated(part, angles) * scale for part in (q, k))
        k, v = (part.repeat_interleave(4 // len(part), 0) for part in (k, v))
        distance = torch.arange(length)[:, None] - torch.arange(length)
        seen = (distance >= 0) & (distance < (self.format.window or length))
        weights = (q @ k.mT * dim**-0.5).masked_fill(~seen, -math.inf).softmax(-1)
        return (weights @ v).transpose(0, 1).flatten(1)

    def _angles(self, length: int, dim: int) -> tuple[Tensor, float]:
        rope = self.format.rope
        scaling = rope.get("rope_scaling")
        theta = rope.get("rope_theta", rope.get("rope_parameters", {}).get("rope_theta"))
        pair = torch.arange(dim // 2).double()
        turns, scale = theta ** (-2 * pair / dim), 1.0
        if scaling:
            low, high = (
                dim
                * math.log(scaling["original_max_position_embeddings"] / (scaling[beta] * 2 * math.pi))
                / (2 * math.log(theta))
                for beta in ("beta_fast", "beta_slow")
            )
            if scaling.get("truncate", True):
                low, high = math.floor(low), math.ceil(high)
            kept = 1 - ((pair - low) / (high - low)).clamp(0, 1)
            turns = turns * kept + turns / scaling["factor"] * (1 - kept)
            scale = 0.1 * math.log(scaling["factor"]) + 1
        return torch.arange(length).double()[:, None] * turns, scale


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()


def random_streams(target: ModelConfig, length: int, aux_layers: Sequence[int]) -> dict[int, Tensor]:
    draw = torch.Generator().manual_seed(length)
    return {tap: torch.randn(length, target.hidden_size, generator=draw) * (1 + tap) for tap in sorted(set(aux_layers))}
