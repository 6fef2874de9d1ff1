"""The gpt-oss network: embedding, blocks of attention and experts, head.

Calls the ops in order. It names no device, checkpoint or backend, and does no scheduling.

Shape suffixes: T tokens of the step, N rows whose logits are wanted, H hidden, V vocabulary, Q query heads, D head
dimension, F the fused projection of queries, keys and values.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from oscine.model.config import ModelConfig
from oscine.model.weights import LayerWeights, Weights
from oscine.ops.interface import AddedLayer, Batch, KVCache, Ops, PageGroup, QkvProjection, SamplingBatch
from oscine.ops.rope.yarn import yarn_cos_sin


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's view of the KV cache."""

    kv_pages: Tensor  # [pages, 2, G, R, D]
    group: PageGroup
    window: int | None  # tokens; None is full attention
    exponents_2G: Tensor | None  # as in QkvProjection


class GptOss:
    """Weights and ops of one device; holds no state between steps."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: Ops,
        kv_exponents: Sequence[Tensor] | None = None,
        cos_sin: Tensor | None = None,
        depth: int | None = None,
    ) -> None:
        """kv_exponents: calibrated ones of each layer, as in QkvProjection. cos_sin: rope_table, if it is made.
        depth: layers of the whole model, where these are some of it."""
        self.config = config
        self.weights = weights
        self.ops = ops
        self._kv_exponents = kv_exponents
        self._layers_by_window = config.layers_by_window
        self._depth = config.num_hidden_layers if depth is None else depth
        self.cos_sin = rope_table(config, weights.device) if cos_sin is None else cos_sin

    @torch.inference_mode()
    def hidden(self, batch: Batch, kv: KVCache, added: Sequence[AddedLayer] | None = None) -> Tensor:
        """Runs one step and writes its keys and values into kv. Returns the input of the head, [N, H].

        `added`: what adapters add to each layer.
        """
        return self.hidden_and_aux(batch, kv, (), added)[0]

    @torch.inference_mode()
    def hidden_and_aux(
        self, batch: Batch, kv: KVCache, aux_layers: Collection[int], added: Sequence[AddedLayer] | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """As hidden; also the residual streams [T, H] before the layers `aux_layers`, by layer.

        The number of layers means the stream after the last layer, before the final norm. A model made by `of_layers`
        takes the layer numbers of the whole model. For layers that it lacks it returns the stream before its last one.
        """
        ops, eps, last = self.ops, self.config.rms_norm_eps, len(self.weights.layers)
        places = {aux: last if aux == self._depth else min(aux, last - 1) for aux in aux_layers}
        streams: dict[int, Tensor] = {}  # by place
        x = ops.embed(batch.token_ids_T, self.weights.embed_VH)  # from here on [T, H], or partial sums [T, J, H]
        residual_TH: Tensor | None = None
        for index, (layer, cache) in enumerate(zip(self.weights.layers, self._layer_caches(batch, kv), strict=True)):
            own = None if added is None else added[index]
            x, residual_TH = self._attend(x, residual_TH, layer, cache, batch, own)
            if index in places.values():
                streams[index] = residual_TH
            x, residual_TH = self._mix_experts(x, residual_TH, layer, own)
        rows_N = batch.logits_rows_N
        if last in places.values():
            normed_NH, streams[last] = ops.rms_norm(x, self.weights.norm_H, eps, residual_TH)
            normed_NH = normed_NH if rows_N is None else normed_NH[rows_N]
        else:
            if rows_N is not None:
                x, residual_TH = x[rows_N], None if residual_TH is None else residual_TH[rows_N]
            normed_NH = ops.rms_norm(x, self.weights.norm_H, eps, residual_TH)[0]
        return normed_NH, {aux: streams[place] for aux, place in places.items()}

    @torch.inference_mode()
    def head(self, x_NH: Tensor) -> Tensor:
        """Logits [N, V], float32. They are large, so callers pass many rows in pieces."""
        return self.ops.lm_head(x_NH, self.weights.head_VH)

    @torch.inference_mode()
    def choose(self, x_NH: Tensor, sampling: SamplingBatch) -> Tensor:
        """Token ids [N] of rows with no sampling parameter but temperature, equal to those sampled from their
        logits."""
        return self.ops.chooser.choose(x_NH, self.weights.head_VH, self.weights.prepared_head, sampling)

    def choose_few(self, x_KH: Tensor, few_KA: Tensor, temperature_K: Tensor, noise_KA: Tensor) -> Tensor:
        """Token ids [K] of rows that choose among a few tokens."""
        return self.ops.choose_few(x_KH, self.weights.head_VH, few_KA, temperature_K, noise_KA)

    @property
    def layer_of_each_kind(self) -> tuple[int, ...]:
        """The first layer of each kind: a combination of window, number of experts, and type of prepared experts."""
        prepared = (type(layer.experts) for layer in self.weights.layers)
        kinds = list(zip(self.config.windows, self.config.experts, prepared, strict=True))
        return tuple(i for i, kind in enumerate(kinds) if kind not in kinds[:i])

    def of_layers(self, layers: Sequence[int]) -> "GptOss":
        """Embedding, these layers and the head; it shares all weights and the table of rope."""
        weights = replace(self.weights, layers=[self.weights.layers[i] for i in layers])
        exponents = None if self._kv_exponents is None else [self._kv_exponents[i] for i in layers]
        return GptOss(self.config.of_layers(layers), weights, self.ops, exponents, self.cos_sin, self._depth)

    def with_ops(self, ops: Ops) -> "GptOss":
        """The same model, computed by other ops that take the same weights."""
        return GptOss(self.config, self.weights, ops, self._kv_exponents, self.cos_sin, self._depth)

    def _layer_caches(self, batch: Batch, kv: KVCache) -> list[LayerCache]:
        """Layers of a group have consecutive indices in that group's memory, in model order."""
        caches: dict[int, LayerCache] = {}
        for (window, layers), pages, group in zip(self._layers_by_window.items(), kv, batch.groups, strict=True):
            for place, layer in enumerate(layers):
                exponents_2G = None if self._kv_exponents is None else self._kv_exponents[layer]
                caches[layer] = LayerCache(pages[:, place], group, window, exponents_2G)
        return [caches[layer] for layer in range(len(caches))]

    def _attend(
        self,
        x: Tensor,
        residual_TH: Tensor | None,
        layer: LayerWeights,
        cache: LayerCache,
        batch: Batch,
        added: AddedLayer | None,
    ) -> tuple[Tensor, Tensor]:
        ops, group = self.ops, cache.group
        place = self.cos_sin, batch.positions_T, cache.kv_pages, group.slots_T
        to_qkv = None if added is None else added.qkv
        projection = QkvProjection(layer.qkv_weight_FH, layer.qkv_bias_F, *place, cache.exponents_2G, to_qkv)
        eps = self.config.rms_norm_eps
        q_TQD, residual_TH = ops.norm_qkv(x, layer.input_norm_H, eps, residual_TH, projection)
        heads = ops.attention(q_TQD, cache.kv_pages, batch, group, layer.sinks_Q, cache.window)
        x = ops.out_proj(heads, layer.out_weight, layer.out_bias_H, None if added is None else added.out)
        return x, residual_TH

    def _mix_experts(
        self, x: Tensor, residual_TH: Tensor, layer: LayerWeights, added: AddedLayer | None
    ) -> tuple[Tensor, Tensor]:
        ops, config = self.ops, self.config
        router = layer.router_weight_EH, layer.router_bias_E, config.num_experts_per_tok
        x_TH, residual_TH, routing = ops.norm_route(
            x, layer.post_attention_norm_H, config.rms_norm_eps, residual_TH, *router
        )
        if added is not None:
            routing = added.routed(x_TH, routing, layer.router_weight_EH, layer.router_bias_E)
        return ops.moe(x_TH, routing, layer.experts, config.swiglu_limit), residual_TH


def rope_table(config: ModelConfig, device: torch.device) -> Tensor:
    """[max_position_embeddings, D] float32: the cos_sin of ops.norm_qkv."""
    return yarn_cos_sin(config.max_position_embeddings, config.head_dim, device, **asdict(config.yarn))
