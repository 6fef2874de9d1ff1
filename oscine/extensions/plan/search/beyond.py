"""Estimates of what `oscine plan` does not simulate: prompts computed by other engines, and drafts."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from math import inf

from oscine.extensions.plan.foreign.ops import shipped_ops
from oscine.extensions.plan.search.estimate import EngineModel, Estimate, without_prompts
from oscine.extensions.plan.search.space import Layout
from oscine.timing.answer import NotMeasuredError
from oscine.timing.features import StepFeatures, pairs_of

_ROUNDS = 30
_BUSY = 0.95  # most that prefill engines may be busy
_KV_BYTES = 18 * 2 * 8 * 64 * 2  # of a token of 120b in layers with full attention
_MOST_DRAFTS = 5
_FEW = 16  # engines of which all splits are estimated


@dataclass(frozen=True, slots=True)
class Split:
    """Prefill engines that compute all prompts, and decode engines."""

    layout: Layout
    prefill: int
    decode: int
    estimate: Estimate

    @property
    def gpus(self) -> int:
        return (self.prefill + self.decode) * self.layout.gpus

    def __str__(self) -> str:
        return f"{self.prefill} prefill : {self.decode} decode x {self.layout}"


def splits(models: Mapping[Layout, EngineModel], counts: Mapping[str, int]) -> Iterator[Split]:
    """Of engines of equal layout. `counts`: GPUs of each kind. Engines that share experts are not divided."""
    for layout, model in models.items():
        if layout.sharing > 1:
            continue
        for prefill, decode in _pairs(counts[layout.gpu.name] // layout.gpus):
            try:
                yield Split(layout, prefill, decode, _of_split(model, layout, prefill, decode))
            except NotMeasuredError:
                continue


def _pairs(most: int) -> Iterator[tuple[int, int]]:
    """Numbers of prefill and decode engines; of many, only all engines together."""
    if most <= _FEW:
        yield from ((p, d) for p, d in product(range(1, most), repeat=2) if p + d <= most)
    else:
        yield from ((p, most - p) for p in range(1, most, max(1, most // _FEW)))


def _of_split(model: EngineModel, layout: Layout, prefill: int, decode: int) -> Estimate:
    demand = model.demand
    prompt_s, transfer_s = _prompt_s(model), demand.prompt * _KV_BYTES / _link(layout)
    rest = without_prompts(model)
    most = _BUSY * prefill / prompt_s
    rate, found, ttft_s = (demand.rate or most), Estimate(0.0, 0.0, inf, 0.0), inf
    for _ in range(_ROUNDS):
        share = min(rate * prompt_s / prefill, _BUSY)
        before_s = prompt_s + share * prompt_s / (2 * (1 - share)) + transfer_s
        users = None if demand.users is None else max(1, round(demand.users - rate * before_s))
        found = replace(rest, demand=rest.demand._replace(users=users, rate=min(rate, most))).estimate(decode)
        ttft_s = before_s + found.ttft_s
        if demand.users is None:
            break
        rate = (rate + min(found.tok_s / demand.answer, most)) / 2
    if demand.users is None and demand.rate > most:
        ttft_s = inf
    return replace(found, ttft_s=ttft_s, tok_s=min(found.tok_s, most * demand.answer))


def _prompt_s(model: EngineModel) -> float:
    demand, done, seconds = model.demand, 0, 0.0
    while done < demand.prompt:
        chunk = min(model.step_tokens, demand.prompt - done)
        step = StepFeatures(
            prompt_tokens=chunk, prompt_pairs=pairs_of(demand.cached + done, chunk), prompt_sequences=1, sampled=1
        )
        seconds, done = seconds + model.table.step_s(step), done + chunk
    return seconds


def _link(layout: Layout) -> float:
    """Bytes per second between two GPUs."""
    return next(one.header.link_bytes_per_s for one in shipped_ops() if one.header.system == layout.gpu.system)


@dataclass(frozen=True)
class Drafted(EngineModel):
    """With drafts that are accepted with a probability each, one after the other."""

    drafts: int = 0
    acceptance: float = 0.0

    def _decode_s(self, rows: int) -> float:
        count, context = rows * (1 + self.drafts), self.demand.context
        step = StepFeatures(count, count * context, sampled=rows, drafts=rows * self.drafts)
        return self.table.step_s(step) / sum(self.acceptance**i for i in range(self.drafts + 1))


@dataclass(frozen=True, slots=True)
class WithDrafts:
    """The estimate of a layout whose engines verify drafts."""

    layout: Layout
    drafts: int
    replicas: int
    estimate: Estimate


def with_drafts(
    models: Mapping[Layout, EngineModel], best: Layout, replicas: int, acceptance: float
) -> WithDrafts | None:
    """The best number of drafts of a layout. None if its table has no steps that verify drafts."""
    model, found = models[best], []
    if not any(point.kind == "verify" for point in model.table.points):
        return None
    for drafts in range(1, _MOST_DRAFTS + 1):
        values = model.table, model.demand, model.max_num_seqs, model.step_tokens
        try:
            estimate = Drafted(*values, drafts, acceptance).estimate(replicas * best.sharing)
        except NotMeasuredError:
            continue
        found.append(WithDrafts(best, drafts, replicas, estimate))
    return min(found, key=lambda one: one.estimate.tpot_s, default=None)
