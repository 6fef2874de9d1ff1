"""Step times composed of times of ops: one body over prompt and decode tokens together, as engines run it.

    seconds = layers * (GEMMs + experts + sums + attention) + head + the rest

The rest is what the tables have no rows for: norms, rotary embedding, sampling, launches. It is fitted on whole steps
(Rest). Beyond the measured contexts attention grows as it does for batches that are bound by memory; such a step is
"scaled".
"""

import re
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import log2
from typing import NamedTuple

from oscine.extensions.plan.foreign.ops import OpTable
from oscine.timing.answer import NO_END, Cell, Class, NotMeasuredError
from oscine.timing.curve import Curve, Segment, between
from oscine.timing.features import StepFeatures
from oscine.timing.table import Header, StepTable

_US = 1e-6
_BUSY = 32  # rows from which on reading keys and values is bound by memory
_HIDDEN, _HEADS, _WINDOW = 2880, 64, 128
_ROW_BYTES = 2 * _HIDDEN  # bfloat16


class Shapes(NamedTuple):
    """Half of the layers have a window."""

    model: str
    layers: int
    experts: int


MODELS = {"120b": Shapes("120b", 36, 128), "20b": Shapes("20b", 24, 32)}


class GpuLayout(NamedTuple):
    """GPUs of one engine, or of engines that share experts: tp divides attention, experts are divided by tp and ep."""

    gpus: int = 1
    tp: int = 1
    experts_tp: int = 1
    experts_ep: int = 1

    @property
    def engines(self) -> int:
        return self.gpus // self.tp


class Rest(NamedTuple):
    """What a step takes beside its ops, in seconds, and factors of its ops. Times are sums of these times Parts."""

    decodes: float = 1.0  # factor of the ops, by the share of decode rows among the tokens
    prompts: float = 1.0  # and of prompt tokens
    step_s: float = 0.0
    row_s: float = 0.0  # per decode row: scheduling, sampling, detokenisation
    token_s: float = 0.0  # per prompt token: norms, rotary embedding, copies
    rank_s: float = 0.0  # per doubling of the GPUs
    eager_s: float = 0.0  # of a step with prompts: it is no CUDA graph
    exchange_s: float = 0.0  # of engines that share experts, per doubling of the expert-parallel ranks


class Parts(NamedTuple):
    """A step's ops and numbers, in the order of Rest; then what grows with the context, which the ops lack."""

    decodes_s: float
    prompts_s: float
    steps: float
    rows: float
    tokens: float
    doublings: float
    eager: float
    exchange: float
    per_context_s: float = 0.0  # seconds per token of context
    last_context: int = NO_END  # tokens, up to which they are valid
    factor: float = 1.0  # by which attention reads more than was measured


