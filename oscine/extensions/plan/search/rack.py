"""From the published 1.5 million tokens per second of a rack to the audited figures, by changes of one assumption.

One GPU of the rack is simulated with its share of the users. Each row changes one more assumption, and the change of
the simulated figure is applied to the published one. What is left to the audited figure is not explained.
"""

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from oscine.extensions.bench.cli.load_options import Reporting, Sending, Workload
from oscine.extensions.plan.run.scenario import Scenario, Simulated
from oscine.extensions.plan.search.trials import Simulate, Trial
from oscine.extensions.plan.sources.origin import Source
from oscine.extensions.plan.validate.points import FILE
from oscine.extensions.replicas.spec.deployment import Deployment, ModelSpec, QueueLimits, RoleSpec
from oscine.settings.config import EngineOptions, ModelOptions, SchedulerOptions

PUBLISHED = 1.5e6  # tokens per second, by NVIDIA, of 72 GB200 and some 50,000 users; its configuration is not known
GPUS, USERS = 72, 694  # of the rack, and of each GPU
HARDWARE = ("gb200", "gb300")
_REQUESTS = 3 * USERS
_MILLION, _LIMITS = 1e6, {"p99_ttft": 3.0, "p99_tpot": 0.08}  # seconds, of MLPerf's server scenario


@dataclass(frozen=True, slots=True)
class Step:
    """An assumption more, and all before it."""

    text: str
    workload: Workload
    requests: int = _REQUESTS
    rates: tuple[float, ...] = ()  # requests per second and GPU, of which the highest within the limits counts
    audited: str = ""  # the scenario of MLPerf that has the same assumptions


_ANSWERS = 1278  # tokens on average, of MLPerf's data set (mlcommons/inference, language/gpt-oss-120b)
_PROMPTS = 4096  # an assumption: articles of PubMed, whose mean length was not found
_SPREAD = Workload(_PROMPTS, _ANSWERS, 1.0)
STEPS = (
    Step("1,024 tokens in and out, 694 users per GPU", Workload(1024, 1024)),
    Step("answers of 1,278 tokens", Workload(1024, _ANSWERS)),
    Step("prompts of 4,096 tokens", Workload(_PROMPTS, _ANSWERS)),
    Step("lengths of 0 to 2 times these", _SPREAD, 2 * _REQUESTS, audited="Offline"),
    Step(
        "random arrivals, TTFT p99 within 3 s, TPOT p99 within 80 ms",
        _SPREAD,
        requests=8000,  # some ten minutes, the least that MLPerf permits
        rates=(10.0, 11.0, 12.0, 13.0),
        audited="Server",
    ),
)


@dataclass(frozen=True, slots=True)
class Result:
    """Of one step on one kind of GPU; tokens per second of the rack."""

    tok_s: float
    figures: str  # the class of its step times
    rate: float | None = None  # requests per second and GPU


def results(hardware: str, simulate: Simulate) -> list[Result]:
    """Of all steps. Raises ValueError if a simulation fails, or no rate is within the limits."""
    scenarios = [_scenario(hardware, step, rate) for step in STEPS for rate in step.rates or (None,)]
    trials = iter(simulate(scenarios))
    return [_result(step, [next(trials) for _ in step.rates or (None,)]) for step in STEPS]


def _result(step: Step, trials: Sequence[Trial]) -> Result:
    if failed := next((one.error for one in trials if one.error and not one.row), ""):
        raise ValueError(f"{step.text}: {failed}")
    rates = step.rates or (None,)
    good = [one for one in zip(trials, rates, strict=True) if one[1] is None or _is_within(one[0])]
    if not good:
        raise ValueError(f"{step.text}: no rate is within the limits")
    trial, rate = good[-1]
    grown = f", attention reads {trial.factor:.1f} times what was measured" if trial.factor > 1.0 else ""
    return Result(trial.tok_s * GPUS, f"{trial.figures}{grown}", rate)


def _is_within(trial: Trial) -> bool:
    return all(float(trial.row[name]) <= limit_s for name, limit_s in _LIMITS.items())


def _scenario(hardware: str, step: Step, rate: float | None) -> Scenario:
    """One GPU with its share of the users, or with so many requests per second."""
    scheduler = SchedulerOptions.of({"max-num-seqs": 1024})
    engine = EngineOptions(ModelOptions("openai/gpt-oss-120b"), scheduler=scheduler, quiet=True)
    model = ModelSpec((engine.model.model,), (RoleSpec(engine=engine, gpus=1.0),), queue=QueueLimits(100_000))
    simulated = Simulated(requests=step.requests, scaled=True)
    users, sources = USERS if rate is None else None, (Source.of(f"{hardware}/trtllm"),)
    load = step.workload, Sending(), Reporting(), users, rate
    return Scenario(Deployment((model,)), model, sources, simulated, *load)


def audited(hardware: str, scenario: str, path: Path = FILE) -> float:
    """Tokens per second of the rack, by MLPerf Inference v6.1. Raises OSError."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if (row["hardware"], row["gpus"], row["mode"]) == (hardware, str(GPUS), f"MLPerf {scenario}"):
                return float(row["out_tok_s_per_gpu"]) * GPUS
    raise ValueError(f"{path} has no {scenario} of {hardware}")


def lines(found: dict[str, list[Result]]) -> Iterator[str]:
    """A table: simulated figures, and the published one after the same changes. `found`: by hardware."""
    yield f"{'million tokens/s':<78}" + "".join(f"{name:>8} from 1.50" for name in found)
    first = next(iter(found.values()))[0].tok_s
    for place, step in enumerate(STEPS):
        own = [each[place] for each in found.values()]
        from_published = [PUBLISHED * one.tok_s / first for one in own]
        cells = (_cell(one.tok_s, there) for one, there in zip(own, from_published, strict=True))
        rates = " and ".join(f"{one.rate:g}" for one in own if one.rate is not None)
        text = f"{step.text}: {rates} per s" if rates else step.text
        yield f"{text:<78}" + "".join(cells)
        if step.audited:
            known = [audited(name, step.audited) for name in found]
            cells = (_cell(one, one / there - 1, "+.0%") for one, there in zip(known, from_published, strict=True))
            text = f"  audited ({step.audited}), and what is left over"
            yield f"{text:<78}" + "".join(cells)
    for name, each in found.items():
        yield f"step times of {name}: {each[0].figures}"


def _cell(tok_s: float, other: float, form: str = "") -> str:
    return f"{tok_s / _MILLION:>8.3f}{format(other, form) if form else f'{other / _MILLION:.3f}':>10}"
