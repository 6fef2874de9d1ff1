"""`oscine bench`: the subcommands, and the measurements of engine and ops. One rank needs no package of the server."""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from oscine.cli.error import USAGE, ended_by
from oscine.cli.output_file import check_output
from oscine.cli.parser import Parser, subcommand
from oscine.cli.serve.options import PROFILE, add_some
from oscine.cli.serve.read_options import read_config
from oscine.extensions.bench.cli import serving
from oscine.extensions.bench.result import RESULTS, Point, append, latest, read, results_of
from oscine.settings.config import NANO, OPTIONS, ModelOptions


def arguments(parser: Parser) -> None:
    kinds = parser.add_subparsers(metavar="serve|sweep|engine|ops", required=True)
    serving.add_serve(kinds)
    serving.add_sweep(kinds)
    _add_engine(kinds)
    _add_ops(kinds)


def _add_engine(kinds: "argparse._SubParsersAction[Parser]") -> None:
    what = "tokens per second of the whole engine, at given points of load"
    more = (
        "Measure the engine, with the options and defaults of oscine serve but on one GPU unless an option says "
        "otherwise. All requests of a point arrive at once, with random prompts, greedy sampling, no end of sequence "
        "and no prefix cache."
    )
    parser = subcommand(kinds, "engine", what, description=more)
    parser.add_argument(
        "--model",
        default=NANO,
        help="120b or 20b with random weights (120b:skewed: with outliers), or what oscine serve takes "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--points",
        nargs="+",
        required=True,
        metavar="C:ISL:OSL",
        help="points of load: requests, prompt tokens and generated tokens of each",
    )
    parser.add_argument(
        "--passes",
        type=int,
        default=2,
        metavar="N",
        help="passes per point, at least 2; the first is not quoted (default: %(default)s)",
    )
    parser.add_argument(
        "--warmup-osl", type=int, metavar="TOKENS", help="generated tokens of the first pass; 0 skips it (default: OSL)"
    )
    parser.add_argument(
        "--one-pass-from", type=int, metavar="C", help="requests from which on there is only one pass (default: never)"
    )
    limits = ("max-num-seqs", "max-num-batched-tokens", "max-model-len")
    parallel = ("tensor-parallel-size", "data-parallel-size", "enable-expert-parallel")
    memory = ("kv-cache-dtype", "kv-scales", "activation-dtype", "gpu-memory-utilization", "gpu-memory-bytes")
    names = (*limits, *parallel, "experts-on-host", *memory, "enforce-eager")
    add_some(parser, (PROFILE, *(OPTIONS[name] for name in names)))
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help=f"file that results are appended to (default: by the GPU, such as {RESULTS})",
    )
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="file of earlier results to compare with")
    _add_device(parser)
    parser.set_defaults(run=run_engine)


