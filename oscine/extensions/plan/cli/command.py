"""`oscine simulate FILE --steps TABLE`: what a deployment would do with a load, on a virtual clock."""

import argparse
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from oscine.cli.error import USAGE, CommandError, ended_by
from oscine.cli.parser import Parser
from oscine.cli.serve.options import add_some
from oscine.extensions.bench.cli.load_options import Reporting, Sending, Workload
from oscine.extensions.plan.run.scenario import Scenario, Simulated
from oscine.settings.option import Options, options_of
from oscine.timing.answer import NotMeasuredError

if TYPE_CHECKING:
    from oscine.extensions.bench.serve.run import Measured
    from oscine.extensions.plan.fleet.simulation import Outcome
    from oscine.extensions.replicas.spec.deployment import ModelSpec

OF_WORKLOAD = ("isl", "osl", "spread", "shared-prefix", "num-prefixes", "turns", "think")
OF_SENDING = ("burst", "constant-rate", "trace-speed")
_OF_REPORTING = ("goodput", "label")


def arguments(parser: Parser) -> None:
    parser.usage = "%(prog)s FILE --steps TABLE [TABLE ...] (--users N | --rate R | --trace FILE) [OPTIONS]"
    parser.description = (
        "Simulate a deployment under a load. The router, the schedulers, the caches and the scaling are those of a "
        "cluster; time is virtual, and the time of each step comes from a table. The results are those of `oscine "
        "bench serve`, which sends the same sessions with equal options and seed. Equal inputs have equal results."
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="deployment file, as of `oscine cluster up`")
    parser.add_argument(
        "--steps",
        metavar="TABLE",
        nargs="+",
        required=True,
        help="tables of step times, one per kind of engine: files of `oscine profile`, or GPU/KERNELS, such as "
        "h200/oscine or gb200/trtllm, of what comes with Oscine",
    )
    add_load(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="file that the row is appended to (default: none)")
    add_some(parser.add_argument_group(Simulated.group), options_of(Simulated))
    add_sections(parser, {Workload: OF_WORKLOAD, Sending: OF_SENDING, Reporting: _OF_REPORTING})
    parser.set_defaults(run=run)


def add_load(parser: Parser, *, required: bool = True) -> None:
    """The options of the load: users, arrivals, or a trace."""
    loads = parser.add_mutually_exclusive_group(required=required)
    loads.add_argument("--users", type=int, metavar="N", help="sessions in flight, in a closed loop")
    loads.add_argument("--rate", type=float, metavar="R", help="sessions that begin per second, on average")
    loads.add_argument("--trace", type=Path, metavar="FILE", help="requests with their times, in Mooncake's format")


def add_sections(parser: Parser, names: Mapping[type[Options], Collection[str]]) -> None:
    """Some of the options of each section."""
    for section, own in names.items():
        group = parser.add_argument_group(section.group)
        add_some(group, (option for option in options_of(section) if option.name in own))


def run(args: argparse.Namespace) -> None:
    from oscine.extensions.bench.serve import report, row
    from oscine.extensions.plan.run.results import measured_of, row_of

    with ended_by(ValueError, OSError, status=USAGE):
        scenario = Scenario.of(vars(args))
        limits_s = scenario.reporting.limits_s()
        with ended_by(LookupError):
            tables, engines = scenario.tables, scenario.engines()
        scenario.check_lengths(engines)
        traffic = scenario.traffic()
    began_s = time.perf_counter()
    try:
        outcome = scenario.simulate(engines, traffic)
    except NotMeasuredError as error:
        hint = "" if scenario.simulated.scaled else "; --scaled extrapolates"
        raise CommandError(f"{error}{hint}") from None
    took_s = time.perf_counter() - began_s
    measured = measured_of(outcome, scenario.arrival, limits_s, scenario.simulated.warm_up)
    gpus = scenario.num_gpus
    print(f"{args.file}, {scenario.model.name}: {scenario.load_text}")
    shown = _without_moved(measured) if outcome.total.external_hits else measured
    print(*(line for line in report.page(shown, gpus) if not line.startswith("ITL")), sep="\n")
    print("", *_story(outcome, scenario.model), sep="\n")
    for role, table in tables.items():
        print(f"step times of {role} engines: {table}; {table.header.gpu}, {table.header.source}")
    print(f"simulated {outcome.duration_s:,.1f} s in {took_s:,.1f} s")
    if args.output is not None:
        with ended_by(OSError):
            row.append(args.output, row_of(measured, outcome, scenario))
    _check(measured)


def _story(outcome: "Outcome", model: "ModelSpec") -> Iterator[str]:
    """What the engines did, and what became of them."""
    total, router = outcome.total, outcome.router
    yield f"{total.steps:,} steps of {len(outcome.engines)} engines; {total.preemptions:,} preemptions"
    yield f"{_found(outcome)}; {router.queue_s:,.1f} s of waiting at the router"
    if (tokens := total.acceptance_length) is not None:
        accepted = total.accepted_tokens / total.draft_tokens
        yield f"{total.draft_tokens:,} drafts, {accepted:.1%} accepted; mean acceptance length {tokens:.2f} tokens"
    if outcome.num_unfinished:
        yield f"{outcome.num_unfinished:,} requests were unfinished at the end, and are in no figure of time"
    for change in outcome.changes:
        yield f"  +{change.time_s:7.1f} s  {change.role}: {change.replicas} replicas: {change.reason}"
    if outcome.num_moved:
        yield f"{outcome.num_moved:,} requests went on elsewhere when their replica was gone"


def _found(outcome: "Outcome") -> str:
    """Which prompt tokens were not computed where they were asked for."""
    total = outcome.total
    if not total.external_hits:
        share = total.prefix_hits / total.prefix_queries if total.prefix_queries else 0.0
        return f"{share:.1%} of prompt tokens were found in caches"
    num_computed = total.prompt_tokens - total.local_hits - total.external_hits  # each of them once, somewhere
    found, moved = 1 - num_computed / outcome.num_asked, total.external_hits / outcome.num_asked
    return f"{found:.1%} of prompt tokens were found in caches, {moved:.1%} came from prefill replicas"


def _without_moved(measured: "Measured") -> "Measured":
    """Without its cached tokens: for a client, what a prefill replica has computed is cached, too."""
    return replace(measured, measures=replace(measured.measures, cached_tokens=0))


def _check(measured: "Measured") -> None:
    if not measured.measures.num_completed:
        errors = measured.measures.errors.most_common(1)
        raise CommandError(f"no request succeeded: {errors[0][0] if errors else 'there was no time'}")
