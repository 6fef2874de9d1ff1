"""Own measured servers (data/served_runs.csv), against simulations with tables of `oscine profile`.

A run is a load that `oscine bench serve` sent to `oscine serve`, with random prompts and lengths, or those of a trace.
The simulation has the same sessions. Nothing is fitted to these runs. TPOT is the median over requests, TTFT its 90th
percentile.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from oscine.extensions.bench.cli.load_options import Reporting, Sending, Workload
from oscine.extensions.bench.serve.measure import Measures, measure
from oscine.extensions.plan.fleet.engines import spec_of
from oscine.extensions.plan.foreign.ops import DATA
from oscine.extensions.plan.run.scenario import Scenario, Simulated
from oscine.extensions.plan.sources.noted import NotedTable
from oscine.extensions.plan.validate.own_runs import MAX_FACTOR, mean_text, read_lines, signed, tables
from oscine.extensions.replicas.spec.deployment import Deployment, ModelSpec, Replicas, RoleSpec
from oscine.settings.config import EngineOptions, ModelOptions, SchedulerOptions, SpeculationOptions
from oscine.timing.table import StepTable

FILE = DATA / "served_runs.csv"


@dataclass(frozen=True, slots=True)
class ServedRun:
    """A line of the file. Closed loop: `users` with one request each. Open loop: `rate` requests per second, or the
    times of a trace."""

    model: str
    gpu: str
    tensor_parallel_size: int
    users: int | None
    rate: float | None
    burst: int  # requests that arrive together
    prompt: int  # tokens, on average
    answer: int
    spread: float  # of both, as a share
    seed: int
    requests: int
    tpot_ms: float
    tokens_per_s: float  # generated
    ttft_p90_ms: float
    commit: str
    date: str
    machine: str  # a letter for each
    trace: str | None = None  # a file beside the table of runs
    trace_speed: float | None = None
    drafts: int | None = None  # most drafts per sequence and step, of an EAGLE-3 head
    acceptance: float | None = None  # the probability that a draft is accepted if those before it are

    def __str__(self) -> str:
        ranks = "" if self.tensor_parallel_size == 1 else f" TP{self.tensor_parallel_size}"
        if self.trace is not None:
            return f"{self.model}{ranks} {self.trace} at {self.trace_speed:g}"
        load = f"{self.users} users" if self.rate is None else f"{self.rate:g}/s"
        bursts = f", bursts of {self.burst}" if self.burst > 1 else ""
        drafts = f", {self.drafts} drafts {self.acceptance:.2f}" if self.drafts else ""
        return f"{self.model}{ranks} {load}{bursts}, {self.prompt}/{self.answer}{drafts}"


class Off(NamedTuple):
    """Simulated over measured, less 1. None: the table does not have such steps."""

    run: ServedRun
    tpot: float | None = None
    throughput: float | None = None
    ttft: float | None = None


def read_runs(path: Path = FILE) -> list[ServedRun]:
    """Raises OSError and ValueError."""
    return read_lines(path, ServedRun)


def offs(runs: Iterable[ServedRun]) -> Iterator[Off]:
    """Each run simulated. Raises OSError."""
    known = tables()
    for run in runs:
        wanted = run.model, run.gpu, run.tensor_parallel_size
        yield off(NotedTable(known[wanted]), run)


def off(table: NotedTable, run: ServedRun) -> Off:
    """The errors of the run's simulation with this table."""
    found = simulated(table, run)
    if table.factor > MAX_FACTOR:
        return Off(run)
    pairs = (
        (found.tpot.median * 1e3, run.tpot_ms),
        (found.output_tok_s, run.tokens_per_s),
        (found.ttft.p90 * 1e3, run.ttft_p90_ms),
    )
    return Off(run, *(mine / measured - 1 for mine, measured in pairs))


def simulated(table: StepTable, run: ServedRun) -> Measures:
    """The run on one engine with these step times."""
    model_options = ModelOptions(random_weights=run.model, tensor_parallel_size=run.tensor_parallel_size)
    limits = SchedulerOptions(by_memory=("max_num_seqs", "max_num_batched_tokens"))  # those of the table's engine
    drafts = (
        SpeculationOptions("none") if run.drafts is None else SpeculationOptions("eagle3", run.drafts, model="head")
    )
    options = EngineOptions(model_options, scheduler=limits, speculation=drafts)
    role = RoleSpec("aggregated", options, Replicas(1, 1))
    model = ModelSpec((run.model,), (role,))
    scenario = Scenario(
        Deployment((model,)),
        model,
        (),
        Simulated(seed=run.seed, requests=run.requests),
        Workload(isl=run.prompt, osl=run.answer, spread=run.spread),
        Sending(burst=run.burst, trace_speed=run.trace_speed or 1.0),
        Reporting(),
        run.users,
        run.rate,
        None if run.trace is None else DATA / run.trace,
    )
    spec = spec_of(role, table, acceptance=run.acceptance, seed=run.seed)
    return measure(scenario.simulate({role.role: spec}, scenario.traffic()).records)


def lines(found: Iterable[Off]) -> Iterator[str]:
    """A table of all runs, then the mean absolute errors by model and number of GPUs, and of all."""
    found = [*found]
    yield f"{'server':40} {'machine':8} {'TPOT %':>7} {'tok/s %':>8} {'p90 TTFT %':>11}"
    groups: dict[str, list[Off]] = {}
    for one in found:
        run = one.run
        yield f"{run!s:40} {run.machine:8} {signed(one.tpot):>7} {signed(one.throughput):>8} {signed(one.ttft):>11}"
        groups.setdefault(f"{run.model}, {run.tensor_parallel_size} GPU", []).append(one)
    for name, own in (*groups.items(), ("all", found)):
        means = mean_text((one.tpot, one.throughput, one.ttft) for one in own)
        yield f"{name}: {means}"
