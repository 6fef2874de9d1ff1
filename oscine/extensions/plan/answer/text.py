"""The answer of a plan as lines of text."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from oscine.extensions.plan.run.scenario import Scenario
from oscine.extensions.plan.search.answer import Answer, Loss, tok_s
from oscine.extensions.plan.search.estimate import Estimate
from oscine.extensions.plan.search.question import Question
from oscine.extensions.plan.search.rounds import meets
from oscine.extensions.plan.search.space import Layout
from oscine.extensions.plan.search.trials import Trial
from oscine.extensions.plan.sources.origin import KERNELS, OWN, usual_sources
from oscine.settings.option import options_of

_STATISTICS = {"p50": "median", "p90": "p90", "p99": "p99"}


def title(question: Question) -> str:
    hardware = " or ".join(f"{count} {gpu.name}" for gpu, count in question.hardware)
    goals = f"; {question.goals}" if question.goals.all else ""
    return f"{question.model} on up to {hardware}: {load_text(question)}{goals}"


def load_text(question: Question) -> str:
    traffic = question.traffic
    if traffic.trace is not None:
        return f"the trace {traffic.trace}"
    load = f"{traffic.users:,} users" if traffic.users is not None else f"{traffic.rate:g} sessions per second"
    return f"{load}, {traffic.workload}"


def lines(answer: Answer) -> Iterator[tuple[str, str]]:
    """Names and values."""
    best, question = answer.best, answer.found.question
    candidate, trial = best.candidate, best.whole[0]
    yield "best", f"{candidate}, {_gpus(candidate.gpus)}; {candidate.limits}"
    if kernels := _other_kernels(candidate.layout, question.model):
        yield "kernels", kernels
    spread = [one.tok_s / best.share for one in best.whole]
    seeds = f"{min(spread):,.0f} to {max(spread):,.0f} with {len(spread)} seeds"
    yield "tokens/s", f"{answer.tok_s:,.0f}, {answer.tok_s / candidate.gpus:,.0f} per GPU ({seeds})"
    yield from _latency(trial)
    if best.share < 1.0:
        part = f"{round(best.share * candidate.replicas)} of {candidate.replicas} replicas"
        yield "simulated", f"{part}, with the same share of the load"
    yield "money", _money(answer)
    joules, source = answer.energy
    yield "energy", f"{joules:.3g} J per generated token, {source}"
    yield from _classes(answer)
    yield "headroom", f"without {answer.loss.lost}: {_loss(answer.loss, question)}"
    yield from _others(answer)


def _other_kernels(layout: Layout, model: str) -> str:
    """Says that the step times are not those of Oscine's kernels. Empty if they are, or if a file has them."""
    source = layout.source
    if source.kernels in ("", OWN):
        return ""
    has_own = usual_sources(layout.gpu, model)[0].kernels == OWN
    why = (
        f"--steps {layout.gpu.name.lower()}/{OWN} has those" if has_own else f"none were measured on {layout.gpu.name}"
    )
    return f"step times of {KERNELS[source.kernels]}'s kernels, not Oscine's: {why}"


def _latency(trial: Trial) -> Iterator[tuple[str, str]]:
    for name in ("ttft", "tpot"):
        values = (f"{short} {_ms(trial.row[f'{full}_{name}'])}" for short, full in _STATISTICS.items())
        yield f"{name.upper()}, ms", ", ".join(values)
    yield "tokens/s per user", f"{trial.row['median_intvty']:,.1f}, at the median TPOT"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f}"


def _money(answer: Answer) -> str:
    money = answer.money
    return "not known: see --price" if money is None else f"{money:.4g} per million generated tokens"


def _classes(answer: Answer) -> Iterator[tuple[str, str]]:
    layout, question = answer.best.candidate.layout, answer.found.question
    table = answer.found.models[layout].table
    factor = f", beyond the measured steps by up to {answer.factor:.1f}" if answer.factor > 1.0 else ""
    yield "step times", f"{answer.figures}{factor}; {layout.source.text} ({table.header.source})"
    source = layout.source.table(question.model, layout.ranks, layout.sharing, scaled=question.scaled)
    yield "known error", layout.source.known_error(source)
    if layout.sharing > 1:
        yield "assumed", "engines that share experts are simulated as if all of them had equal steps"