class ComposedSurface:
    """Implements Surface, for one layout of a model on one kind of GPU."""

    def __init__(
        self, tables: Sequence[OpTable], shapes: Shapes, layout: GpuLayout, rest: Rest, kv: str = "bfloat16"
    ) -> None:
        """`tables`: the first one is used; experts that it lacks have the ratios of the others.

        Raises NotMeasuredError for a layout or a type of keys and values (`kv`) that no table has.
        """
        self._ops, self._shapes, self._layout, self._rest = tables[0], shapes, layout, rest
        self._heads = _HEADS // layout.tp
        self._experts = _experts(tables, shapes, layout)
        tp = layout.tp
        names = "qkv", "output", "head"
        gemms = {name: self._ops.curve("gemm", name=name, tp=tp) for name in names}
        gemms["router"] = self._ops.curve("gemm", name="router", tp=1)
        sums = self._ops.curve("sum", gpus=layout.gpus)
        own_sums = self._ops.curve("sum", gpus=tp)
        if None in gemms.values() or (layout.gpus > 1 and sums is None) or (tp > 1 and own_sums is None):
            raise NotMeasuredError(f"{self._ops.header.gpu} has no times of {layout.gpus} GPUs with {tp} ranks")
        self._gemms = {name: curve for name, curve in gemms.items() if curve is not None}
        self._sums, self._own_sums = sums, own_sums
        self._decodes = {window: _decodes(self._ops, self._heads, window, kv) for window in (0, _WINDOW)}
        self._prefills = {window: _prefills(self._ops, self._heads, window) for window in (0, _WINDOW)}
        if any(not one.sizes for one in (*self._decodes.values(), *self._prefills.values())):
            raise NotMeasuredError(f"{self._ops.header.gpu} has no attention of {self._heads} heads with {kv} keys")
        self._body_us = lru_cache(1 << 12)(self._compute_body_us)
        self._window = lru_cache(1 << 10)(partial(_of_batch, self._decodes[_WINDOW]))

    def cell(self, step: StepFeatures, *, scaled: bool = False) -> Cell:
        """Implements Surface.cell."""
        parts, rest = self.parts(step), self._rest
        if parts.factor > 1.0 and not scaled:
            raise NotMeasuredError(f"attention over {parts.factor:.1f} times as many tokens as were measured: {step}")
        share = step.prompt_tokens / max(step.tokens, 1)
        slope = parts.per_context_s * (rest.decodes * (1 - share) + rest.prompts * share)
        figures: Class = "scaled" if parts.factor > 1.0 else "composed"
        base = sum(a * b for a, b in zip(rest, parts, strict=False))
        return Cell(base, slope, parts.last_context, figures, parts.factor)

    def parts(self, step: StepFeatures, group_tokens: int | None = None) -> Parts:
        """Without what grows with the context. `group_tokens`: of all engines that share experts together.

        By default each engine has as many as this one.
        """
        everyone = step.tokens * self._layout.engines if group_tokens is None else group_tokens
        us = (
            self._body_us(step.tokens, everyone)
            + self._gemms["head"].value(max(step.sampled, 1))
            + self._prompt_us(step)
        )
        segment, grown = self._decode(step) if step.decode_rows else (Segment(0.0, 0.0, float("inf")), 1.0)
        half, rows = self._shapes.layers / 2 * _US, max(step.decode_rows, 1)
        seconds = us * _US + segment.base * half
        share = step.prompt_tokens / max(step.tokens, 1)
        end = NO_END if segment.end == float("inf") else int(segment.end * rows)
        layout, eager = self._layout, float(step.prompt_sequences > 0)
        exchange = log2(layout.experts_ep) if layout.engines > 1 else 0.0
        counts = 1.0, step.decode_rows, step.prompt_tokens, log2(layout.gpus), eager, exchange
        return Parts(seconds * (1 - share), seconds * share, *counts, segment.slope / rows * half, end, grown)

    def _compute_body_us(self, tokens: int, everyone: int) -> float:
        """Of all layers, without attention. `everyone`: tokens of all engines, which meet at the experts.

        Ranks of an engine add up after attention; all ranks do after the experts. Engines that share experts gather
        their tokens before the experts and scatter the sums after them, which together are one sum.
        """
        found = sum(self._gemms[name].value(tokens) for name in ("qkv", "output", "router"))
        found += self._experts(everyone)
        sums = 0.0
        if self._sums is not None and self._layout.gpus > 1:
            sums += self._sums.value(everyone * _ROW_BYTES)
        if self._own_sums is not None and self._layout.tp > 1:
            sums += self._own_sums.value(tokens * _ROW_BYTES)
        return (found + sums) * self._shapes.layers

    def _decode(self, step: StepFeatures) -> tuple[Segment, float]:
        """Of a layer of each kind, over the mean context; how much more it reads than was measured."""
        rows, mean = step.decode_rows, step.decode_context / step.decode_rows
        full, grown = _of_batch(self._decodes[0], rows, mean)
        window, _ = self._window(rows, min(mean, _WINDOW))
        window_us = window.base + window.slope * min(mean, _WINDOW)
        return Segment(full.base + window_us, full.slope, full.end), grown

    def _prompt_us(self, step: StepFeatures) -> float:
        """Attention of the chunks, as if all were alike: t(start + n) - t(start) in full layers, t(n) with a window."""
        if not step.prompt_sequences:
            return 0.0
        chunks = step.prompt_sequences
        length = step.prompt_tokens / chunks
        start = max(0.0, step.prompt_pairs / step.prompt_tokens - (length + 1) / 2)
        full, window = self._prefills[0], self._prefills[_WINDOW]
        found = _prefill_us(full, chunks, start + length) + _prefill_us(window, chunks, length)
        if start > 0:
            found -= _prefill_us(full, chunks, start)
        return found * self._shapes.layers / 2


def composed_table(
    tables: Sequence[OpTable],
    model: str,
    layout: GpuLayout,
    rest: Rest,
    *,
    exchange: str | None = None,
    kv: str = "bfloat16",
    scaled: bool = False,
) -> StepTable:
    """`exchange`: for which hardware and framework Rest.exchange_s was fitted, if for others than these.

    Raises NotMeasuredError for a model, layout or type of keys and values that the tables do not have.
    """
    if model not in MODELS:
        raise NotMeasuredError(f"there are step times of {' and '.join(MODELS)}, not of {model}")
    own, shapes = tables[0].header, MODELS[model]
    borrowed = f"; the exchange between engines that share experts is that of {exchange}" if exchange else ""
    header = Header(
        model=model,
        layers=shapes.layers,
        hidden=_HIDDEN,
        gpu=own.gpu,
        source=f"composed of times of ops of {_short(own.source)}{borrowed}",
        figures="composed",
        bytes_per_s=own.bytes_per_s,
        flops_per_s=own.flops_per_s,
        framework=own.framework,
        version=own.version,
        licence=own.licence,
        sha256=own.sha256,
        num_gpus=layout.gpus,
        tensor_parallel_size=layout.tp,
        expert_parallel_size=layout.engines,
        kv_cache_dtype=kv,
        activation_dtype=own.activations,
    )
    return StepTable(header, ComposedSurface(tables, shapes, layout, rest, kv), scaled=scaled)


