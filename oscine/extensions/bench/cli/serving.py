"""`oscine bench serve URL` and `oscine bench sweep URL`: any OpenAI-compatible server under load."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oscine.cli.error import USAGE, CommandError, ended_by
from oscine.cli.output_file import check_output
from oscine.cli.parser import Parser, subcommand
from oscine.extensions.bench.cli.extra import need_matplotlib
from oscine.extensions.bench.cli.load_options import Load, add_load_options

if TYPE_CHECKING:
    from oscine.extensions.bench.serve.arrival import Arrival
    from oscine.extensions.bench.serve.row import Row
    from oscine.extensions.bench.serve.run import Bench, Measured


def add_serve(kinds: "argparse._SubParsersAction[Parser]") -> None:
    what = "latency and throughput of a server under load"
    more = (
        "Measure any server with OpenAI's API. With --concurrency, a fixed number of sessions is in flight (closed "
        "loop). With --rate, sessions arrive at random, however fast the server answers (open loop); --concurrency is "
        "then the most sessions in flight. The exit status is 1 when no request succeeds."
    )
    parser = subcommand(kinds, "serve", what, description=more)
    parser.add_argument(
        "--concurrency", type=int, metavar="C", help="number of sessions in flight (default: 1 without --rate)"
    )
    parser.add_argument(
        "--rate", type=float, metavar="R", help="sessions per second, on average (default: a closed loop)"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="requests with their times and lengths, in Mooncake's format (JSON lines); blocks with the same id have "
        "the same random words, --sessions is the number of requests (default: all), and --isl and --osl do not count",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="file that the row is appended to (default: none)")
    add_load_options(parser)
    parser.set_defaults(run=run_serve)


def add_sweep(kinds: "argparse._SubParsersAction[Parser]") -> None:
    what = "latency and throughput of a server under several loads, with a Pareto plot"
    more = (
        "Measure a server under several loads. Prints a table, and writes rows.jsonl, pareto.png and the page "
        "index.html. The plot shows tokens/s (per GPU with --gpus) against tokens/s per user, beside figures of other "
        "systems."
    )
    parser = subcommand(kinds, "sweep", what, description=more)
    points = parser.add_mutually_exclusive_group(required=True)
    points.add_argument(
        "--concurrency", type=int, nargs="+", metavar="C", help="number of sessions in flight, for each point"
    )
    points.add_argument("--rate", type=float, nargs="+", metavar="R", help="sessions per second, for each point")
    parser.add_argument(
        "--output", type=Path, default=Path("sweep"), metavar="FOLDER", help="folder for the results (default: sweep)"
    )
    parser.add_argument(
        "--peers", type=Path, nargs="+", default=[], metavar="FILE", help="rows of other sweeps, for the same plot"
    )
    add_load_options(parser)
    parser.set_defaults(run=run_sweep)


def run_serve(args: argparse.Namespace) -> None:
    if args.trace is not None and args.rate is not None:
        raise CommandError("--trace has times of its own: leave --rate out", USAGE)
    _check_load([args.concurrency], [args.rate])
    if args.output is not None:
        check_output(args.output, make_folders=True)
    load, bench = _opened(args)
    concurrency = 1 if args.concurrency is None and args.rate is None and args.trace is None else args.concurrency
    arrival = _arrival(load, bench, concurrency, args.rate)
    from oscine.extensions.bench.serve import report, row

    print(f"{_description(load, bench)}; {report.load_text(arrival)}", flush=True)
    measured = _measure(load, bench, arrival)
    print(*report.page(measured, load.reporting.gpus), sep="\n")
    if args.output is not None:
        with ended_by(OSError):
            row.append(args.output, _row(load, bench, measured))
    if not measured.measures.num_completed:
        raise CommandError(f"no request succeeded: {measured.measures.errors.most_common(1)[0][0]}")


def run_sweep(args: argparse.Namespace) -> None:
    need_matplotlib("plot")
    from oscine.extensions.bench.serve import pareto, report, row

    _check_load(args.concurrency or [], args.rate or [])
    load, bench = _opened(args)
    with ended_by(ValueError, OSError, status=USAGE):
        peers = [found for path in args.peers for found in row.read(path)]
        args.output.mkdir(parents=True, exist_ok=True)
    for name in ("rows.jsonl", "pareto.png", "index.html"):
        check_output(args.output / name)
    arrivals = [_arrival(load, bench, point, None) for point in args.concurrency or ()]
    arrivals += [_arrival(load, bench, None, point) for point in args.rate or ()]
    gpus = load.reporting.gpus
    print(_description(load, bench), report.table_line(report.columns(gpus)), sep="\n", flush=True)
    rows, lines = [], []
    for arrival in arrivals:
        measured = _measure(load, bench, arrival)
        lines.append(report.cells(measured, gpus))
        print(report.table_line(lines[-1]), *report.warnings(measured), sep="\n", flush=True)
        rows.append(_row(load, bench, measured))
        with ended_by(OSError):
            row.append(args.output / "rows.jsonl", rows[-1])
    if not any(found["completed"] for found in rows):
        raise CommandError("no request succeeded")
    with ended_by(OSError):
        pareto.write(args.output, _description(load, bench), rows, peers, lines, gpus)
    print(f"the plot and the page: {args.output / 'pareto.png'}, {args.output / 'index.html'}")


def _opened(args: argparse.Namespace) -> "tuple[Load, Bench]":
    from oscine.extensions.bench.serve.target import TargetError

    with ended_by(ValueError, OSError, status=USAGE), ended_by(TargetError):
        load = Load.of(args.url, vars(args))
        return load, load.bench()


def _check_load(concurrencies: Sequence[int | None], rates: Sequence[float | None]) -> None:
    for name, values in (("concurrency", concurrencies), ("rate", rates)):
        for value in values:
            if value is not None and value <= 0:
                raise CommandError(f"--{name} must be positive, not {value:g}", USAGE)


def _arrival(load: Load, bench: "Bench", concurrency: int | None, rate: float | None) -> "Arrival":
    from oscine.extensions.bench.serve.load import TraceLoad

    with ended_by(ValueError, status=USAGE):
        if isinstance(bench.load, TraceLoad):
            return load.sending.arrival_of_trace(bench.load, concurrency)
        return load.sending.arrival(concurrency, rate)


def _measure(load: Load, bench: "Bench", arrival: "Arrival") -> "Measured":
    from oscine.extensions.bench.serve.processes import ClientError

    with ended_by(ValueError, OSError, status=USAGE), ended_by(ClientError):
        counts = load.sending.counts(arrival)
        try:
            return bench.run(arrival, *counts)
        except MemoryError:
            raise CommandError(f"memory does not suffice for the requests of {counts[0]} sessions") from None


def _description(load: Load, bench: "Bench") -> str:
    client = bench.client
    what = load.workload if load.trace is None else f"requests of {load.trace}"
    return f"{client.target.url}, {client.model}, {client.api.path}: {what}"


def _row(load: Load, bench: "Bench", measured: "Measured") -> "Row":
    from oscine.extensions.bench.serve.row import row_of

    reporting = load.reporting
    return row_of(measured, bench.client.model, load.keys(), reporting.gpus or 1, reporting.labels())
