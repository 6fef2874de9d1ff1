"""The results of a simulation in the form of `oscine bench serve`."""

import math
from collections.abc import Mapping
from dataclasses import replace

from oscine.extensions.bench.serve import row
from oscine.extensions.bench.serve.arrival import Arrival
from oscine.extensions.bench.serve.measure import Summary, measure
from oscine.extensions.bench.serve.run import Measured
from oscine.extensions.plan.fleet.simulation import Outcome
from oscine.extensions.plan.run.scenario import Scenario


def measured_of(outcome: Outcome, arrival: Arrival, limits_s: Mapping[str, float], warm_up: int = 0) -> Measured:
    """The first and the last token of an answer have a time, the others have none: there are no gaps to measure.

    `warm_up`: the number of first requests that do not count.
    """
    records = sorted(outcome.records, key=lambda record: record.sent_s)[warm_up:] if warm_up else outcome.records
    found = measure(records, limits_s)
    found = replace(found, itl=Summary(*[math.nan] * 6), num_events=found.output_tokens)
    return Measured(found, arrival, energy_j=None, busy=0.0)


def row_of(measured: Measured, outcome: Outcome, scenario: Scenario) -> row.Row:
    """As of `oscine bench serve`, and what only a simulation knows."""
    total, workload = outcome.total, scenario.workload
    load = {"isl": None, "osl": None} if scenario.trace is not None else workload.keys()
    about = {
        "simulated": True,
        "seed": scenario.simulated.seed,
        "replicas": len(outcome.engines),
        "steps": total.steps,
        "preemptions": total.preemptions,
        "moved": outcome.num_moved,
        "refused": outcome.router.refused,
        "unfinished": outcome.num_unfinished,
        "step_times": [f"{one.header.model} {one.header.gpu} {one}" for one in scenario.tables.values()],
        "spec_decoding": _drafts(scenario),
        "acceptance": scenario.simulated.acceptance,
        "acceptance_length": total.acceptance_length,
        "trace": None if scenario.trace is None else str(scenario.trace),
        "trace_speed": None if scenario.trace is None else scenario.sending.trace_speed,
    }
    labels = about | scenario.reporting.labels()
    return row.row_of(measured, scenario.model.name, load, scenario.num_gpus or 1, labels)


def _drafts(scenario: Scenario) -> str:
    """The methods of all roles that draft."""
    methods = {role.engine.speculation.method for role in scenario.model.roles if role.engine.speculation.is_on}
    return ", ".join(sorted(methods)) or "none"
