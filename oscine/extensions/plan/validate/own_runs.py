"""Own measured runs (data/own_runs.csv), against simulations with tables of `oscine profile` that did not see them.

A run is a point of `oscine bench engine`: all requests at once, equal lengths, no prefix cache. Its time per token is
(time of all tokens - time of one token per request) / (tokens - 1), so two simulations give it, as two passes did. The
measured kernels are those of the run's commit, the table's are later ones. Nothing is fitted to these runs.

The tables in oscine/extensions/timing were made from such runs. So what OwnSurface composes of them is not used here.
"""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from oscine.extensions.plan.fleet.clients import Traffic
from oscine.extensions.plan.fleet.engines import EngineSpec, spec_of
from oscine.extensions.plan.fleet.simulation import simulate
from oscine.extensions.plan.foreign.ops import DATA
from oscine.extensions.plan.sources.noted import NotedTable
from oscine.extensions.plan.traffic.session import Pages, Turn
from oscine.extensions.replicas.spec.deployment import ModelSpec, QueueLimits, Replicas, RoleSpec
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
from oscine.timing.read import read_table
from oscine.timing.table import StepTable

FILE = DATA / "own_runs.csv"
T = TypeVar("T")
MUSTS = {"TPOT": 5.0, "throughput": 10.0, "TTFT": 15.0}  # percent
MAX_FACTOR = 1.05  # beyond the measured steps, up to which a simulation counts


@dataclass(frozen=True, slots=True)
class OwnRun:
    """A line of the file. Times are milliseconds."""

    model: str
    gpu: str
    tensor_parallel_size: int
    requests: int  # at once
    prompt: int  # tokens of each
    answer: int
    step_tokens: int  # limit of the engine
    tpot_ms: float
    tokens_per_s: float
    ttft_ms: float | None  # of the only request
    commit: str
    date: str
    kernels: str  # against those of the tables; docs/planning-tables.md
    source: str


class Off(NamedTuple):
    """Simulated over measured, less 1. None: not simulated, or not measured."""

    run: OwnRun
    tpot: float | None = None
    throughput: float | None = None
    ttft: float | None = None
    note: str = ""


def read_runs(path: Path = FILE) -> list[OwnRun]:
    """Raises OSError and ValueError."""
    return read_lines(path, OwnRun)


def read_lines(path: Path, kind: type[T]) -> list[T]:
    """The lines of a CSV file, whose columns are the fields of this dataclass; an empty cell is None.

    Raises OSError and ValueError.
    """
    with path.open(encoding="utf-8", newline="") as file:
        rows = [{name: text or None for name, text in row.items()} for row in csv.DictReader(file)]
    try:
        return msgspec.convert(rows, list[kind], strict=False)  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: {error}") from None


def offs(runs: Iterable[OwnRun]) -> Iterator[Off]:
    """Each run simulated. Raises OSError."""
    known = tables()
    for run in runs:
        table = NotedTable(known[run.model, run.gpu, run.tensor_parallel_size])
        first_s, all_s = passes_s(table, run)
        if table.factor > MAX_FACTOR:
            yield Off(run, note=f"not in the table: {table}")
            continue
        tpot_ms = (all_s - first_s) / (run.answer - 1) * 1e3
        tokens_per_s = run.requests * run.answer / all_s
        ttft = None if run.ttft_ms is None else first_s * 1e3 / run.ttft_ms - 1
        limit = _step_tokens(table, run)
        note = f"steps of {limit:,} tokens, not {run.step_tokens:,}" if limit < run.step_tokens else ""
        yield Off(run, tpot_ms / run.tpot_ms - 1, tokens_per_s / run.tokens_per_s - 1, ttft, note)


def tables() -> dict[tuple[str, str, int], StepTable]:
    """The package's tables with exact activations, by model, GPU and number of ranks. Raises OSError."""
    found = [read_table(path, scaled=True) for path in sorted((DATA / "steps").glob("*.jsonl"))]
    exact = [one for one in found if one.header.activation_dtype == "auto"]
    return {(one.header.model, one.header.gpu, one.header.tensor_parallel_size): one for one in exact}


def passes_s(table: StepTable, run: OwnRun) -> tuple[float, float]:
    """Simulated seconds for one token per request, and for all."""
    limits = SchedulerOptions(max_num_seqs=run.requests, max_num_batched_tokens=_step_tokens(table, run))
    options = EngineOptions(
        ModelOptions(random_weights=run.model),
        CacheOptions(prefix_caching=False),
        limits,
    )
    role = RoleSpec("aggregated", options, Replicas(1, 1))
    spec = spec_of(role, table)
    first_s, all_s = (_pass_s(role, spec, run, tokens) for tokens in (1, run.answer))
    return first_s, all_s


def _step_tokens(table: StepTable, run: OwnRun) -> int:
    """The run's limit, or the largest steps that the table has."""
    return min(run.step_tokens, table.header.max_num_batched_tokens)


def _pass_s(role: RoleSpec, spec: EngineSpec, run: OwnRun, answer: int) -> float:
    model = ModelSpec((role.engine.model.random_weights or "",), (role,), queue=QueueLimits(run.requests, 1e9))
    sessions = [(Turn(run.prompt, answer, Pages((), number)),) for number in range(run.requests)]
    return simulate(model, {role.role: spec}, Traffic(sessions, users=run.requests)).duration_s


def lines(found: Iterable[Off]) -> Iterator[str]:
    """A table of all runs, then the mean absolute errors by kernels."""
    found = [*found]
    yield f"{'run':28} {'commit':8} {'kernels':12} {'TPOT %':>7} {'tok/s %':>8} {'TTFT %':>7}"
    for one in found:
        run = one.run
        ranks = "" if run.tensor_parallel_size == 1 else f" TP{run.tensor_parallel_size}"
        load = f"{run.model}{ranks} {run.requests} x {run.prompt}/{run.answer}"
        signs = f"{signed(one.tpot):>7} {signed(one.throughput):>8} {signed(one.ttft):>7}"
        yield f"{load:28} {run.commit[:8]:8} {run.kernels:12} {signs}  {one.note}".rstrip()
    for kernels in sorted({one.run.kernels for one in found}):
        of_kernels = [one for one in found if one.run.kernels == kernels]
        means = mean_text((one.tpot, one.throughput, one.ttft) for one in of_kernels)
        refused = sum(one.tpot is None for one in of_kernels)
        yield f"kernels {kernels}: {means}; {refused} of {len(of_kernels)} runs not in the tables"


def signed(error: float | None) -> str:
    return "-" if error is None else f"{100 * error:+.1f}"


def mean_text(errors: Iterable[tuple[float | None, float | None, float | None]]) -> str:
    """The mean absolute errors, in the order of MUSTS."""
    columns = zip(*errors, strict=True)
    return ", ".join(
        f"{name} {_mean(e)} (must {must:g})" for (name, must), e in zip(MUSTS.items(), columns, strict=True)
    )


def _mean(errors: Iterable[float | None]) -> str:
    known = [abs(error) for error in errors if error is not None]
    return f"{100 * np.mean(known):.1f} % over {len(known)}" if known else "not measured"
