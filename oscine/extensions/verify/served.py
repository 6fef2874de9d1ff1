"""The model as it is served, computed step by step and part by part: weights, ops and pages of one device.

Shape suffixes as in ops/interface.py.
"""

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor

from oscine.checkpoint.opened import OpenedModel
from oscine.executor.kv.allocate import allocate_group, dtype_name
from oscine.extensions.verify.bounds import Arithmetic
from oscine.model.gpt_oss import GptOss
from oscine.model.weights import LayerWeights
from oscine.ops.interface import Batch, PageGroup, QkvProjection, Routing, UnrotatedQueries
from oscine.ops.kv.reference import store
from oscine.ops.platforms.table import choose, platform_of, resolve
from oscine.ops.target import Target

PAGE = 64  # tokens
FEW_ROWS = 8  # for which many kernels are other ones


class Served:
    """A model and pages for one sequence of `num_tokens`. Tensors come in and go out on the CPU, in float32."""

    def __init__(self, opened: OpenedModel, num_tokens: int, *, progress: bool) -> None:
        """Loads the weights. Raises ValueError for a device that no platform serves."""
        self.config, self.device, self.dtype = opened.config, opened.device, opened.dtype
        target = Target.of(opened.device)
        self.platform = platform_of(target, opened.dtype)
        backends = choose(self.platform.name)
        ops = resolve(target, backends)
        self.model = GptOss(opened.config, opened.load(ops=ops, progress=progress), ops)
        inputs = "int8" if backends["moe"] == "native" else "exact" if self.platform.name == "cpu" else "planes"
        self.arithmetic = Arithmetic(opened.dtype, inputs)
        self._num_pages = ceil(num_tokens / PAGE)
        groups = opened.config.kv_groups(PAGE, dtype_name(opened.dtype))
        self._kv = tuple(allocate_group(group, self._num_pages, opened.device) for group in groups)
        self._places = {
            layer: (group, place)
            for group, layers in enumerate(opened.config.layers_by_window.values())
            for place, layer in enumerate(layers)
        }

    # ---- steps ----

    def step(self, tokens: Sequence[int], start: int) -> Tensor:
        """Logits [T, V] of tokens at positions start, start + 1 and so on, after those that were computed before."""
        batch = self._batch(tokens, start)
        return self.model.head(self.model.hidden(batch, self._kv)).cpu()

    def _batch(self, tokens: Sequence[int], start: int) -> Batch:
        end = start + len(tokens)
        position_T = torch.arange(start, end, device=self.device)
        table_SB = torch.arange(self._num_pages, dtype=torch.int32, device=self.device)[None]
        return Batch(
            token_ids_T=torch.tensor(tokens, device=self.device),
            positions_T=position_T,
            query_starts_S1=torch.tensor([0, len(tokens)], dtype=torch.int32, device=self.device),
            context_lens_S=torch.tensor([end], dtype=torch.int32, device=self.device),
            groups=(PageGroup(table_SB, position_T),) * len(self._kv),
            logits_rows_N=None,
            num_decodes=int(len(tokens) == 1),
        )

    # ---- parts: what goes in is exact in the dtype ----

    def embedding(self, ids_T: Tensor) -> Tensor:
        return _back(self.model.ops.embed(ids_T.to(self.device), self.model.weights.embed_VH))

    def project(self, index: int, x_TH: Tensor) -> tuple[Tensor, bool, Tensor, Tensor]:
        """Queries [T, Q, D] and whether they are rotated; rotated keys, and values, [T, G, D]."""
        layer, (group, place), num_tokens = self._layer(index), self._places[index], len(x_TH)
        position_T = torch.arange(num_tokens, device=self.device)
        pages = self._kv[group][:, place]
        projection = QkvProjection(
            layer.qkv_weight_FH, layer.qkv_bias_F, self.model.cos_sin, position_T, pages, position_T
        )
        norm_H, eps = layer.input_norm_H, self.config.rms_norm_eps
        queries, _ = self.model.ops.norm_qkv(self._to(x_TH), norm_H, eps, None, projection)
        keys, values = pages.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :num_tokens].float().cpu()
        rotated = not isinstance(queries, UnrotatedQueries)
        q_TQD = queries.q_TQD if isinstance(queries, UnrotatedQueries) else queries
        return q_TQD.float().cpu(), rotated, keys, values

    def attend(self, index: int, q_TQD: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> Tensor:
        """[T, Q * D] of rotated queries and keys."""
        (group, place), num_tokens = self._places[index], len(q_TQD)
        pages, batch = self._kv[group][:, place], self._batch([0] * num_tokens, 0)
        store(self._to(k_TGD), self._to(v_TGD), pages, batch.positions_T)
        sinks_Q, window = self._layer(index).sinks_Q, self.config.windows[index]
        return _back(self.model.ops.attention(self._to(q_TQD), pages, batch, batch.groups[group], sinks_Q, window))

    def out(self, index: int, heads: Tensor) -> Tensor:
        layer = self._layer(index)
        return _back(self.model.ops.out_proj(self._to(heads), layer.out_weight, layer.out_bias_H, None))

    def route(self, index: int, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The normed tokens, and ids and weights of their experts."""
        layer, config = self._layer(index), self.config
        x_TH = self._to(x_TH)
        router = layer.router_weight_EH, layer.router_bias_E, config.num_experts_per_tok
        norm_H, eps = layer.post_attention_norm_H, config.rms_norm_eps
        normed_TH, _, routing = self.model.ops.norm_route(torch.zeros_like(x_TH), norm_H, eps, x_TH, *router)
        return _back(normed_TH), routing.expert_ids_TK.long().cpu(), routing.weights_TK.float().cpu()

    def mix(self, index: int, normed_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        routing = Routing(ids_TK.int().to(self.device), weights_TK.to(self.device))
        if len(ids_TK):
            routing = routing.counted(self.config.experts[index])
        experts = self._layer(index).experts
        return _back(self.model.ops.moe(self._to(normed_TH), routing, experts, self.config.swiglu_limit))

    def norm(self, x_TH: Tensor) -> Tensor:
        """The last one."""
        norm_H, eps = self.model.weights.norm_H, self.config.rms_norm_eps
        return _back(self.model.ops.rms_norm(self._to(x_TH), norm_H, eps, None)[0])

    def head(self, normed_TH: Tensor) -> Tensor:
        return self.model.head(self._to(normed_TH)).cpu()

    def loaded(self, index: int) -> dict[str, Tensor]:
        """Tensors of a layer that ops read as they are, by their published names; projections joined as q, k, v."""
        layer = self._layer(index)
        heads = (self.config.num_attention_heads, *[self.config.num_key_value_heads] * 2)
        q, k, v = torch.split(layer.qkv_bias_F, [number * self.config.head_dim for number in heads])
        found = {
            "input_layernorm.weight": layer.input_norm_H,
            "self_attn.q_proj.bias": q,
            "self_attn.k_proj.bias": k,
            "self_attn.v_proj.bias": v,
            "self_attn.sinks": layer.sinks_Q,
            "self_attn.o_proj.bias": layer.out_bias_H,
            "post_attention_layernorm.weight": layer.post_attention_norm_H,
            "mlp.router.weight": layer.router_weight_EH,
            "mlp.router.bias": layer.router_bias_E,
        }
        return {name: tensor.float().cpu() for name, tensor in found.items()}

    def _layer(self, index: int) -> LayerWeights:
        return self.model.weights.layers[index]

    def _to(self, exact: Tensor) -> Tensor:
        return exact.to(self.device, self.dtype).contiguous()


def _back(x: Tensor) -> Tensor:
    """[T, H] in float32 on the CPU, of the same or of partial sums [T, J, H]."""
    return (x.float().sum(1) if x.dim() == 3 else x.float()).cpu()
