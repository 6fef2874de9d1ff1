"""One step of a model with random weights, op by op. Each op is a call on the inputs that it has in such a step.

The inputs of an op are the outputs of the op before it. So partial sums and prepared experts are those of the backends
in use. The calls of one op cycle through the weights and KV memory of several layers. So these come from memory and not
from a cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

import torch
from torch import Tensor

from oscine.executor.kv.allocate import allocate_group, dtype_name
from oscine.extensions.bench import roofline
from oscine.kv_group import KVGroup
from oscine.model.config import ModelConfig
from oscine.model.gpt_oss import rope_table
from oscine.model.skewed_weights import random_tensors
from oscine.model.weights import LayerWeights, Weights, load_weights
from oscine.ops.interface import (
    Batch,
    Ops,
    PageGroup,
    QkvProjection,
    Queries,
    Routing,
    SamplingBatch,
    UnrotatedQueries,
)
from oscine.ops.linear.hopper_bf12 import Bf12Matrix, read_by

NUM_LAYERS = 4  # of weights: more than the cache of any chip holds, and few enough to be made in a second
KV_BYTES = 256 << 20  # at least this much KV memory for one op to cycle through, in several layers ...
MAX_KV_LAYERS = 32  # ... at most
PAGE = 64  # tokens
MAX_DECODES = 1024  # tokens; more are chunks of prompts

Call = Callable[[int], object]


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Sequences that compute query_len tokens each, and have `context` tokens after that."""

    sequences: int
    query_len: int
    context: int

    @classmethod
    def of(cls, tokens: int, context: int) -> "StepLoad":
        """Decodes up to MAX_DECODES tokens, else prompts of `context` tokens, or the last chunk of one.

        Raises ValueError for an empty load.
        """
        if min(tokens, context) < 1:
            raise ValueError(f"--tokens and --context must be at least 1, not {tokens} and {context}")
        if tokens <= MAX_DECODES:
            return cls(tokens, 1, context)
        query_len = min(tokens, context)
        return cls(tokens // query_len, query_len, context)

    @property
    def tokens(self) -> int:
        return self.sequences * self.query_len


@dataclass(frozen=True, slots=True)
class OpCall:
    """An op at its place in the step."""

    name: str
    backend_of: str  # the op in ops/platforms/table.py that this call belongs to
    per_step: int  # calls in one step of the whole model
    call: Call  # the i-th of many
    num_bytes: float  # that one call must read and write
    flops: float  # of one call
    routings: tuple[Tensor, ...] = ()  # experts of each of its rows, [rows, K], that its result depends on


def random_weights(
    config: ModelConfig, ops: Ops, device: torch.device, dtype: torch.dtype, *, is_skewed: bool = False
) -> Weights:
    """NUM_LAYERS layers at true shapes, experts prepared for the moe in use."""
    short = config.of_layers(range(min(NUM_LAYERS, config.num_hidden_layers)))
    source = random_tensors(short, 0, device, is_skewed=is_skewed)
    return load_weights(short, source, device, dtype, ops=ops)


def step_calls(
    config: ModelConfig,
    weights: Weights,
    ops: Ops,
    load: StepLoad,
    kv: Sequence[Tensor] | None = None,
    *,
    seed: int = 0,
) -> list[OpCall]:
    """The ops in the order of the step; running them here once gives each its inputs.

    kv: pages in place of random ones. Ops write keys and values of the step's tokens into them. seed: of the tokens.
    """
    step = _Step(config, weights, load, seed)
    if kv is not None:
        step.kv = tuple(kv)
    return [step.embed_call(ops), *step.attention_calls(ops), *step.expert_calls(ops), *step.head_calls(ops)]


class _Step:
    """Builds calls in order: each method runs its ops once, for the next to read their outputs."""

    def __init__(self, config: ModelConfig, weights: Weights, load: StepLoad, seed: int) -> None:
        self.config, self.weights, self.load = config, weights, load
        self.device, self.dtype = weights.norm_H.device, weights.norm_H.dtype
        self.cos_sin = rope_table(config, self.device)
        self.batch = make_batch(config, load, self.device, seed)
        self.groups = config.kv_groups(PAGE, dtype_name(self.dtype))
        self.kv = tuple(map(_memory, self.groups, self.batch.groups))
        self.x = weights.embed_VH[self.batch.token_ids_T].to(self.dtype)
        self.residual_TH = torch.zeros_like(self.x)
        self.routings: list[Tensor] = []

    def embed_call(self, ops: Ops) -> OpCall:
        ids_T, embed_VH = self.batch.token_ids_T, self.weights.embed_VH
        return OpCall("embed", "embed", 1, lambda _: ops.embed(ids_T, embed_VH), 2 * _bytes(self.x), 0.0)

    def attention_calls(self, ops: Ops) -> list[OpCall]:
        config, batch, pages, eps = self.config, self.batch, self.kv[0], self.config.rms_norm_eps
        x_in, residual_in = self._after_experts(ops)
        table, positions_T, slots_T = self.cos_sin, batch.positions_T, batch.groups[0].slots_T

        def norm_qkv(i: int) -> tuple[Queries, Tensor]:
            w = self.layer(i)
            place = table, positions_T, pages[:, i % pages.shape[1]], slots_T
            return ops.norm_qkv(
                x_in, w.input_norm_H, eps, residual_in, QkvProjection(w.qkv_weight_FH, w.qkv_bias_F, *place)
            )

        queries, residual_TH = norm_qkv(0)
        q_TQD = queries.q_TQD if isinstance(queries, UnrotatedQueries) else queries
        attention = [self._attention(ops, place, queries) for place in range(len(self.groups))]
        heads = attention[0].call(0)
        assert isinstance(heads, Tensor)

        def out_proj(i: int) -> Tensor:
            return ops.out_proj(heads, self.layer(i).out_weight, self.layer(i).out_bias_H, None)

        self.x, self.residual_TH = out_proj(1), residual_TH  # not of layer 0: skewed, it marks first positions
        layers, first = config.num_hidden_layers, self.layer(0)
        return [
            self._linear("norm_qkv", layers, norm_qkv, first.qkv_weight_FH, x_in, residual_in, residual_TH, q_TQD),
            *attention,
            self._linear("out_proj", layers, out_proj, first.out_weight, heads, self.x),
        ]

    def _after_experts(self, ops: Ops) -> tuple[Tensor, Tensor]:
        """The input of all layers but the first: the sums of experts."""
        x_TH, residual_TH, routing = self._norm_route(ops, self.x, self.residual_TH, 0)
        sums = ops.moe(x_TH, routing, self.layer(0).experts, self.config.swiglu_limit)
        self.routings.append(routing.expert_ids_TK.clone())  # the moe may have chosen them
        return sums, residual_TH

    def _norm_route(self, ops: Ops, x: Tensor, residual_TH: Tensor, i: int) -> tuple[Tensor, Tensor, Routing]:
        config, w = self.config, self.layer(i)
        router = w.router_weight_EH, w.router_bias_E, config.num_experts_per_tok
        return ops.norm_route(x, w.post_attention_norm_H, config.rms_norm_eps, residual_TH, *router)

    def expert_calls(self, ops: Ops) -> list[OpCall]:
        config, x_in, residual_in = self.config, self.x, self.residual_TH

        def norm_route(i: int) -> tuple[Tensor, Tensor, Routing]:
            return self._norm_route(ops, x_in, residual_in, i)

        x_TH, residual_TH, routing = norm_route(0)

        def moe(i: int) -> Tensor:
            return ops.moe(x_TH, routing, self.layer(i).experts, config.swiglu_limit)

        self.x, self.residual_TH = moe(0), residual_TH
        before = tuple(self.routings)
        self.routings.append(routing.expert_ids_TK.clone())
        tokens, layers = self.load.tokens, config.num_hidden_layers
        weight_EH = self.layer(0).router_weight_EH
        router = _bytes(x_in, residual_in, x_TH, residual_TH, weight_EH)
        experts = len(set(routing.expert_ids_TK.flatten().tolist())) * roofline.expert_bytes(config)
        expert_flops = 2.0 * tokens * config.num_experts_per_tok * 3 * config.hidden_size * config.intermediate_size
        return [
            OpCall("norm_route", "norm_route", layers, norm_route, router, 2.0 * tokens * weight_EH.numel(), before),
            OpCall("moe", "moe", layers, moe, experts + _bytes(x_TH, x_TH), expert_flops, tuple(self.routings)),
        ]

    def head_calls(self, ops: Ops) -> list[OpCall]:
        """Only the last token of each sequence is sampled.

        A step of greedy rows only chooses. The ops that make all logits and sample from them are timed, but not
        counted.
        """
        rows, head_VH = self.batch.logits_rows_N, self.weights.head_VH
        assert rows is not None
        x_in, residual_in, norm_H = self.x[rows], self.residual_TH[rows], self.weights.norm_H

        def norm(_: int) -> tuple[Tensor, Tensor]:
            return ops.rms_norm(x_in, norm_H, self.config.rms_norm_eps, residual_in)

        x_NH, total_NH = norm(0)
        self.routings = [experts_TK[rows] for experts_TK in self.routings]
        logits_NV = ops.lm_head(x_NH, head_VH)
        heat_N = torch.zeros(len(rows), device=self.device)
        unused_N = heat_N.long()
        sampling = SamplingBatch(heat_N, unused_N, heat_N, heat_N, unused_N, unused_N, greedy=True, truncated=False)
        prepared, chooser = self.weights.prepared_head, ops.chooser
        read = head_VH.nbytes if prepared is None else chooser.prepared_bytes(*head_VH.shape)

        def choose(_: int) -> Tensor:
            return chooser.choose(x_NH, head_VH, prepared, sampling)

        routings, flops = tuple(self.routings), 2.0 * len(rows) * head_VH.numel()
        return [
            OpCall("rms_norm", "rms_norm", 1, norm, _bytes(x_in, residual_in, x_NH, total_NH), 0.0, routings),
            OpCall("choose", "chooser", 1, choose, read + _bytes(x_NH), flops, routings),
            self._linear("lm_head", 0, lambda _: ops.lm_head(x_NH, head_VH), head_VH, x_NH, logits_NV),
            OpCall("sample", "sample", 0, lambda _: ops.sample(logits_NV, sampling), _bytes(logits_NV), 0.0, routings),
        ]

    def layer(self, i: int) -> LayerWeights:
        return self.weights.layers[i % len(self.weights.layers)]

    def _linear(self, name: str, per_step: int, call: Call, weight: Tensor, x: Tensor, *others: Tensor) -> OpCall:
        read = _bytes(read_by(weight, x.shape[0]), x, *others)
        return OpCall(name, name, per_step, call, read, 2.0 * x.shape[0] * weight.numel(), tuple(self.routings))

    def _attention(self, ops: Ops, place: int, queries: Queries) -> OpCall:
        """Of one page group. The keys and values of each sequence are read once: a window, and those of the chunk."""
        load, config, pages, group = self.load, self.config, self.kv[place], self.groups[place]
        window = group.window

        def attention(i: int) -> Tensor:
            kv_pages, of_step = pages[:, i % pages.shape[1]], self.batch.groups[place]
            return ops.attention(queries, kv_pages, self.batch, of_step, self.layer(i).sinks_Q, window)

        first = load.context - load.query_len  # keys before the chunk
        seen = [min(first + i + 1, window or load.context) for i in range(load.query_len)]
        read = min(load.context, load.query_len + (window or load.context) - 1)
        flops = 4.0 * config.num_attention_heads * config.head_dim * sum(seen)
        num_bytes = (
            load.sequences * read * group.layer_token_bytes
            + 2 * len(self.x) * config.num_attention_heads * config.head_dim * self.dtype.itemsize
        )
        name, layers = f"attention {group.name}", len(group.layers)
        return OpCall(name, "attention", layers, attention, num_bytes, load.sequences * flops, tuple(self.routings))


def step_pages(config: ModelConfig, load: StepLoad, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Random pages, as a step without `kv` has them."""
    groups = config.kv_groups(PAGE, dtype_name(dtype))
    return tuple(map(_memory, groups, make_batch(config, load, device).groups))


def _memory(group: KVGroup, of_step: PageGroup) -> Tensor:
    """Memory for the pages of the step. It may have more or fewer layers than the model."""
    num_pages = int(of_step.page_table_SB.max()) + 1
    layer = replace(group, layers=(0,)).page_bytes * num_pages
    layers = tuple(range(min(MAX_KV_LAYERS, ceil(KV_BYTES / layer))))
    return random_pages(replace(group, layers=layers), of_step)


def random_pages(group: KVGroup, of_step: PageGroup) -> Tensor:
    """Keys and values of the pages that a step reads, normally distributed."""
    table_SB = of_step.page_table_SB
    return allocate_group(group, int(table_SB.max()) + 1, table_SB.device).normal_()


def make_batch(config: ModelConfig, load: StepLoad, device: torch.device, seed: int = 0) -> Batch:
    """Pages in random order; the table of a window holds only what the chunk can need. seed: of order and tokens."""
    first = load.context - load.query_len
    positions = torch.arange(first, load.context).repeat(load.sequences)
    row_T = torch.arange(load.sequences).repeat_interleave(load.query_len)
    starts = torch.arange(load.sequences + 1) * load.query_len
    generator = torch.Generator().manual_seed(seed)

    def group(first_needed: int) -> PageGroup:
        first_page, end_page = first_needed // PAGE, ceil(load.context / PAGE)
        needed = end_page - first_page
        table = torch.full((load.sequences, end_page), -1, dtype=torch.int32)
        deal = torch.randperm(load.sequences * needed, generator=generator).int()
        table[:, first_page:] = deal.view(load.sequences, needed)
        slots = table[row_T, positions // PAGE].long() * PAGE + positions % PAGE
        return PageGroup(table.to(device), slots.to(device))

    tokens = torch.randint(0, config.vocab_size, (load.tokens,), generator=generator)
    return Batch(
        token_ids_T=tokens.to(device),
        positions_T=positions.to(device),
        query_starts_S1=starts.int().to(device),
        context_lens_S=torch.full((load.sequences,), load.context, dtype=torch.int32, device=device),
        groups=tuple(group(0 if window is None else max(0, first - window + 1)) for window in config.layers_by_window),
        logits_rows_N=(starts[1:] - 1).to(device),
        num_decodes=load.sequences if load.query_len == 1 else 0,
    )


def _bytes(*tensors: Tensor | Bf12Matrix) -> float:
    return float(sum(tensor.nbytes for tensor in tensors))