def _loss(loss: Loss, question: Question) -> str:
    if loss.trial is None:
        return "no replica is left"
    if not loss.trial.row:
        return loss.trial.error
    row = loss.trial.row
    goals = "" if not question.goals.all else _met(question, loss.trial)
    return f"TTFT p90 {_ms(row['p90_ttft'])} ms, TPOT p50 {_ms(row['median_tpot'])} ms{goals}"


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def _met(question: Question, trial: Trial) -> str:
    is_met = not trial.error and question.goals.are_met(trial.row)
    return "; the goals are still met" if is_met else "; the goals are missed"


def _others(answer: Answer) -> Iterator[tuple[str, str]]:
    if (other := answer.runner_up) is not None:
        what = f"{other.candidate}, {_gpus(other.candidate.gpus)}, {tok_s(other):,.0f} tokens/s"
        yield "runner-up", f"{what}: {answer.why}"
    if (split := answer.split) is not None:
        what = f"{split}, {_gpus(split.gpus)}: {_estimated(split.estimate)}"
        yield "estimated only", f"{what} ({_alike(answer)})"
    if (drafts := answer.drafts) is not None:
        what = f"with {drafts.drafts} draft{'s' * (drafts.drafts > 1)}: {_estimated(drafts.estimate)}"
        yield "estimated only", f"{what} ({_alike(answer)})"
    elif answer.acceptance is not None:
        yield "left out", "drafts: the step times of this layout have no steps that verify them"
    for reason, layouts in answer.found.left_out.items():
        yield "left out", f"{', '.join(map(str, layouts))}: {reason}"


def _alike(answer: Answer) -> str:
    return f"the best, estimated alike: {_estimated(answer.best.estimate)}"


def _estimated(estimate: Estimate) -> str:
    return f"{estimate.tok_s:,.0f} tokens/s, TTFT {estimate.ttft_s * 1e3:,.0f} ms, TPOT {estimate.tpot_s * 1e3:,.1f} ms"


def front_lines(answer: Answer) -> Iterator[tuple[str, ...]]:
    for point in answer.front:
        yield str(point.layout), f"{point.rows:,}", f"{point.tok_s_user:,.1f}", f"{point.tok_s_gpu:,.0f}"


FRONT = ("layout", "sequences per engine", "tokens/s per user", "tokens/s per GPU")


def unmet(answer: Answer) -> str:
    """How near the best comes, where no candidate meets the goals."""
    best, question = answer.best, answer.found.question
    assert not meets(question, best)
    rows = [trial for trial in best.whole if trial.row and trial.row["completed"]]
    hint = (
        "" if question.scaled or not answer.found.left_out else "; --scaled extrapolates to layouts that were left out"
    )
    if not rows:
        return f"nothing serves this load: {best.whole[0].error}{hint}"
    worst = max(rows, key=lambda one: (question.goals.excess(one.row), one.error))
    if not question.goals.all:
        reason = worst.error or "it does not keep up"
        return f"no plan serves the whole load; the nearest is {best.candidate}: {reason}{hint}"
    failed = f"; {worst.error}" if worst.error else ""
    return (
        f"no plan meets the goals ({question.goals}); the nearest is {best.candidate} with "
        f"{question.goals.found(worst.row)}{failed}{hint}"
    )


def simulate_command(file: Path, scenario: Scenario) -> str:
    """That has the figures of the first seed."""
    words = ["oscine", "simulate", str(file), "--steps", *(one.text for one in scenario.sources)]
    for name, value in (("users", scenario.users), ("rate", scenario.rate), ("trace", scenario.trace)):
        words += [] if value is None else [f"--{name}", f"{value}"]
    for section in (scenario.workload, scenario.sending, scenario.simulated):
        for option in options_of(type(section)):
            value = getattr(section, option.field)
            if value != option.default:
                words += [f"--{option.name}"] if option.is_flag else [f"--{option.name}", f"{value}"]
    return shlex.join(words)
