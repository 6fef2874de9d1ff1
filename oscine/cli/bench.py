"""`oscine bench engine` and `oscine bench ops`: measurements that need none of the server's packages."""

import argparse
import os
from pathlib import Path

from oscine.bench.result import RESULTS, Point, append, latest, read, results_of
from oscine.cli.error import USAGE, CommandError
from oscine.cli.parser import Parser
from oscine.config import NANO, CacheOptions, EngineOptions, ModelOptions


def add_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    what = "measure the engine"
    parser = commands.add_parser("bench", help=what, description="Measure the engine.", allow_abbrev=False)
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    _add_engine(kinds)
    _add_ops(kinds)


def _add_engine(kinds: "argparse._SubParsersAction[Parser]") -> None:
    what = "tokens a second of the whole engine, at given points of load"
    parser = kinds.add_parser(
        "engine",
        help=what,
        description="All requests of a point at once: random prompts, greedy, no end of sequence, no prefix cache.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default=NANO, help=f"120b or 20b with random weights, or what serve takes ({NANO})")
    parser.add_argument(
        "--points", nargs="+", required=True, metavar="C:ISL:OSL", help="requests:prompt:generated tokens"
    )
    parser.add_argument("--passes", type=int, default=2, metavar="N", help="at least 2; the first is not quoted (2)")
    parser.add_argument(
        "--warmup-osl", type=int, metavar="TOKENS", help="generated in the first pass; 0: no such pass (OSL)"
    )
    parser.add_argument("--one-pass-from", type=int, metavar="C", help="requests from which on one pass must do (none)")
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="TOKENS", help="computed in a step (by the load)")
    parser.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE", help="as in serve")
    parser.add_argument("--enforce-eager", action="store_true", help="never use CUDA graphs")
    parser.add_argument("--output", type=Path, metavar="FILE", help=f"appended to (for an H200 {RESULTS})")
    parser.add_argument("--baseline", type=Path, metavar="FILE", help="earlier results to be compared with")
    _add_device(parser)
    parser.set_defaults(run=run_engine)


def _keep_threads_from_spinning() -> None:
    """As in the engine process of a server; must be done before torch is imported.

    OpenMP threads that spin while they wait make an op up to 100 times slower once another process wants the cores.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def run_engine(args: argparse.Namespace) -> None:
    _keep_threads_from_spinning()
    from oscine.bench import machine, report
    from oscine.bench.engine import EngineBench, MeasureError

    try:
        points = [Point.parse(text) for text in args.points]
        baseline = None if args.baseline is None else latest(read(args.baseline))
        if args.passes < 2 or (args.warmup_osl is not None and args.warmup_osl < 0):
            raise ValueError("--passes must be at least 2, and --warmup-osl at least 0")
        options = _engine_options(args, points)
        bench = EngineBench.load(options)
    except (ValueError, OSError) as error:
        raise CommandError(str(error), USAGE) from None
    where = machine.describe(args.device, args.commit)
    output = args.output or results_of(where.gpu)
    print(f"{where.gpu}, torch {where.torch}, triton {where.triton}, commit {where.commit}; to {output}", flush=True)
    print(report.HEADER, flush=True)
    try:
        passes = {"passes": args.passes, "warmup_osl": args.warmup_osl, "one_pass_from": args.one_pass_from}
        for result in bench.run(points, where=where, **passes):
            print(report.line(result, baseline), flush=True)
            append(output, result)
            held = bench.num_held(result.point)
            if held < result.concurrency:
                print(f"{'':>12} the KV cache holds {held} of these sequences at once", flush=True)
    except MeasureError as error:
        raise CommandError(str(error)) from None


def _add_ops(kinds: "argparse._SubParsersAction[Parser]") -> None:
    what = "each op at the shapes of a model's step"
    parser = kinds.add_parser(
        "ops",
        help=what,
        description=f"{what.capitalize()}, against a copy and a matrix product measured in the same run.",
        allow_abbrev=False,
    )
    parser.add_argument("--model", default="120b", help="120b, 20b, or what serve takes; weights are random (120b)")
    parser.add_argument("--tokens", default="1,8,64,512,1024,8192", metavar="T,...", help="of a step (%(default)s)")
    parser.add_argument("--context", type=int, default=1024, metavar="TOKENS", help="of each sequence (1024)")
    parser.add_argument("--backend", action="append", default=[], metavar="OP=NAME", help="other than the default")
    _add_device(parser)
    parser.set_defaults(run=run_ops)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (a GPU if there is one)")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="as in serve (auto)")
    parser.add_argument("--commit", help="of the code that runs (git's answer)")


def run_ops(args: argparse.Namespace) -> None:
    _keep_threads_from_spinning()
    from oscine.bench import machine
    from oscine.bench.ops import OpBench, table
    from oscine.bench.step_inputs import StepLoad
    from oscine.bench.timer import measure_ceiling
    from oscine.model.opened import open_model

    try:
        loads = [StepLoad.of(tokens, args.context) for tokens in _numbers(args.tokens)]
        backends = dict(_pair(text) for text in args.backend)
        opened = open_model(_model_options(args))
        limit = opened.config.max_position_embeddings
        if args.context > limit:
            raise ValueError(f"--context {args.context} is above the model's own {limit}")
        bench = OpBench(opened.config, opened.device, opened.dtype, backends)
    except (ValueError, OSError) as error:
        raise CommandError(str(error), USAGE) from None
    where, ceiling = machine.describe(args.device, args.commit), measure_ceiling(opened.device)
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
    from oscine.model.opened import PUBLISHED

    names = {"random_weights": args.model} if args.model in PUBLISHED else {"model": args.model}
    return ModelOptions(**names, device=args.device, dtype=args.dtype)


def _engine_options(args: argparse.Namespace, points: list[Point]) -> EngineOptions:
    from oscine.bench.engine import engine_options

    share = args.gpu_memory_utilization
    cache = CacheOptions() if share is None else CacheOptions(gpu_memory_utilization=share)
    return engine_options(
        _model_options(args),
        points,
        max_num_batched_tokens=args.max_num_batched_tokens,
        cache=cache,
        cuda_graphs=not args.enforce_eager,
    )
