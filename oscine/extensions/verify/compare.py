"""The comparison: tensors as read, each part of each layer with the reference's input, then the whole model.

Tensors as Oscine reads and dequantises them must be equal to the reference's. Each part gets what the reference
computed before it, rounded to the dtype of the activations, so that errors do not add up and a wrong weight shows in
its own part. Bounds are those of bounds.py. Every row of the embedding and of the head, and every expert, is computed
at least once.

Shape suffixes as in ops/interface.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isfinite, sqrt

import torch
from torch import Tensor
from tqdm import tqdm

from oscine.extensions.verify.bounds import CERTAINTY, FLOAT32, FUNCTION, Arithmetic, dense_attention
from oscine.extensions.verify.reference import EXPERTS, CheckpointTensors, Projected, Reference, ReferenceLayer
from oscine.extensions.verify.served import FEW_ROWS, Served
from oscine.model.weights import TensorSource
from oscine.ops.moe.mxfp4 import dequantize

ROUNDINGS = 8  # of a layer, on the way of the residual stream
_ROWS = 16384  # of the embedding or the head at once


@dataclass(frozen=True, slots=True)
class Part:
    """One comparison. `ratio`: the largest of error / bound over all elements; the other two are of that element."""

    layer: int | None  # None: before or after all layers
    name: str
    ratio: float
    error: float
    bound: float
    experts: tuple[int, ...] = ()  # those that differ

    @property
    def agrees(self) -> bool:
        return self.ratio <= 1

    def __str__(self) -> str:
        place = "" if self.layer is None else f"layer {self.layer}: "
        experts = f" of experts {', '.join(map(str, self.experts))}" if self.experts else ""
        return f"{place}{self.name}{experts}"


def part(layer: int | None, name: str, got: Tensor, want: Tensor, bound: Tensor | None = None) -> Part:
    """Without a bound, both must be equal."""
    error = (got - want).abs().flatten()
    allowed = torch.zeros(()) if bound is None else bound
    allowed = allowed.expand_as(want).flatten()
    ratios = torch.where(error == 0, 0.0, error / allowed).nan_to_num(nan=inf, posinf=inf)
    worst = int(ratios.argmax())
    return Part(layer, name, float(ratios[worst]), float(error[worst]), float(allowed[worst]))


@dataclass(frozen=True, slots=True)
class Whole:
    """Logits and greedy tokens of the whole model against those of the reference."""

    positions: int
    relative_error: float  # root mean square of the differences, over that of the centred logits
    bound: float
    divergence: float  # mean Kullback-Leibler divergence, nats
    equal_best: float  # share of positions with the same most likely token
    tokens: int  # that the model chose, greedily
    equal_tokens: int  # that the reference would choose as well
    regret: float  # largest difference of the reference's best logit and that of the chosen token
    regret_bound: float

    @property
    def agrees(self) -> bool:
        return self.relative_error <= self.bound and self.regret <= self.regret_bound


@dataclass(frozen=True, slots=True)
class Comparison:
    parts: list[Part]
    whole: Whole

    @property
    def first_difference(self) -> str | None:
        for one in self.parts:
            if not one.agrees:
                return str(one)
        return None if self.whole.agrees else "logits of the whole model, though each part agrees"


def compare(
    served: Served,
    source: TensorSource,
    tensors: CheckpointTensors,
    reference: Reference,
    prompt: Sequence[int],
    new_tokens: int,
    *,
    progress: bool,
) -> Comparison:
    """`source`: what `served` was loaded from. `tensors`: those of the reference. `new_tokens`: that the model
    generates greedily, and that are compared beside the prompt."""
    with torch.inference_mode():
        tokens, logits_TV = generate(served, prompt, new_tokens)
        table_VH = tensors.get("model.embed_tokens.weight")
        parts = [
            equal(source, None, "embed_tokens", "model.embed_tokens.weight", table_VH),
            embedding(served, table_VH),
        ]
        x_TH = table_VH[tokens].float()
        for index in tqdm(range(served.config.num_hidden_layers), desc="Comparing layers", disable=not progress):
            layer = reference.layer(index, len(tokens))
            parts += read(source, layer, index)
            parts += LayerComparison(served, layer, index).parts(x_TH)
            x_TH = layer.forward(x_TH)
        norm_H, head_VH = (tensors.get(name) for name in ("model.norm.weight", "lm_head.weight"))
        parts += [
            equal(source, None, "norm", "model.norm.weight", norm_H),
            equal(source, None, "lm_head", "lm_head.weight", head_VH),
        ]
        parts += ending(served, x_TH, norm_H.float(), head_VH)
        normed_TH = _normed(x_TH, norm_H.float(), served.config.rms_norm_eps)
        wanted_TV = torch.cat([normed_TH @ rows.float().T for rows in torch.split(head_VH, _ROWS)], -1)
        return Comparison(parts, whole(served, logits_TV, wanted_TV, tokens, len(prompt)))


def generate(served: Served, prompt: Sequence[int], new_tokens: int) -> tuple[list[int], Tensor]:
    """The prompt in one step, then greedy tokens one by one. All tokens but the last one, and their logits."""
    tokens, logits = [*prompt], [served.step(prompt, 0)]
    for _ in range(new_tokens):
        tokens.append(int(logits[-1][-1].argmax()))
        logits.append(served.step(tokens[-1:], len(tokens) - 1))
    return tokens, torch.cat(logits)


def equal(source: TensorSource, layer: int | None, name: str, full_name: str, want: Tensor) -> Part:
    """A tensor as read. It is compared in pieces, in float32."""
    rows = zip(torch.split(source.get(full_name), _ROWS), torch.split(want, _ROWS), strict=True)
    return _worst([part(layer, name, got.float().cpu(), wanted.float()) for got, wanted in rows])


def read(source: TensorSource, layer: ReferenceLayer, index: int) -> Iterator[Part]:
    """The tensors of a layer, those of experts dequantised."""
    prefix = f"model.layers.{index}."
    for name, tensor in layer.tensors.items():
        if not name.startswith(EXPERTS) or name.endswith("_bias"):
            yield equal(source, index, name, prefix + name, tensor)
    for place, matrix in ((0, "gate_up_proj"), (2, "down_proj")):
        blocks, scales = (source.get(f"{prefix}{EXPERTS}{matrix}_{kind}") for kind in ("blocks", "scales"))
        name = f"{EXPERTS}{matrix}"
        found = [
            part(index, name, dequantize(blocks[i], scales[i]).cpu(), layer.expert(i)[place])
            for i in range(len(blocks))
        ]
        yield replace(_worst(found), experts=tuple(i for i, one in enumerate(found) if not one.agrees))


def embedding(served: Served, table_VH: Tensor) -> Part:
    found = [
        part(None, "embed_tokens", served.embedding(ids), served.arithmetic.rounded(table_VH[ids].float()))
        for ids in torch.split(torch.arange(len(table_VH)), _ROWS)
    ]
    return _worst(found)


def ending(served: Served, x_TH: Tensor, norm_H: Tensor, head_VH: Tensor) -> Iterator[Part]:
    arithmetic = served.arithmetic
    x_TH = arithmetic.rounded(x_TH)
    normed_TH = _normed(x_TH, norm_H, served.config.rms_norm_eps)
    yield part(None, "norm", served.norm(x_TH), normed_TH, arithmetic.norm(normed_TH))
    normed_TH = arithmetic.rounded(normed_TH)
    for rows in (normed_TH, normed_TH[:FEW_ROWS]):
        got_TV, found = served.head(rows), []
        for start in range(0, len(head_VH), _ROWS):
            weight = head_VH[start : start + _ROWS].float()
            bound = arithmetic.product(rows, weight, None, arithmetic.stored(rows))
            found.append(part(None, "lm_head", got_TV[:, start : start + _ROWS], rows @ weight.T, bound))
        yield _worst(found)


class LayerComparison:
    """The parts of one layer, in the order in which they are computed."""

    def __init__(self, served: Served, layer: ReferenceLayer, index: int) -> None:
        self._served, self._layer, self._index = served, layer, index
        self._arithmetic: Arithmetic = served.arithmetic

    def parts(self, x_TH: Tensor) -> Iterator[Part]:
        """`x_TH`: the reference's residual stream before the layer."""
        round_, layer = self._arithmetic.rounded, self._layer
        for name, got in self._served.loaded(self._index).items():
            yield part(self._index, name, got, round_(layer.tensors[name]))
        x_TH = round_(x_TH)
        normed_TH = layer.norm("input_layernorm", x_TH)
        projected = layer.project(normed_TH)
        for few in (False, True):
            yield from self._projections(x_TH, normed_TH, projected, few=few)
        q, k, v = (round_(x) for x in (projected.rotated_queries, projected.rotated_keys, projected.values))
        heads = layer.attend(q, k, v)
        yield self._attention(q, k, v, heads)
        heads = round_(heads)
        out_TH = layer.out(heads)
        yield from self._out(heads, out_TH)
        x_TH = round_(x_TH + out_TH)
        normed_TH = layer.norm("post_attention_layernorm", x_TH)
        yield from self._router(x_TH, normed_TH)
        yield from self._experts(round_(normed_TH))

    def _part(self, name: str, got: Tensor, want: Tensor, bound: Tensor) -> Part:
        return part(self._index, name, got, want, bound)

    def _weight(self, name: str) -> tuple[Tensor, Tensor]:
        return self._layer.tensors[f"{name}.weight"], self._layer.tensors[f"{name}.bias"]

    def _projections(self, x_TH: Tensor, normed_TH: Tensor, want: Projected, *, few: bool) -> Iterator[Part]:
        rows = slice(FEW_ROWS if few else None)
        x_TH, normed_TH, want = x_TH[rows], normed_TH[rows], Projected(*(each[rows] for each in want))
        got_q, rotated, got_k, got_v = self._served.project(self._index, x_TH)
        arithmetic, position_T = self._arithmetic, torch.arange(len(x_TH))
        of_norm = FUNCTION + CERTAINTY * sqrt(x_TH.shape[-1]) * FLOAT32  # relative, common to all elements of a row
        for name, got, plain, turned in (
            ("q", got_q, want.queries, want.rotated_queries if rotated else None),
            ("k", got_k, want.keys, want.rotated_keys),
            ("v", got_v, want.values, None),
        ):
            weight, bias = self._weight(f"self_attn.{name}_proj")
            bound = arithmetic.product(normed_TH, weight, bias, arithmetic.stored(normed_TH)).view_as(plain)
            bound = bound + of_norm * (plain.abs() + bias.abs().view_as(plain[0]))
            if turned is not None:
                bound = arithmetic.rotated(plain, bound, position_T)
            yield self._part(f"self_attn.{name}_proj", got, plain if turned is None else turned, bound)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, heads: Tensor) -> Part:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return dense_attention(q, k, v, self._layer.tensors["self_attn.sinks"], self._layer.mask_TT)

        bound = self._arithmetic.attention(attend, q, k, v)
        return self._part("self_attn", self._served.attend(self._index, q, k, v), heads, bound)

    def _out(self, heads: Tensor, out_TH: Tensor) -> Iterator[Part]:
        arithmetic = self._arithmetic
        bound = arithmetic.product(heads, *self._weight("self_attn.o_proj"), arithmetic.stored(heads))
        for rows in (slice(None), slice(FEW_ROWS)):
            yield self._part("self_attn.o_proj", self._served.out(self._index, heads[rows]), out_TH[rows], bound[rows])

    def _router(self, x_TH: Tensor, normed_TH: Tensor) -> Iterator[Part]:
        """Experts whose logits are closer than their errors may be chosen in place of each other."""
        arithmetic, logits_TE = self._arithmetic, self._layer.logits(normed_TH)
        bound_TE = arithmetic.product(normed_TH, *self._weight("mlp.router"), arithmetic.stored(normed_TH))
        for rows in (slice(None), slice(FEW_ROWS)):
            got_TH, ids_TK, got_TK = self._served.route(self._index, x_TH[rows])
            norm_TH = normed_TH[rows]
            yield self._part("post_attention_layernorm", got_TH, norm_TH, arithmetic.norm(norm_TH))
            of_logits_TK = bound_TE[rows].gather(-1, ids_TK)
            weights_TK = logits_TE[rows].gather(-1, ids_TK).softmax(-1)
            relative_T1 = 2 * of_logits_TK.amax(-1, keepdim=True) + 4 * FUNCTION
            yield self._part("mlp.router", got_TK, weights_TK, weights_TK * relative_T1)
            best_TK = logits_TE[rows].topk(ids_TK.shape[-1]).values
            chosen_TK = logits_TE[rows].gather(-1, ids_TK).sort(-1, descending=True).values
            yield self._part("mlp.router", chosen_TK, best_TK, 2 * bound_TE[rows].amax(-1, keepdim=True))

    def _experts(self, normed_TH: Tensor) -> Iterator[Part]:
        """Each token has one expert with the whole weight. Together they have all experts."""
        num_experts, chosen = self._served.config.experts[self._index], self._served.config.num_experts_per_tok
        num_tokens = len(normed_TH)
        for start in range(ceil(num_experts / num_tokens)):
            first_T = (torch.arange(num_tokens) + start * num_tokens) % num_experts
            ids_TK = (first_T[:, None] + torch.arange(chosen) * (num_experts // chosen)) % num_experts
            weights_TK = torch.zeros(ids_TK.shape)
            weights_TK[:, 0] = 1
            want_TH = self._layer.mix(normed_TH, ids_TK[:, :1], weights_TK[:, :1])
            bound_TH = torch.empty_like(want_TH)
            for expert in sorted({*first_T.tolist()}):
                own = first_T == expert
                limit = self._served.config.swiglu_limit
                bound_TH[own] = self._arithmetic.expert(normed_TH[own], self._layer.expert(expert), limit)
            for rows in (slice(None), slice(FEW_ROWS)):
                got_TH = self._served.mix(self._index, normed_TH[rows], ids_TK[rows], weights_TK[rows])
                yield self._expert_part(got_TH, want_TH[rows], bound_TH[rows], first_T[rows])

    def _expert_part(self, got_TH: Tensor, want_TH: Tensor, bound_TH: Tensor, first_T: Tensor) -> Part:
        found = self._part("mlp.experts", got_TH, want_TH, bound_TH)
        wrong_T = ~((got_TH - want_TH).abs() <= bound_TH).all(-1)
        experts = tuple(sorted({int(expert) for expert in first_T[wrong_T]}))
        return replace(found, experts=experts)


def whole(served: Served, got_TV: Tensor, want_TV: Tensor, tokens: Sequence[int], prompt: int) -> Whole:
    """A layer rounds its residual stream ROUNDINGS times or less; the roundings are independent, and each is carried
    to the logits with about the size that it has."""
    config = served.config
    centred_TV = want_TV - want_TV.mean(-1, keepdim=True)
    rms = float(centred_TV.square().mean().sqrt())
    error = float((got_TV - want_TV).square().mean().sqrt()) / rms
    unit = max(served.arithmetic.unit, sqrt(config.hidden_size) * FLOAT32)
    if served.arithmetic.expert_inputs == "int8":
        unit = 1 / 127 / sqrt(12) * sqrt(2)  # of the activations before both products of an expert
    bound = CERTAINTY * sqrt(ROUNDINGS * config.num_hidden_layers) * unit
    chosen = torch.tensor(tokens[prompt:])
    rows_NV = want_TV[prompt - 1 : prompt - 1 + len(chosen)]
    regrets_N = rows_NV.max(-1).values - rows_NV.gather(-1, chosen[:, None])[:, 0]
    divergence = torch.nn.functional.kl_div(
        got_TV.log_softmax(-1), want_TV.log_softmax(-1), log_target=True, reduction="batchmean"
    )
    return Whole(
        positions=len(want_TV),
        relative_error=error if isfinite(error) else inf,
        bound=bound,
        divergence=float(divergence),
        equal_best=float((got_TV.argmax(-1) == want_TV.argmax(-1)).float().mean()),
        tokens=len(chosen),
        equal_tokens=int((regrets_N == 0).sum()),
        regret=float(regrets_N.max()) if len(chosen) else 0.0,
        regret_bound=2 * bound * rms,
    )


def _normed(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    normed: Tensor = torch.nn.functional.rms_norm(x_TH, x_TH.shape[-1:], weight_H, eps)
    return normed


def _worst(parts: Sequence[Part]) -> Part:
    return max(parts, key=lambda one: one.ratio)
