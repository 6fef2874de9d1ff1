"""`oscine profile`: step times of this machine as a table. `oscine profile import`: those of others."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from oscine.cli.error import USAGE, CommandError, ended_by
from oscine.cli.output_file import check_output
from oscine.cli.parser import Parser, subcommand
from oscine.cli.serve.options import PROFILE, add_some
from oscine.cli.serve.read_options import read_config
from oscine.settings.config import NANO, OPTIONS, Config

if TYPE_CHECKING:
    from oscine.extensions.profile.measure import Engine
    from oscine.timing.read import Check

_OPTIONS = (
    *("max-num-seqs", "max-num-batched-tokens", "max-model-len"),
    *("tensor-parallel-size", "data-parallel-size", "enable-expert-parallel", "speculative-config"),
    *("kv-cache-dtype", "kv-scales", "activation-dtype", "gpu-memory-utilization", "gpu-memory-bytes"),
    *("enforce-eager", "device", "dtype", "cpu-weights", "threads"),
)
_WARN_ERROR, _WARN_DRIFT = 0.05, 0.02


def arguments(parser: Parser) -> None:
    parser.description = (
        "Measure the steps of an engine on this machine, with the options and defaults of `oscine serve` but on one "
        "GPU unless an option says otherwise: decodes, prompts, and both together, at many sizes and contexts. "
        "`oscine simulate` calculates with the table (JSON lines). Some random steps are left out of it, to say how "
        "far off it is between its points. `oscine profile import` takes times of single ops on other hardware."
    )
    parser.add_argument(
        "--model",
        default=NANO,
        help="120b or 20b with random weights (120b:skewed: with outliers), or what oscine serve takes "
        "(default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to write (needed, unless steps are imported)")
    parser.add_argument(
        "--seconds",
        type=float,
        default=240.0,
        metavar="S",
        help="time for the measurements; with less, fewer sizes and contexts are measured, but the fewest take as long "
        "as they take: minutes on a CPU (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="which steps are left out (default: %(default)s)")
    parser.add_argument("--commit", help="commit to note with the results (default: what git says)")
    add_some(parser, (PROFILE, *(OPTIONS[name] for name in _OPTIONS)))
    parser.set_defaults(run=run)
    kinds = parser.add_subparsers(metavar="import")
    imported = subcommand(
        kinds,
        "import",
        "make a table of times of ops on other hardware, from a wheel of NVIDIA's AISimulate",
        usage="%(prog)s WHEEL --system NAME --framework NAME --version VERSION --output FILE",
    )
    imported.add_argument(
        "wheel", type=Path, metavar="WHEEL", help="file: pip download --no-deps --pre aisimulate==..."
    )
    imported.add_argument("--system", required=True, metavar="NAME", help="hardware, such as gb200")
    imported.add_argument(
        "--framework", required=True, choices=("trtllm", "vllm", "sglang"), help="whose kernels were timed"
    )
    imported.add_argument(
        "--version", required=True, metavar="VERSION", help="version of the framework, such as 1.3.0rc20"
    )
    imported.add_argument("--output", type=Path, required=True, metavar="FILE", help="file to write")
    imported.set_defaults(run=run_import)


def run(args: argparse.Namespace) -> None:
    if args.output is None:
        raise CommandError("--output FILE is needed", USAGE)
    check_output(args.output)
    if args.seconds <= 0:
        raise CommandError("--seconds must be above 0", USAGE)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the engine process does, before torch is imported
    config = read_config(vars(args) | _named_model(args.model))
    with ended_by(ValueError, OSError), _engine(config) as (engine, model, kv_filled, extra):
        from oscine.extensions.bench import machine
        from oscine.extensions.profile.measure import profile
        from oscine.extensions.profile.record import header_of, state_of
        from oscine.timing.read import check, table_of
        from oscine.timing.table import write_table

        gpus, device = tuple(engine.gpus), config.engine.model.device.partition(",")[0]
        where = machine.describe(device if gpus else "cpu", args.commit)
        before = state_of(gpus)
        with tqdm(desc="Measuring", unit=" steps", disable=None, leave=False) as bar:
            measured = profile(
                engine,
                args.seconds,
                seed=args.seed,
                begin=lambda all_, about_s: _say(bar, all_, about_s, args.seconds),
                progress=lambda done, all_: _show(bar, done, all_),
            )
        state: dict[str, Any] = {"before": before, "after": state_of(gpus)} if gpus else {}
        header = replace(header_of(config, model, engine.limits, where, kv_filled), machine=state)
        points = (*measured.points, *extra)
        write_table(args.output, header, points)
        kept = [one for one in points if one.held_out]
        checked = check(table_of(header, points), kept)
    print(f"{args.output}: {len(points) - len(kept)} points, {measured.seconds:.0f} s, {header.gpu}")
    print(_report(checked))
    if drifting := sum(abs(one.drift) > _WARN_DRIFT for one in points):
        print(
            f"{drifting} points differ by more than {_WARN_DRIFT:.0%} between the two passes: heat, or a shared machine"
        )


def _report(found: "Check") -> str:
    text = (
        f"{found.points} steps that were left out: {found.error:.1%} mean error, {found.worst:.1%} at most, "
        f"{found.bias:+.1%} bias; {found.not_measured} outside the table"
    )
    more = f"; above {_WARN_ERROR:.0%}: measure with more --seconds, or on an idle machine"
    return text + (more if found.error > _WARN_ERROR else "")


def _say(bar: "tqdm[Any]", total: int, about_s: float, seconds: float) -> None:
    """Also where stderr is no terminal, which has no bar."""
    few = f"; --seconds {seconds:g} is too little for the coarsest grid" if about_s > seconds else ""
    bar.clear()
    print(f"measuring {total} steps, about {about_s:.0f} s{few}", file=sys.stderr, flush=True)
    bar.total = total
    bar.refresh()


def _show(bar: "tqdm[Any]", done: int, total: int) -> None:
    bar.total = total
    bar.update(done - bar.n)


@contextmanager
def _engine(config: Config) -> "Iterator[tuple[Engine, str, str, tuple[Any, ...]]]":
    """The engine, its model, what its cache holds, and points that were measured at its start."""
    from oscine.system.environment import Environment

    options, count = config.engine, config.server.data_parallel_size
    if count > 1:
        if not config.server.enable_expert_parallel:
            raise ValueError("engines that share nothing have the step times of one: leave --data-parallel-size out")
        from oscine.extensions.profile.group import SharingEngines
        from oscine.settings.devices import engines_of

        group = SharingEngines(engines_of(config, Environment().num_gpus))
        try:
            yield group, group.model, group.kv_filled, ()
        finally:
            group.close()
        return
    from oscine.executor.start.build import build_executor
    from oscine.extensions.profile.measure import verified
    from oscine.extensions.profile.steps import Steps

    built = build_executor(options)
    steps = Steps.of(built)
    yield (
        steps,
        built.info.model,
        steps.fill(steps.limits.pages),
        tuple(verified(dict(built.decode_times or {}), steps.limits)),
    )


def run_import(args: argparse.Namespace) -> None:
    from oscine.extensions.plan.foreign.ops import write_ops
    from oscine.extensions.plan.foreign.reduce import reduced
    from oscine.extensions.plan.foreign.wheel import Wheel

    check_output(args.output)
    with ended_by(ValueError, OSError):
        table = reduced(Wheel(args.wheel), args.system, args.framework, args.version)
        write_ops(args.output, table)
    print(
        f"{args.output}: {len(table.curves)} curves of {table.header.gpu}, {table.header.activations}", file=sys.stderr
    )


def _named_model(name: str) -> dict[str, str]:
    """20b and 120b are random weights in these shapes."""
    from oscine.checkpoint.hub import PUBLISHED

    of_shapes = name.partition(":")[0] in PUBLISHED
    return {"model": NANO, "random-weights": name} if of_shapes else {"model": name}