def _keep_threads_from_spinning() -> None:
    """Sets OpenMP's wait policy as the engine process does. Call it before torch is imported.

    OpenMP threads that spin while they wait make an op up to 100 times slower once another process wants the cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def run_engine(args: argparse.Namespace) -> None:
    _keep_threads_from_spinning()
    from oscine.extensions.bench import machine, report
    from oscine.extensions.bench.engine import EngineBench, check_context, measured
    from oscine.extensions.bench.passes import MeasureError

    if args.output is not None:
        check_output(args.output, make_folders=True)
    with ended_by(ValueError, OSError, status=USAGE):
        points = [Point.parse(text) for text in args.points]
        baseline = None if args.baseline is None else latest(read(args.baseline))
        if args.passes < 2 or (args.warmup_osl is not None and args.warmup_osl < 0):
            raise ValueError("--passes must be at least 2, and --warmup-osl at least 0")
        config = measured(read_config(vars(args) | _named_model(args.model)), points)
        check_context(config, points)
        with ended_by(MeasureError):
            bench = EngineBench.load(config)
    where = machine.describe(config.engine.model.device.partition(",")[0], args.commit)
    output = args.output
    if output is None:
        check_output(output := results_of(where.gpu), make_folders=True)
    print(f"{where.gpu}, torch {where.torch}, triton {where.triton}, commit {where.commit}; to {output}", flush=True)
    print(report.HEADER, flush=True)
    with ended_by(MeasureError, OSError):
        passes = {"passes": args.passes, "warmup_osl": args.warmup_osl, "one_pass_from": args.one_pass_from}
        for result in bench.run(points, where=where, **passes):
            print(report.line(result, baseline), flush=True)
            append(output, result)
            held = bench.num_held(result.point)
            if held < result.concurrency:
                print(f"{'':>12} {held} of these sequences run at once", flush=True)


def _add_ops(kinds: "argparse._SubParsersAction[Parser]") -> None:
    what = "time of each op, at the shapes of a model's step"
    more = "Measure each op at the shapes of a model's step, beside a copy and a matrix product of that run."
    parser = subcommand(kinds, "ops", what, description=more)
    parser.add_argument(
        "--model",
        default="120b",
        help="120b, 20b, or what oscine serve takes; the weights are random (120b:skewed: with outliers) "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--tokens",
        default="1,8,64,512,1024,8192",
        metavar="T,...",
        help="numbers of tokens per step (default: %(default)s)",
    )
    parser.add_argument(
        "--context", type=int, default=1024, metavar="TOKENS", help="context of each sequence (default: %(default)s)"
    )
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="OP=NAME",
        help="backend of an op, in place of its default one; the option may be repeated",
    )
    _add_device(parser)
    parser.set_defaults(run=run_ops)


def _add_device(parser: argparse.ArgumentParser) -> None:
    add_some(parser, [OPTIONS[name] for name in ("device", "dtype", "cpu-weights", "threads")])
    parser.add_argument("--commit", help="commit to note with the results (default: what git says)")


def run_ops(args: argparse.Namespace) -> None:
    _keep_threads_from_spinning()
    from oscine.checkpoint.opened import open_model
    from oscine.executor.start.torch_process import use_threads
    from oscine.extensions.bench import machine
    from oscine.extensions.bench.ops import OpBench, table
    from oscine.extensions.bench.step_inputs import StepLoad
    from oscine.extensions.bench.timer import measure_ceiling
    from oscine.ops.triton_range import check_triton

    with ended_by(ValueError, OSError, status=USAGE):
        loads = [StepLoad.of(tokens, args.context) for tokens in _numbers(args.tokens)]
        backends = dict(_pair(text) for text in args.backend)
        model = _model_options(args)
        opened = open_model(model)
        limit = opened.config.max_position_embeddings
        if args.context > limit:
            raise ValueError(f"--context {args.context} is above the model's own {limit}")
        use_threads(vars(args).get("threads"))
        if opened.device.type == "cuda":
            check_triton(partial(print, file=sys.stderr))
        is_skewed = model.random_shapes is not None and model.random_shapes[1]
        bench = OpBench(opened.config, opened.device, opened.dtype, backends, model.cpu_weights, is_skewed=is_skewed)
    where, ceiling = machine.describe(model.device, args.commit), measure_ceiling(opened.device)
    print(f"{where.gpu}, torch {where.torch}, triton {where.triton}, commit {where.commit}")
    print(f"copy {ceiling.bytes_per_s / 1e12:.3g} TB/s, matrix product {ceiling.flops_per_s / 1e12:.3g} TFLOP/s")
    for load in loads:
        print("", *table(load, bench.run(load), ceiling), sep="\n", flush=True)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--tokens takes numbers like 1,64,8192, not {text!r}") from None


def _pair(text: str) -> tuple[str, str]:
    op, equals, backend = text.partition("=")
    if not equals:
        raise ValueError(f"--backend takes OP=NAME, not {text!r}")
    return op, backend


def _model_options(args: argparse.Namespace) -> ModelOptions:
    return ModelOptions.of(vars(args) | _named_model(args.model))


def _named_model(name: str) -> dict[str, str]:
    """Options for what --model says: 120b and 20b, also 120b:skewed, are random weights in the shapes of these."""
    from oscine.checkpoint.hub import PUBLISHED

    of_shapes = name.partition(":")[0] in PUBLISHED
    return {"model": NANO, "random-weights": name} if of_shapes else {"model": name}
