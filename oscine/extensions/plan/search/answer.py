"""The answer of a search: the best candidate, the runner-up and why it lost, money, energy, the loss of a node."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from oscine.extensions.plan.search.beyond import Split, WithDrafts, splits, with_drafts
from oscine.extensions.plan.search.rounds import Found, Judged, estimated_row, meets, worth
from oscine.extensions.plan.search.space import Candidate, Layout
from oscine.extensions.plan.search.trials import Simulate, Trial
from oscine.timing.answer import Class, NotMeasuredError, worst
from oscine.timing.features import StepFeatures
from oscine.timing.nearby import watts_of

_SWEEP = (1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512, 768, 1024)  # sequences of an engine
_HOUR_S = 3600


class FrontPoint(NamedTuple):
    """An engine with so many sequences all the time."""

    layout: Layout
    rows: int
    tok_s_user: float
    tok_s_gpu: float


@dataclass(frozen=True)
class Loss:
    """What is left without a node, or without a replica if all are on one node."""

    lost: str
    replicas: int  # that are left
    trial: Trial | None  # None if nothing is left


@dataclass(frozen=True)
class Answer:
    """What `oscine plan` prints and writes."""

    found: Found
    best: Judged
    runner_up: Judged | None
    why: str  # the runner-up lost
    loss: Loss
    front: tuple[FrontPoint, ...]
    sweep: tuple[FrontPoint, ...]  # of all layouts
    split: Split | None
    drafts: WithDrafts | None
    acceptance: float | None  # of drafts, if they were asked for

    @property
    def tok_s(self) -> float:
        return tok_s(self.best)

    @property
    def figures(self) -> Class:
        return worst(*(trial.figures for trial in self.best.whole))

    @property
    def factor(self) -> float:
        return max(trial.factor for trial in self.best.whole)

    @property
    def money(self) -> float | None:
        """Per million generated tokens."""
        price = self.found.question.price(self.best.candidate.layout.gpu)
        return None if price is None else price * self.best.candidate.gpus / _HOUR_S / self.tok_s * 1e6

    @property
    def energy(self) -> tuple[float, str]:
        """Joules per generated token, and where they come from."""
        candidate, model = self.best.candidate, self.found.models[self.best.candidate.layout]
        rows, context = max(1, round(self.best.estimate.rows)), model.demand.context
        try:
            watts = watts_of(model.table.points)(StepFeatures(rows, rows * context, sampled=rows))
        except NotMeasuredError:
            limit = candidate.layout.gpu.watts
            return limit * candidate.gpus / self.tok_s, f"at most, with all GPUs at their limit of {limit:,.0f} W"
        return watts * candidate.engines / self.tok_s, "by the watts of the table"


def tok_s(one: Judged) -> float:
    """Of the whole fleet, the mean of all seeds."""
    return sum(trial.tok_s for trial in one.whole) / len(one.whole) / one.share


def answer_of(found: Found, simulate: Simulate, acceptance: float | None = None) -> Answer:
    """`found` has finals, of which the first meets the goals."""
    best, *others = found.finals
    runner_up = next((one for one in others if all(trial.row for trial in one.whole)), None)
    sweep = tuple(_sweep(found))
    counts = {gpu.name: count for gpu, count in found.question.hardware}
    possible = list(splits(found.models, counts)) if found.question.traffic.trace is None else []
    layout = best.candidate.layout
    drafts = None
    if acceptance is not None:
        drafts = with_drafts(found.models, layout, best.candidate.replicas, acceptance)
    return Answer(
        found,
        best,
        runner_up,
        "" if runner_up is None else _why(found, best, runner_up),
        _loss(found, best, simulate),
        tuple(front(sweep)),
        sweep,
        _best_split(found, possible),
        drafts,
        acceptance,
    )


def _why(found: Found, best: Judged, other: Judged) -> str:
    question = found.question
    if question.goals.all and not meets(question, other):
        trial = max(other.whole, key=lambda one: question.goals.excess(one.row))
        return trial.error or f"it misses the goals: {question.goals.found(trial.row)}"
    ours, theirs = (worth(question, one.candidate, tok_s(one)) for one in (best, other))
    if not question.goals.all:
        unit = "tokens/s"
    else:
        unit = "tokens per money" if question.price(best.candidate.layout.gpu) else "tokens/s per GPU"
    return f"{1 - theirs / ours:.1%} fewer {unit}"


def _loss(found: Found, best: Judged, simulate: Simulate) -> Loss:
    """The same load on what is left."""
    question, candidate = found.question, best.candidate
    nodes = ceil(candidate.replicas / candidate.layout.per_node)
    lost = candidate.layout.per_node if nodes > 1 else 1
    name = (
        f"a node, {lost} of {candidate.replicas} replicas"
        if nodes > 1
        else f"a GPU, 1 of {candidate.replicas} replicas"
    )
    left = candidate.replicas - lost
    if left < 1:
        return Loss(name, 0, None)
    some = replace(candidate, replicas=left)
    share = max(1, round(left * best.share)) / left
    requests = best.whole[0].row["completed"]
    (trial,) = simulate([question.scenario(some, None if question.traffic.trace else requests, share=share)])
    return Loss(name, left, trial)


def _sweep(found: Found) -> Iterable[FrontPoint]:
    for layout, model in found.models.items():
        sizes = {*(rows for rows in _SWEEP if rows < model.max_num_seqs), model.max_num_seqs}
        for rows in sorted(sizes):
            try:
                working = model.working(rows)
            except NotMeasuredError:
                continue
            tok_s = working.requests_s * model.demand.answer
            yield FrontPoint(layout, rows, 1 / working.tpot_s, tok_s / layout.ranks)


def front(points: Iterable[FrontPoint]) -> list[FrontPoint]:
    """Those that no other point beats in both figures, the fastest for users first."""
    found: list[FrontPoint] = []
    for point in sorted(points, key=lambda one: (-one.tok_s_user, -one.tok_s_gpu)):
        if not found or point.tok_s_gpu > found[-1].tok_s_gpu:
            found.append(point)
    return found


def _best_split(found: Found, possible: Sequence[Split]) -> Split | None:
    question = found.question

    def value(split: Split) -> tuple[bool, float]:
        is_good = question.goals.excess(estimated_row(split.estimate)) <= 1.0
        candidate = Candidate(split.layout, split.prefill + split.decode, 0, 0)
        return is_good, worth(question, candidate, split.estimate.tok_s)

    return max(possible, key=value, default=None)
