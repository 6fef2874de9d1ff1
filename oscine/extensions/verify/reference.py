"""The implementation that a model is compared with: transformers', or plain torch where that is not installed.

It reads the checkpoint a second time and by itself, in the published layout, and dequantises it to float32. One layer
is in memory at a time: 3.2 GB for 20b, and 12.8 GB for 120b.

Shape suffixes as in ops/interface.py.
"""

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional

from oscine.checkpoint.files import weight_files
from oscine.checkpoint.folder import open_tensors
from oscine.executor.start.host_memory import available_bytes
from oscine.extensions.verify.bounds import dense_attention, swiglu
from oscine.model.config import ModelConfig
from oscine.model.tensors import tensor_specs
from oscine.ops.moe.mxfp4 import dequantize
from oscine.ops.rope.yarn import yarn_cos_sin

EXPERTS = "mlp.experts."
Expert = tuple[Tensor, Tensor, Tensor, Tensor]  # gate and up [2I, H] interleaved, its bias, down [H, I], its bias


class Projected(NamedTuple):
    """[T, heads, D] each; queries and keys before RoPE, and after it."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    rotated_queries: Tensor
    rotated_keys: Tensor


class ReferenceLayer(Protocol):
    """One layer in float32. `tensors`: those of the checkpoint but for experts, by name without the layer."""

    tensors: dict[str, Tensor]
    mask_TT: Tensor  # what is added to scores: 0, or a large negative number

    def forward(self, x_TH: Tensor) -> Tensor:
        """The whole layer, residuals included."""
        ...

    def norm(self, name: str, x_TH: Tensor) -> Tensor: ...

    def project(self, normed_TH: Tensor) -> Projected: ...

    def attend(self, q_TQD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """[T, Q * D], of rotated queries and keys."""
        ...

    def out(self, heads: Tensor) -> Tensor: ...

    def logits(self, normed_TH: Tensor) -> Tensor:
        """Of the router, [T, E]."""
        ...

    def mix(self, normed_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor: ...

    def expert(self, index: int) -> Expert: ...


class CheckpointTensors:
    """The tensors of a folder in the published layout."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        """`config`: of the model that is compared. Raises ValueError for another layout or shape, or a broken file."""
        if not folder.is_dir():
            raise ValueError(f"{folder}: verify reads folders in the published layout: `oscine convert` writes one")
        self.folder, self.config = folder, config
        self._files: dict[str, Any] = {}
        for file in weight_files(folder):
            opened = open_tensors(folder / file)
            self._files |= dict.fromkeys(opened.keys(), opened)
        for name, spec in tensor_specs(config).items():
            if name not in self._files and not (name == "lm_head.weight" and config.tie_word_embeddings):
                raise ValueError(f"{folder}: no {name}: verify reads the published layout: `oscine convert` writes it")
            shape = self._files[name].get_slice(name).get_shape() if name in self._files else [*spec.shape]
            if shape != [*spec.shape]:
                raise ValueError(f"{folder}: {name} has the shape {shape}, and in the model {[*spec.shape]}")

    def get(self, name: str) -> Tensor:
        """As stored."""
        if name == "lm_head.weight" and name not in self._files:
            name = "model.embed_tokens.weight"
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def layer(self, index: int) -> dict[str, Tensor]:
        """All but blocks and scales in float32, by name without the layer."""
        prefix = f"model.layers.{index}."
        found = {name.removeprefix(prefix): self.get(name) for name in self._files if name.startswith(prefix)}
        return {name: x if x.dtype == torch.uint8 else x.float() for name, x in found.items()}


def check_memory(config: ModelConfig) -> None:
    """Raises ValueError where the host lacks memory for a layer in float32, and as much again to make it."""
    matrices = 3 * max(config.experts) * config.hidden_size * config.intermediate_size
    heads = config.vocab_size * config.hidden_size
    needed, free = 2 * 4 * max(matrices, heads), available_bytes()
    if free is not None and free < needed:
        raise ValueError(f"the reference needs {needed / 1e9:.0f} GB of host memory; {free / 1e9:.0f} GB are free")


class Reference(Protocol):
    name: str  # with its version

    def layer(self, index: int, num_tokens: int) -> ReferenceLayer: ...


def reference_of(tensors: CheckpointTensors) -> Reference:
    """transformers' where it is installed and has this configuration."""
    if find_spec("transformers") is None:
        return Plain(tensors, "transformers is not installed")
    if not isinstance(tensors.config.num_local_experts, int) or isinstance(tensors.config.sliding_window, tuple):
        return Plain(tensors, "transformers has no models whose layers differ")
    try:
        return Transformers(tensors)
    except ImportError as error:  # of a release that is too old, or that does not fit this torch
        return Plain(tensors, f"transformers cannot be used: {error}")


