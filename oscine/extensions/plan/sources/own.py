"""Step times of Oscine's own kernels, from the measured steps that come with the package.

There are tables of `oscine profile` (data/steps) of both models on one H200, of 120b on two, and of 120b on one with
FP8 activations. All other steps, layouts and GPUs follow from a few measured steps, with exact activations:

    decode   body(rows) + bytes of keys and values / bandwidth
    prompts  body(tokens, pairs of a query and a key)
    mixed    the body of all tokens together, and the keys and values of the decodes

The bodies, and layouts of more GPUs than were measured, are those of oscine/extensions/timing. What is interpolated
between measured steps has this class; mixed steps are composed; further layouts and larger steps are scaled.
"""

from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

from oscine.extensions.plan.sources.gpus import Gpu
from oscine.extensions.timing.machine import Chip, Group, Link, StepTimes
from oscine.extensions.timing.table import Table, shipped_tables
from oscine.timing.answer import NO_END, Cell, Class, NotMeasuredError
from oscine.timing.features import StepFeatures
from oscine.timing.read import read_table
from oscine.timing.table import Header, StepTable, Surface

_SHARE = 0.9  # of the bandwidth that attention reaches: H100, 256 and 1,024 rows at two contexts
_MS = 1e-3
_PROFILED = Path(__file__).parents[1] / "data" / "steps"
_KV_BYTES = 2 * 8 * 64 * 2  # of a token and layer, in bfloat16
_TYPICAL = 8192  # tokens of context up to which a measured step tells what its body takes


class OwnSurface:
    """Of one engine of a group of GPUs. Raises NotMeasuredError for a model without measured steps."""

    def __init__(self, model: str, gpu: Gpu, group: Group, kv: str) -> None:
        own = [one for one in shipped_tables() if one.header.gpu == gpu.driver and one.header.model == model]
        single = next((one.header for one in own if one.header.num_gpus == 1), None)
        if single is None:
            raise NotMeasuredError(f"no steps of {model} were measured on {gpu.name}")
        self.header = single
        linked = max(own, key=lambda one: one.header.link_bytes_per_s).header
        link = Link("NVLink", linked.link_latency_s, linked.link_bytes_per_s) if linked.link_bytes_per_s else None
        per_token = single.layers / 2 * _KV_BYTES / (single.bytes_per_s * _SHARE)
        chip = Chip(single.gpu, single.bytes_per_s, single.flops_per_s)
        try:
            self._times = StepTimes.of([_bodies(one, per_token) for one in own], model, chip, link)
        except LookupError as error:
            raise NotMeasuredError(str(error)) from None
        self._group = group
        ranks = group.num_gpus if group.sharing == "tensor" else 1
        self._per_token = per_token / ranks / (2 if kv.startswith("fp8") else 1)
        known = [one for one in own if _is_of(one.header, group)]
        self._is_known = bool(known)
        self._most_rows = max(p.rows for one in known or own for p in one.points)
        self._least_tokens = min(p.tokens for one in own for p in one.points if p.kind == "prompts")
        self._body_s = lru_cache(1 << 14)(self._compute_body_s)
        self._rows_s = lru_cache(1 << 14)(lambda rows: self._times.decode_s(group, rows, 0))

    def cell(self, step: StepFeatures, *, scaled: bool = False) -> Cell:
        if step.verifies:
            raise NotMeasuredError(f"no steps that verify drafts were measured: {step}")
        figures: Class = "composed" if step.prompt_sequences else "interpolated"
        factor = max(1.0, step.decode_rows / self._most_rows)
        if not self._is_known or factor > 1.0:
            figures = "scaled"
            if not scaled:
                what = f"{self._group.num_gpus} GPUs" if not self._is_known else f"{step.decode_rows} rows"
                raise NotMeasuredError(f"no steps of {what} were measured on {self.header.gpu}")
        try:
            base_s = self._body_s(step.decode_rows, step.prompt_tokens, step.prompt_pairs)
        except LookupError as error:
            raise NotMeasuredError(str(error)) from None
        return Cell(base_s, self._per_token, NO_END, figures, factor)

    def _compute_body_s(self, rows: int, tokens: int, pairs: int) -> float:
        everything = rows + tokens
        decode_s = self._rows_s(everything)
        if not tokens:
            return decode_s
        most = max(everything, self._least_tokens)
        prompts_s = self._times.prompts_s(self._group, most, max(1, round(2 * pairs / everything) - 1))
        return max(
            self._rows_s(max(rows, 1)),
            min(prompts_s, decode_s) if most > everything else prompts_s,
        )


