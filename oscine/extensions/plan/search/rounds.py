"""Finds the best layout and limits: estimates of all, short simulations of some, whole ones of two."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf

from oscine.extensions.plan.run.scenario import Scenario
from oscine.extensions.plan.search.deployed import memory_plan
from oscine.extensions.plan.search.estimate import Demand, EngineModel, Estimate
from oscine.extensions.plan.search.question import Question
from oscine.extensions.plan.search.space import Candidate, Layout, layouts, replica_counts
from oscine.extensions.plan.search.trials import Simulate, Trial
from oscine.extensions.plan.sources.noted import NotedTable
from oscine.extensions.plan.sources.origin import usual_sources
from oscine.settings.config import MAX_SEQS
from oscine.timing.answer import NotMeasuredError

SEEDS = 3
_SEQS = (32, 64, 128, 256, 512)  # limits beside that of the memory
_STEPS = (2048, 8192)
_SLACK = 1.3  # by which an estimate may miss a goal
_SHORT, _ROUNDS, _PART = 6, 3, 4  # candidates simulated at once, how often, and replicas of each
# Generated tokens of a simulation, about; of a fleet that needs more than the second number, a part is simulated.
_SHORT_TOKENS, _WHOLE_TOKENS = (300_000, 2_000_000), (1_500_000, 9_000_000)
_OPEN_S = 60  # of arrivals at a rate
_PER_USER, _LEAST_PER_USER, _LEAST = 8, 6, 200  # requests: with few of them, beginning and end weigh too much


@dataclass(frozen=True)
class Judged:
    """A candidate, and what is known of it by now."""

    candidate: Candidate
    estimate: Estimate
    short: Trial | None = None  # of a few replicas
    whole: tuple[Trial, ...] = ()  # by seed
    share: float = 1.0  # of the fleet that `whole` simulated
    requests: int | None = None  # in each of these

    @property
    def keeps_up(self) -> bool:
        """Whether the engines can do as much as arrives. A simulation may be too short to show that they cannot."""
        return self.estimate.ttft_s < inf

    def scenario(self, question: Question, seed: int) -> Scenario:
        """Of `whole`."""
        return question.scenario(self.candidate, self.requests, share=self.share, seed=seed)


@dataclass
class Found:
    """All that a search knows."""

    question: Question
    demand: Demand
    models: dict[Layout, EngineModel] = field(default_factory=dict)  # with the largest limits
    left_out: dict[str, list[Layout]] = field(default_factory=dict)  # reason -> layouts
    estimated: list[Judged] = field(default_factory=list)
    tried: list[Judged] = field(default_factory=list)  # short simulations
    finals: list[Judged] = field(default_factory=list)  # best first


def worth(question: Question, candidate: Candidate, tok_s: float) -> float:
    """What is to be as large as possible: tokens per money (per GPU without prices), without goals tokens."""
    if not question.goals.all:
        return tok_s
    return tok_s / (candidate.gpus * (question.price(candidate.layout.gpu) or 1.0))


def search(question: Question, simulate: Simulate, say: Callable[[str, int], None]) -> Found:
    """`say`: what is done now, and in how many simulations. Raises ValueError if nothing fits or is known."""
    found = Found(question, question.traffic.demand())
    say("estimates", 0)
    for layout in _layouts(question):
        _estimate(found, layout)
    if not found.estimated:
        raise ValueError(_nothing(found))
    if not any(one.keeps_up for one in found.estimated):
        raise ValueError(_too_much(found))
    ranked = _ranked(found)
    for _ in range(_ROUNDS):
        chosen = [*islice(ranked, _SHORT)]
        say("short simulations", len(chosen))
        found.tried += _short(question, found.demand, chosen, simulate)
        if sum(_is_good(question, one, one.short) for one in found.tried) >= 2 or not chosen:
            break
    _finals(found, simulate, say)
    return found


def _layouts(question: Question) -> Iterator[Layout]:
    for gpu, count in question.hardware:
        sources = question.sources or usual_sources(gpu, question.model)
        yield from layouts(gpu, count, [one for one in sources if one.is_of(gpu)])


def _estimate(found: Found, layout: Layout) -> None:
    """Of all numbers of replicas and all limits."""
    question, demand = found.question, found.demand
    count = next(count for gpu, count in question.hardware if gpu == layout.gpu)
    reasons: list[str] = []
    try:
        table = layout.source.table(question.model, layout.ranks, layout.sharing, scaled=question.scaled)
        plan = memory_plan(question.model, layout, question.gpu_memory or layout.gpu.memory_bytes, demand.context)
        seqs, tokens = plan.max_num_seqs, plan.max_num_batched_tokens * layout.sharing
        noted = NotedTable(table)
        for most in sorted({seqs, *(one for one in _SEQS if one < seqs)}):
            for step in sorted({tokens, *(one for one in _STEPS if most * layout.sharing <= one < tokens)}):
                model = _model(noted, demand, layout, most, step)
                _estimate_counts(found, model, layout, replica_counts(layout, count), step, reasons)
    except (NotMeasuredError, ValueError) as error:
        reasons.append(str(error))
    if layout not in found.models:
        found.left_out.setdefault(reasons[0], []).append(layout)


def _estimate_counts(
    found: Found, model: EngineModel, layout: Layout, counts: Sequence[int], step: int, reasons: list[str]
) -> None:
    """With limits that lead to steps without known times there is no estimate."""
    try:
        for replicas in counts:
            candidate = Candidate(layout, replicas, model.max_num_seqs, step)
            found.estimated.append(Judged(candidate, model.estimate(candidate.engines)))
        found.models[layout] = model
    except NotMeasuredError as error:
        reasons.append(str(error))


def _model(table: NotedTable, demand: Demand, layout: Layout, seqs: int, tokens: int) -> EngineModel:
    return EngineModel(table, demand, seqs, max(seqs, tokens // layout.sharing))


def _nothing(found: Found) -> str:
    reasons = (f"{', '.join(map(str, own))}: {reason}" for reason, own in found.left_out.items())
    hint = "" if found.question.scaled else "; --scaled extrapolates step times"
    return f"no layout can be planned: {'; '.join(reasons)}{hint}"


def _too_much(found: Found) -> str:
    most = max(found.estimated, key=lambda one: one.estimate.tok_s)
    wanted = found.demand.rate * found.demand.answer
    hint = "; --scaled adds layouts that were left out" if found.left_out and not found.question.scaled else ""
    return (
        f"no plan keeps up with this load: {most.candidate} would generate some {most.estimate.tok_s:,.0f} of "
        f"{wanted:,.0f} tokens/s{hint}"
    )


def estimated_row(estimate: Estimate) -> dict[str, float]:
    """An estimate has no distribution."""
    names = ("mean", "median", "p90", "p95", "p99")
    return {f"{name}_tpot": estimate.tpot_s for name in names} | {f"{name}_ttft": estimate.ttft_s for name in names}


def _ranked(found: Found) -> Iterator[Judged]:
    """Those that may meet the goals by worth, then the others by how near they are; one per layout and replicas, then
    further limits of these."""
    question = found.question

    def order(one: Judged) -> tuple[float, ...]:
        excess = question.goals.excess(estimated_row(one.estimate))
        is_near = excess <= _SLACK and one.keeps_up
        value = worth(question, one.candidate, one.estimate.tok_s)
        value = float(f"{value:.2g}") if is_near else 0.0
        # Of equal worth: lower latency, then the limits that engines have by default, then larger ones.
        latency_s = one.estimate.ttft_s + found.demand.answer * one.estimate.tpot_s
        most = 0.0 if one.keeps_up else -one.estimate.tok_s
        seqs, tokens = one.candidate.max_num_seqs, one.candidate.max_num_batched_tokens
        return -value, most, excess, latency_s, seqs > MAX_SEQS, -seqs, -tokens

    rest = sorted(found.estimated, key=order)
    while rest:
        seen, later = set(), []
        for one in rest:
            place = one.candidate.layout, one.candidate.replicas
            if place in seen:
                later.append(one)
            else:
                seen.add(place)
                yield one
        rest = later


def _is_good(question: Question, one: Judged, trial: Trial | None) -> bool:
    return one.keeps_up and trial is not None and not trial.error and question.goals.are_met(trial.row)


def _requests(question: Question, demand: Demand, tokens: int, share: float) -> int | None:
    """Of a simulation of so many tokens, but at least some per user or a minute. None: all of a trace."""
    users = question.traffic.part(share).users
    if question.traffic.trace is not None:
        return None
    most = max(_LEAST, tokens // demand.answer)
    if users is None:
        return max(_LEAST, round(_OPEN_S * demand.rate * share))
    return max(min(most, _PER_USER * users), _LEAST_PER_USER * users, _LEAST)


def _short(question: Question, demand: Demand, chosen: Sequence[Judged], simulate: Simulate) -> list[Judged]:
    """On few replicas."""
    scenarios = []
    for one in chosen:
        replicas = one.candidate.replicas
        share = min(_share(question, demand, replicas, _SHORT_TOKENS[1]), _PART / replicas)
        share = 1.0 if question.traffic.trace is not None else share
        requests = _requests(question, demand, _SHORT_TOKENS[0], share)
        scenarios.append(question.scenario(one.candidate, requests, share=share))
    return [replace(one, short=trial) for one, trial in zip(chosen, simulate(scenarios), strict=True)]


def _finals(found: Found, simulate: Simulate, say: Callable[[str, int], None]) -> None:
    """Simulates the best of each two layouts or numbers of replicas in whole, until one meets the goals in all runs."""
    question = found.question

    def order(one: Judged) -> tuple[bool, float, float]:
        trial = one.short
        assert trial is not None
        if trial.error and not trial.row:
            return True, inf, 0.0
        if not _is_good(question, one, trial):
            return True, question.goals.excess(trial.row), -one.estimate.tok_s
        tok_s = float(trial.row["output_tput_per_gpu"]) * one.candidate.gpus
        return False, -worth(question, one.candidate, tok_s), 0.0

    rest = _distinct(sorted(found.tried, key=order))
    while pair := [*islice(rest, 2)]:
        say("whole simulations", len(pair) * SEEDS)
        found.finals += _whole(question, found.demand, pair, simulate)
        if any(meets(question, one) for one in found.finals) or order(pair[-1])[0]:
            break
    found.finals.sort(key=lambda one: (not meets(question, one), *_final_order(question, one)))


def _final_order(question: Question, one: Judged) -> tuple[float, float]:
    rows = [trial for trial in one.whole if trial.row]
    if not rows:
        return inf, inf
    if not meets(question, one):
        return max(question.goals.excess(trial.row) for trial in rows), 0.0
    mean = sum(trial.tok_s for trial in rows) / len(rows) / one.share
    return -worth(question, one.candidate, mean), 0.0


def meets(question: Question, one: Judged) -> bool:
    """Whether all runs met the goals."""
    return bool(one.whole) and all(_is_good(question, one, trial) for trial in one.whole)


def _distinct(judged: Iterable[Judged]) -> Iterator[Judged]:
    seen = set()
    for one in judged:
        place = one.candidate.layout, one.candidate.replicas
        if place not in seen:
            seen.add(place)
            yield one


def _whole(question: Question, demand: Demand, pair: Sequence[Judged], simulate: Simulate) -> list[Judged]:
    """Three seeds each. Of a large fleet a share with the same share of the load, in whole replicas."""
    sized = []
    for one in pair:
        share = _share(question, demand, one.candidate.replicas, _WHOLE_TOKENS[1])
        requests = _requests(question, demand, _WHOLE_TOKENS[0], share)
        sized.append(replace(one, share=share, requests=requests))
    trials = simulate([one.scenario(question, seed) for one in sized for seed in range(SEEDS)])
    return [replace(one, whole=tuple(trials[i * SEEDS : (i + 1) * SEEDS])) for i, one in enumerate(sized)]


def _share(question: Question, demand: Demand, replicas: int, tokens: int) -> float:
    """Of a fleet, in whole replicas, that a simulation of so many tokens covers."""
    if question.traffic.trace is not None:
        return 1.0
    users = question.traffic.users
    requests = _LEAST_PER_USER * users if users is not None else _OPEN_S * demand.rate
    return max(1, round(replicas * min(1.0, tokens / (requests * demand.answer)))) / replicas