def mask_of(window: int | None, num_tokens: int) -> Tensor:
    """[T, T]: a token sees itself and earlier ones, and with a window only so many."""
    distance_TT = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
    seen_TT = distance_TT >= 0 if window is None else (distance_TT >= 0) & (distance_TT < window)
    return torch.zeros(num_tokens, num_tokens).masked_fill_(~seen_TT, torch.finfo(torch.float32).min)


# ---- plain torch ----


class Plain:
    def __init__(self, tensors: CheckpointTensors, why: str) -> None:
        self.name = f"plain torch {torch.__version__} in float32, as {why}"
        self._tensors = tensors

    def layer(self, index: int, num_tokens: int) -> "PlainLayer":
        return PlainLayer(self._tensors.config, index, self._tensors.layer(index), num_tokens)


class PlainLayer:
    def __init__(self, config: ModelConfig, index: int, tensors: dict[str, Tensor], num_tokens: int) -> None:
        self._config, self.tensors = config, tensors
        self.mask_TT = mask_of(config.windows[index], num_tokens)
        self._cos_sin = yarn_cos_sin(num_tokens, config.head_dim, torch.device("cpu"), **asdict(config.yarn))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])

    def forward(self, x_TH: Tensor) -> Tensor:
        projected = self.project(self.norm("input_layernorm", x_TH))
        heads = self.attend(projected.rotated_queries, projected.rotated_keys, projected.values)
        x_TH = x_TH + self.out(heads)
        normed_TH = self.norm("post_attention_layernorm", x_TH)
        best_TK, ids_TK = self.logits(normed_TH).topk(self._config.num_experts_per_tok, -1)
        return x_TH + self.mix(normed_TH, ids_TK, best_TK.softmax(-1))

    def norm(self, name: str, x_TH: Tensor) -> Tensor:
        return functional.rms_norm(x_TH, x_TH.shape[-1:], self.tensors[f"{name}.weight"], self._config.rms_norm_eps)

    def project(self, normed_TH: Tensor) -> Projected:
        q, k, v = (
            self._linear(f"self_attn.{name}_proj", normed_TH).view(len(normed_TH), -1, self._config.head_dim)
            for name in "qkv"
        )
        return Projected(q, k, v, self._rotate(q), self._rotate(k))

    def _rotate(self, heads_TND: Tensor) -> Tensor:
        cos, sin = self._cos_sin[:, None].chunk(2, -1)
        first, second = heads_TND.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def attend(self, q_TQD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        return dense_attention(q_TQD, k_TGD, v_TGD, self.tensors["self_attn.sinks"], self.mask_TT)[0]

    def out(self, heads: Tensor) -> Tensor:
        return self._linear("self_attn.o_proj", heads)

    def logits(self, normed_TH: Tensor) -> Tensor:
        return self._linear("mlp.router", normed_TH)

    def mix(self, normed_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        out_TH = torch.zeros_like(normed_TH)
        for index in sorted({*ids_TK.flatten().tolist()}):
            token, place = (ids_TK == index).nonzero(as_tuple=True)
            first, first_bias, second, second_bias = self.expert(index)
            both = functional.linear(normed_TH[token], first, first_bias)
            silu, factor = swiglu(both, self._config.swiglu_limit)
            y = functional.linear(factor * silu, second, second_bias)
            out_TH.index_add_(0, token, y * weights_TK[token, place, None])
        return out_TH

    def expert(self, index: int) -> Expert:
        first, second = (
            dequantize(*(self.tensors[f"{EXPERTS}{name}_proj_{part}"][index] for part in ("blocks", "scales")))
            for name in ("gate_up", "down")
        )
        first_bias, second_bias = (self.tensors[f"{EXPERTS}{name}_proj_bias"][index] for name in ("gate_up", "down"))
        return first, first_bias, second, second_bias


# ---- transformers ----


class Transformers:
    """Its decoder layers, one at a time, with weights that its own code dequantises."""

    def __init__(self, tensors: CheckpointTensors) -> None:
        import transformers
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

        self.name, self._tensors = f"transformers {transformers.__version__} in float32", tensors
        self._config: Any = transformers.AutoConfig.from_pretrained(tensors.folder)
        self._config._attn_implementation = self._config._experts_implementation = "eager"
        self._rotary = GptOssRotaryEmbedding(self._config)

    def layer(self, index: int, num_tokens: int) -> "TransformersLayer":
        position_1T = torch.arange(num_tokens)[None]
        angles = self._rotary(torch.zeros(1), position_1T)
        tensors = self._tensors.layer(index)
        return TransformersLayer(
            self._config, index, tensors, angles, mask_of(self._tensors.config.windows[index], num_tokens)
        )


class TransformersLayer:
    def __init__(
        self, config: Any, index: int, tensors: dict[str, Tensor], angles: tuple[Tensor, Tensor], mask_TT: Tensor
    ) -> None:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssDecoderLayer

        self._config, self._angles, self.mask_TT = config, angles, mask_TT
        for name in ("gate_up_proj", "down_proj"):
            packed = (tensors.pop(f"{EXPERTS}{name}_{part}") for part in ("blocks", "scales"))
            tensors[EXPERTS + name] = convert_moe_packed_tensors(*packed, dtype=torch.float32)
        with torch.device("meta"):
            self._layer: Any = GptOssDecoderLayer(config, index)
        self._layer.load_state_dict(tensors, assign=True)
        self._layer.eval()
        self.tensors = tensors

    def forward(self, x_TH: Tensor) -> Tensor:
        mask = self.mask_TT[None, None]
        made = self._layer(x_TH[None], attention_mask=mask, position_embeddings=self._angles, use_cache=False)
        whole: Tensor = (made[0] if isinstance(made, tuple) else made)[0]
        return whole

    def norm(self, name: str, x_TH: Tensor) -> Tensor:
        normed: Tensor = getattr(self._layer, name)(x_TH)
        return normed

    def project(self, normed_TH: Tensor) -> Projected:
        from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb

        attention = self._layer.self_attn
        q, k, v = (
            getattr(attention, f"{name}_proj")(normed_TH).unflatten(-1, (-1, attention.head_dim)) for name in "qkv"
        )
        rotated = apply_rotary_pos_emb(*(x.transpose(0, 1)[None] for x in (q, k)), *self._angles)
        return Projected(q, k, v, *(x[0].transpose(0, 1) for x in rotated))

    def attend(self, q_TQD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

        attention, eager = self._layer.self_attn, cast(Any, eager_attention_forward)
        heads = (x.transpose(0, 1)[None] for x in (q_TQD, k_TGD, v_TGD))
        attended: Tensor = eager(attention, *heads, self.mask_TT[None, None], scaling=attention.scaling)[0]
        return attended[0].flatten(1)

    def out(self, heads: Tensor) -> Tensor:
        projected: Tensor = self._layer.self_attn.o_proj(heads)
        return projected

    def logits(self, normed_TH: Tensor) -> Tensor:
        router = self._layer.mlp.router
        return functional.linear(normed_TH, router.weight, router.bias)

    def mix(self, normed_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        mixed: Tensor = self._layer.mlp.experts(normed_TH, ids_TK, weights_TK)
        return mixed

    def expert(self, index: int) -> Expert:
        experts = self._layer.mlp.experts
        first, second = (getattr(experts, f"{name}_proj")[index].T for name in ("gate_up", "down"))
        return first, experts.gate_up_proj_bias[index], second, experts.down_proj_bias[index]
