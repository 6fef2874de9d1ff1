"""The weights of a model on their device, and how they are built tensor by tensor from any source.

Must not know files, folders or how a tensor comes about.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from oscine.model.config import ModelConfig
from oscine.model.packed import PackedFiles, page_out
from oscine.model.staging import Staging
from oscine.model.tensors import WHOLE, Shard, TensorSpec
from oscine.ops.interface import MxExperts, Ops


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. F = (Q + 2G) * D: all query heads, then key heads, then value heads."""

    input_norm_H: Tensor
    qkv_weight_FH: Any  # Tensor, or the result of Ops.prepare_projection
    qkv_bias_F: Tensor
    sinks_Q: Tensor
    out_weight: Any  # [H, Q * D], as qkv_weight_FH
    out_bias_H: Tensor
    post_attention_norm_H: Tensor
    router_weight_EH: Tensor
    router_bias_E: Tensor
    experts: Any  # MxExperts, or the result of Ops.prepare_experts


@dataclass(frozen=True, slots=True)
class Weights:
    """All float tensors share one dtype, and one device except for weights on the host. Packed experts are uint8."""

    embed_VH: Tensor  # may be in pinned host memory
    layers: list[LayerWeights]
    norm_H: Tensor
    head_VH: Any  # Tensor, or the result of Ops.prepare_dense
    prepared_head: Any = None  # made from head_VH by Ops.chooser, which also needs it

    @property
    def device(self) -> torch.device:
        """The device that computes the steps."""
        return self.norm_H.device


class TensorSource(Protocol):
    """Where tensors come from: a checkpoint, or a random generator."""

    def get(self, name: str) -> Tensor:
        """The tensor under its published name, in its published dtype, on any device."""
        ...


class HostPlace(Protocol):
    """Layers whose experts stay in host memory."""

    layers: Collection[int]  # indices
    max_tokens: int  # of the largest step that CUDA graphs may have

    def prepare_experts(self, experts: MxExperts) -> Any:
        """Prepares the published experts of one of these layers, on the host."""
        ...

    def loaded(self) -> None:
        """Called once, after the last layer."""
        ...

    def beside(self, moe: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The `moe` op for all layers: the given one for those on the device."""
        ...


# In the order of MxExperts.
_EXPERTS = [f"{matrix}_proj_{part}" for matrix in ("gate_up", "down") for part in ("blocks", "scales", "bias")]


def load_weights(
    config: ModelConfig,
    source: TensorSource,
    device: torch.device,
    dtype: torch.dtype,
    *,
    ops: Ops | None = None,
    shard: Shard = WHOLE,
    on_host: HostPlace | None = None,
    embedding_on_host: bool = False,
    files: PackedFiles | None = None,
    progress: bool = False,
) -> Weights:
    """Copies the shard's part of every tensor to the device, layer by layer. Casts floats to dtype; MXFP4 stays packed.

    With `ops`, repacks the experts of each layer for them as soon as they are loaded, and prepares the head. Experts of
    the layers `on_host` are never copied to the device. With `embedding_on_host`, the embedding stays in pinned host
    memory. With `files`, large prepared weights are mapped from there.
    """
    loader = _Loader(config, source, Staging(device), dtype, shard, ops, files, shard.specs(config))
    on_cpu = replace(loader, staging=Staging(torch.device("cpu")), ops=None, files=None)
    layers = []
    for index in tqdm(range(config.num_hidden_layers), desc="Loading layers", disable=None if progress else True):
        prefix = f"model.layers.{index}."
        if on_host is not None and index in on_host.layers:
            experts = on_host.prepare_experts(on_cpu.experts(prefix))
        else:
            experts = loader.experts(prefix)
        layers.append(loader.layer(prefix, experts))
    if on_host is not None:
        on_host.loaded()
    head_VH = loader.head("lm_head.weight")
    embedding = "model.embed_tokens.weight"
    return Weights(
        embed_VH=on_cpu.get(embedding).pin_memory() if embedding_on_host else loader.embedding(embedding),
        layers=layers,
        norm_H=loader.get("model.norm.weight"),
        head_VH=head_VH,
        prepared_head=None if ops is None else ops.chooser.prepare(head_VH),
    )


@dataclass(frozen=True, slots=True)
class _Loader:
    config: ModelConfig
    source: TensorSource
    staging: Staging
    dtype: torch.dtype
    shard: Shard
    ops: Ops | None
    files: PackedFiles | None
    specs: Mapping[str, TensorSpec]

    def published(self, name: str) -> Tensor:
        return self.shard.part(self.config, name, self.source.get(name))

    def cast(self, published: Tensor) -> Tensor:
        tensor = self.staging.bring(published)
        return tensor if tensor.dtype == torch.uint8 else tensor.to(self.dtype)

    def get(self, *names: str) -> Tensor:
        """One tensor, or several concatenated along their first dimension, on the device."""
        return self.cast(_joined([self.published(name) for name in names]))

    def head(self, name: str) -> Any:
        return self.dense(None if self.ops is None else self.ops.prepare_dense, name)

    def projection(self, *names: str) -> Any:
        return self.dense(None if self.ops is None else self.ops.prepare_projection, *names)

    def dense(self, prepare: Callable[[Tensor, torch.dtype], Any] | None, *names: str) -> Any:
        if prepare is None:
            return self.get(*names)
        return self.prepared(names, lambda parts: prepare(self.staging.bring(_joined(parts)), self.dtype))

    def embedding(self, name: str) -> Tensor:
        ops = self.ops
        if ops is None:
            return self.get(name)

        def prepare(parts: list[Tensor]) -> Tensor:
            return ops.prepare_embedding(self.staging.bring(_joined(parts)), self.dtype)

        embedding: Tensor = self.prepared([name], prepare, some_rows=True)
        return embedding

    def experts(self, prefix: str) -> Any:
        def prepare(parts: list[Tensor]) -> Any:
            experts = MxExperts(*map(self.cast, parts))
            return experts if self.ops is None else self.ops.prepare_experts(experts)

        return self.prepared([f"{prefix}mlp.experts.{name}" for name in _EXPERTS], prepare)

    def prepared(self, names: Sequence[str], prepare: Callable[[list[Tensor]], Any], *, some_rows: bool = False) -> Any:
        """The result of `prepare` for published tensors; mapped from its file if there is one.

        `some_rows`: as in PackedFiles.get.
        """
        if self.files is None:
            return prepare([self.published(name) for name in names])

        def make() -> Any:
            parts = [self.published(name) for name in names]
            made = prepare(parts)
            page_out(parts)
            return made

        return self.files.get(names[0], make, some_rows, {name: self.specs[name].shape for name in names})

    def layer(self, prefix: str, experts: Any) -> LayerWeights:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return LayerWeights(
            input_norm_H=self.get(f"{prefix}input_layernorm.weight"),
            qkv_weight_FH=self.projection(*(f"{attention}{name}_proj.weight" for name in "qkv")),
            qkv_bias_F=self.get(*(f"{attention}{name}_proj.bias" for name in "qkv")),
            sinks_Q=self.get(f"{attention}sinks"),
            out_weight=self.projection(f"{attention}o_proj.weight"),
            out_bias_H=self.get(f"{attention}o_proj.bias"),
            post_attention_norm_H=self.get(f"{prefix}post_attention_layernorm.weight"),
            router_weight_EH=self.get(f"{mlp}router.weight"),
            router_bias_E=self.get(f"{mlp}router.bias"),
            experts=experts,
        )


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
