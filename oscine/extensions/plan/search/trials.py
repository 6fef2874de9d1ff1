"""Simulations of candidates, in two processes."""

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context

from oscine.extensions.bench.serve.report import cells
from oscine.extensions.bench.serve.row import Row
from oscine.extensions.plan.run.results import measured_of, row_of
from oscine.extensions.plan.run.scenario import Scenario
from oscine.timing.answer import Class, NotMeasuredError, worst

_PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of a simulation."""

    row: Row
    cells: tuple[str, ...]  # of the table of `oscine bench sweep`
    figures: Class  # the worst of all step times
    factor: float  # by which steps exceeded those that were measured
    error: str = ""  # why there is no result

    @property
    def tok_s(self) -> float:
        return float(self.row["output_tput_per_gpu"]) * int(self.row["tp"])


def simulate(scenario: Scenario) -> Trial:
    try:
        outcome = scenario.simulate(scenario.engines(), scenario.traffic())
    except (ValueError, NotMeasuredError) as error:
        return Trial({}, (), "measured", 1.0, str(error))
    measured = measured_of(outcome, scenario.arrival, {}, scenario.simulated.warm_up)
    tables = scenario.tables.values()
    failed = measured.measures.errors.most_common(1)
    return Trial(
        row_of(measured, outcome, scenario),
        cells(measured, scenario.num_gpus),
        worst(*(one.figures for one in tables)),
        max(one.factor for one in tables),
        f"{failed[0][1]:,} requests failed: {failed[0][0]}" if failed else "",
    )


Simulate = Callable[[Sequence[Scenario]], Sequence[Trial]]


@contextmanager
def processes(note: Callable[[int], None]) -> Iterator[Simulate]:
    """A function that simulates all of a list. `note` gets the number of those that have ended."""
    with ProcessPoolExecutor(_PROCESSES, get_context("spawn"), initializer=gc.disable) as executor:
        yield lambda scenarios: _all_of(executor, scenarios, note)


def _all_of(executor: Executor, scenarios: Sequence[Scenario], note: Callable[[int], None]) -> list[Trial]:
    futures = [executor.submit(simulate, one) for one in scenarios]
    for future in futures:
        future.add_done_callback(lambda _: note(1))
    return [future.result() for future in futures]