def _short(wheel: str) -> str:
    """Name and version of a wheel, without its build; any other source as it is."""
    found = re.match(r"(\w+)-(\d+(?:\.\d+)*)\b.*\.whl$", wheel)
    return f"{found[1]} {found[2]}" if found else wheel


def _experts(tables: Sequence[OpTable], shapes: Shapes, layout: GpuLayout) -> Callable[[float], float]:
    """Microseconds of a layer's experts by tokens of the whole group."""
    tp, ep, count = layout.experts_tp, layout.experts_ep, shapes.experts
    if (own := tables[0].curve("experts", experts=count, tp=tp, ep=ep)) is not None:
        return own.value
    known = [(1, 1), (1, tp * ep)]
    for other in tables[1:]:
        theirs = other.curve("experts", experts=count, tp=tp, ep=ep)
        for pair in known:
            mine, base = (one.curve("experts", experts=count, tp=pair[0], ep=pair[1]) for one in (tables[0], other))
            if theirs is not None and mine is not None and base is not None:
                return partial(_in_ratio, mine, theirs, base)
    raise NotMeasuredError(f"{tables[0].header.gpu} has no experts divided by {tp} and {ep}")


def _in_ratio(mine: Curve, theirs: Curve, base: Curve, tokens: float) -> float:
    return mine.value(tokens) * theirs.value(tokens) / base.value(tokens)


class _Batches(NamedTuple):
    """Times of attention by context (or length of prompts), a curve per size of the batch."""

    sizes: list[int]
    curves: list[Curve]
    per_key: float = 0.0  # microseconds per key beyond the curves: that of batches which are bound by memory


def _decodes(ops: OpTable, heads: int, window: int, kv: str) -> _Batches:
    batches = ops.keys("decode", "batch", heads=heads, window=window, kv=kv)
    found = (ops.curve("decode", heads=heads, window=window, kv=kv, batch=batch) for batch in batches)
    curves = [curve for curve in found if curve is not None]
    slopes = [(curve.last_slope or 0.0) / size for size, curve in zip(batches, curves, strict=True) if size >= _BUSY]
    return _Batches(batches, curves, max(slopes, default=0.0))


def _prefills(ops: OpTable, heads: int, window: int) -> _Batches:
    batches = ops.keys("prefill", "batch", heads=heads, window=window)
    found = (ops.curve("prefill", heads=heads, window=window, batch=batch) for batch in batches)
    return _Batches(batches, [curve for curve in found if curve is not None])


def _of_batch(batches: _Batches, rows: int, mean: float) -> tuple[Segment, float]:
    """Over the mean context, between batches in proportion; beyond the largest one too."""
    sizes, curves, per_key = batches
    place = between(sizes, rows)
    first, second = sizes[place.low], sizes[place.high]
    low, high = _segment(curves[place.low], mean, per_key * first), _segment(curves[place.high], mean, per_key * second)
    last = curves[place.low].xs[-1] if place.factor > 1 else max(curves[i].xs[-1] for i in (place.low, place.high))
    weight = 0.0 if first == second else (rows - first) / (second - first)
    scale = place.factor
    segment = Segment(
        (low.base + (high.base - low.base) * weight) * scale,
        (low.slope + (high.slope - low.slope) * weight) * scale,
        min(low.end, high.end),
    )
    return segment, max(1.0, mean / last) * place.factor


def _segment(curve: Curve, mean: float, slope: float) -> Segment:
    """Beyond the last point with this slope, that of batches which are bound by memory."""
    last = curve.xs[-1]
    return curve.at(mean) if mean <= last else Segment(curve.ys[-1] - slope * last, slope, float("inf"))


def _prefill_us(batches: _Batches, chunks: int, length: float) -> float:
    """Between numbers of chunks in proportion; beyond the longest prompt as its square."""
    sizes, curves, _ = batches
    place = between(sizes, chunks)

    def at(curve: Curve) -> float:
        last = curve.xs[-1]
        if length > last:
            return curve.ys[-1] * (length / last) ** 2
        return curve.value(length)

    low, high = at(curves[place.low]), at(curves[place.high])
    first, second = sizes[place.low], sizes[place.high]
    weight = 0.0 if first == second else (chunks - first) / (second - first)
    return (low + (high - low) * weight) * place.factor
