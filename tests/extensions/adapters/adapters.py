"""LoRA adapters with random factors: as tools write them, and merged into a model by plain arithmetic."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from oscine.model.config import ModelConfig
from oscine.model.gpt_oss import GptOss
from oscine.ops.moe.mxfp4 import dequantize
from oscine.ops.moe.reference import ExpandedExperts

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("gate_up_proj", "down_proj")


def random(*shape: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(device, dtype)


def memory(*shape: int, seed: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Factors of three slots, with others between them."""
    padded = torch.full((3, torch.Size(shape).numel() + 64), torch.nan, device=device, dtype=dtype)
    padded[:, :-64].copy_(random(3, *shape, seed=seed, device=device, dtype=torch.float32).flatten(1))
    return padded[:, :-64].unflatten(1, shape)


@dataclass(frozen=True)
class Pair:
    """Two factors of a matrix, or of all experts of a layer: A [..., r, in], B [..., out, r]."""

    a: Tensor
    b: Tensor


@dataclass(frozen=True)
class RandomAdapter:
    """`pairs` by layer and matrix, as "0.q_proj", "1.router", "1.down_proj"."""

    pairs: dict[str, Pair]
    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def delta(self, layer: int, name: str) -> Tensor | float:
        pair = self.pairs.get(f"{layer}.{name}")
        return 0.0 if pair is None else self.scale * (pair.b.double() @ pair.a.double()).float()


def random_adapter(
    config: ModelConfig,
    names: Sequence[str] = (*ATTENTION, "router", *EXPERTS),
    rank: int = 4,
    seed: int = 0,
    size: float = 0.6,
    layers: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> RandomAdapter:
    """`size`: the larger, the more the adapter changes."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    shapes = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
    }
    pairs = {}
    for layer in range(config.num_hidden_layers) if layers is None else layers:
        experts = config.experts[layer]
        shapes |= {"router": (experts, hidden), "gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
        for name in names:
            out, into = shapes[name]
            of = (experts,) if name in EXPERTS else ()
            a = torch.randn(*of, rank, into, generator=generator) * size / into**0.5
            b = torch.randn(*of, out, rank, generator=generator) * size / rank**0.5
            pairs[f"{layer}.{name}"] = Pair(a.to(dtype).float(), b.to(dtype).float())
    return RandomAdapter(pairs, rank, 2.0 * rank)


def write_peft(folder: Path, adapter: RandomAdapter, **more: Any) -> Path:
    """As PEFT writes it; experts as its target_parameters are."""
    tensors = {}
    for place, pair in adapter.pairs.items():
        layer, name = place.split(".")
        if name in EXPERTS:
            module = "mlp.experts" + (".base_layer" if name == "gate_up_proj" else "")
            a, b = pair.a.flatten(0, 1), pair.b.permute(1, 2, 0).flatten(1)
        else:
            module = "mlp.router" if name == "router" else f"self_attn.{name}"
            a, b = pair.a, pair.b
        _put(tensors, f"model.layers.{layer}.{module}", a, b)
    return _write(folder, tensors, adapter, **more)


def write_per_expert(folder: Path, adapter: RandomAdapter) -> Path:
    """As Unsloth writes it: lists of modules, one of each expert, and a router that is called linear."""
    tensors = {}
    for place, pair in adapter.pairs.items():
        layer, name = place.split(".")
        if name in EXPERTS:
            for expert in range(len(pair.a)):
                _put(tensors, f"model.layers.{layer}.mlp.experts.{name}s.{expert}", pair.a[expert], pair.b[expert])
        else:
            module = "mlp.router.linear" if name == "router" else f"self_attn.{name}"
            _put(tensors, f"model.layers.{layer}.{module}", pair.a, pair.b)
    return _write(folder, tensors, adapter)


def write_split(folder: Path, adapter: RandomAdapter) -> tuple[Path, RandomAdapter]:
    """Modules by expert, whose gates and ups have factors of their own. Also returns the adapter that it then is: gates
    have the first half of its ranks, and ups the second one."""
    tensors, pairs = {}, {}
    for place, pair in adapter.pairs.items():
        layer, name = place.split(".")
        if name != "gate_up_proj":
            pairs[place] = pair
            for expert in range(len(pair.a)):
                _put(tensors, f"model.layers.{layer}.mlp.experts.{expert}.{name}", pair.a[expert], pair.b[expert])
            continue
        other = Pair(pair.a.flip(-1), pair.b.flip(-1))
        b = torch.zeros(*pair.b.shape[:2], 2 * adapter.rank)
        b[:, 0::2, : adapter.rank], b[:, 1::2, adapter.rank :] = pair.b[:, 0::2], other.b[:, 1::2]
        pairs[place] = Pair(torch.cat((pair.a, other.a), 1), b)
        for expert in range(len(pair.a)):
            module = f"model.layers.{layer}.mlp.experts.{expert}"
            _put(tensors, f"{module}.gate_proj", pair.a[expert], pair.b[expert, 0::2])
            _put(tensors, f"{module}.up_proj", other.a[expert], other.b[expert, 1::2])
    return _write(folder, tensors, adapter), replace(adapter, pairs=pairs)


def _put(tensors: dict[str, Tensor], module: str, a: Tensor, b: Tensor) -> None:
    for part, factor in (("A", a), ("B", b)):
        tensors[f"base_model.model.{module}.lora_{part}.weight"] = factor.contiguous()


def _write(folder: Path, tensors: dict[str, Tensor], adapter: RandomAdapter, **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    values = {"peft_type": "LORA", "r": adapter.rank, "lora_alpha": adapter.alpha, "bias": "none", **more}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def added(matrix: Tensor, delta: Tensor | float) -> Tensor:
    delta = delta.to(matrix.device) if isinstance(delta, Tensor) else delta
    return (matrix.float() + delta).to(matrix.dtype)


def merged(model: GptOss, adapter: RandomAdapter) -> GptOss:
    """A model of the reference ops whose experts are MxExperts, with the products added to its matrices."""
    layers = []
    for i, layer in enumerate(model.weights.layers):
        deltas = [adapter.delta(i, name) for name in ("q_proj", "k_proj", "v_proj")]
        config = model.config
        rows = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        parts = layer.qkv_weight_FH.split([count * config.head_dim for count in rows])
        experts = layer.experts
        expanded = ExpandedExperts(
            added(dequantize(experts.gate_up_blocks, experts.gate_up_scales), adapter.delta(i, "gate_up_proj")),
            experts.gate_up_bias.float(),
            added(dequantize(experts.down_blocks, experts.down_scales), adapter.delta(i, "down_proj")),
            experts.down_bias.float(),
        )
        layers.append(
            replace(
                layer,
                qkv_weight_FH=torch.cat([added(part, delta) for part, delta in zip(parts, deltas, strict=True)]),
                out_weight=added(layer.out_weight, adapter.delta(i, "o_proj")),
                router_weight_EH=added(layer.router_weight_EH, adapter.delta(i, "router")),
                experts=expanded,
            )
        )
    return GptOss(model.config, replace(model.weights, layers=layers), model.ops)