class ProfiledSurface:
    """Measured steps where there are any, else another surface. That has no steps that verify drafts."""

    def __init__(self, measured: Surface, others: OwnSurface) -> None:
        self._measured, self._others = measured, others

    def cell(self, step: StepFeatures, *, scaled: bool = False) -> Cell:
        if step.verifies:
            return self._measured.cell(step, scaled=scaled)
        try:
            return self._measured.cell(step, scaled=False)
        except NotMeasuredError:
            return self._others.cell(step, scaled=scaled)


def own_table(
    model: str, gpu: Gpu, ranks: int, sharing: int, *, kv: str, activations: str = "auto", scaled: bool
) -> StepTable:
    """Its points are those of a table of `oscine profile`, or none. FP8 activations: only measured steps.

    Raises NotMeasuredError.
    """
    group = Group("experts", sharing) if sharing > 1 else Group("tensor", ranks)
    surface: Surface = (others := OwnSurface(model, gpu, group, kv))
    profiled = _profiled(model, gpu, (ranks, sharing), activations) if kv == "bfloat16" else None
    if activations != "auto":
        if profiled is None:
            of = f"{model}, {max(ranks, sharing)} x {gpu.name}, keys and values in {kv}"
            raise NotMeasuredError(f"no steps with activations in {activations} were measured of {of}")
        surface = profiled.surface
    elif profiled is not None:
        surface = ProfiledSurface(profiled.surface, others)
    points = profiled.points if profiled is not None else ()
    header = replace(
        others.header,
        source=others.header.source if profiled is None else profiled.header.source,
        drafts_by="" if profiled is None else profiled.header.drafts_by,
        num_gpus=max(ranks, sharing),
        tensor_parallel_size=ranks,
        expert_parallel_size=sharing,
        kv_cache_dtype=kv,
        activation_dtype=activations,
    )
    return StepTable(header, surface, points, scaled=scaled)


def _profiled(model: str, gpu: Gpu, layout: tuple[int, int], activations: str) -> StepTable | None:
    wanted = model, gpu.driver, layout, activations
    for table in _profiled_tables():
        one = table.header
        sizes = one.tensor_parallel_size, one.expert_parallel_size
        if (one.model, one.gpu, sizes, one.activation_dtype) == wanted:
            return table
    return None


@cache
def _profiled_tables() -> tuple[StepTable, ...]:
    return tuple(map(read_table, sorted(_PROFILED.glob("*.jsonl"))))


def _bodies(table: Table, per_token_s: float) -> Table:
    """Its steps without the keys and values that decodes read."""
    per_token_ms = per_token_s / _MS / table.header.tensor_parallel_size
    points = [
        replace(p, context=1, ms=p.ms - per_token_ms * p.rows * p.context) if p.kind == "decode" else p
        for p in table.points
        if p.context <= _TYPICAL
    ]
    lowest = {p.rows: min(q.ms for q in points if q.rows == p.rows and q.kind == "decode") for p in points if p.rows}
    decodes = [p for p in points if p.kind == "decode" and p.ms == lowest[p.rows]]
    return Table(table.header, (*decodes, *(p for p in points if p.kind != "decode")))


def _is_of(header: Header, group: Group) -> bool:
    sizes = header.tensor_parallel_size, header.expert_parallel_size
    return sizes == ((group.num_gpus, 1) if group.sharing == "tensor" else (1, group.num_gpus))
