"""`oscine verify MODEL`: weights and ops against transformers, harmony, fifty questions, and throughput."""

import argparse
import gc
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscine.cli.error import USAGE, CommandError, ended_by
from oscine.cli.output_file import check_output
from oscine.cli.parser import Parser
from oscine.cli.serve.options import add_some
from oscine.cli.serve.read_options import read_config
from oscine.settings.config import NANO, OPTIONS, Config
from oscine.settings.option import require

if TYPE_CHECKING:
    from oscine.chat.tokenizer import Tokenizer
    from oscine.checkpoint.opened import OpenedModel
    from oscine.extensions.bench.machine import Machine
    from oscine.extensions.bench.result import Point, Result
    from oscine.extensions.verify.questions import Answers
    from oscine.extensions.verify.report import Compared, Report

_MODEL_OPTIONS = ("revision", "tokenizer", "download-dir", "device", "dtype")
_ENGINE_OPTIONS = ("cpu-weights", "threads", "max-model-len", "gpu-memory-utilization", "enforce-eager")
_POINTS = {True: ("1:1024:256", "64:1024:256"), False: ("1:64:16", "8:64:16")}  # on a GPU, on a CPU
PROMPT, NEW_TOKENS = 192, 24  # tokens at least, beyond every window of the published models; and generated
OUTPUT = Path("verify.json")


def arguments(parser: Parser) -> None:
    parser.usage = "%(prog)s MODEL [OPTIONS]"
    parser.description = (
        "Compare a model with transformers, or with plain torch where that is not installed. The reference reads the "
        "checkpoint a second time and computes each layer in float32 on the CPU, one layer in memory at a time. Each "
        "part of each layer gets the reference's input, so a wrong weight is named by layer and part; logits and "
        "greedy tokens of the whole model are compared too. Bounds follow from the arithmetic of the dtypes. Then "
        "harmony prompts are compared with openai-harmony's, fifty questions are answered, and the throughput is "
        "measured. The exit status is 1 if something differs."
    )
    parser.add_argument("model", metavar="MODEL", help=f"folder or name, as of `oscine serve`; {NANO} is embedded")
    parser.add_argument(
        "--reference", metavar="FOLDER", type=Path, help="checkpoint that the reference reads (default: that of MODEL)"
    )
    parser.add_argument(
        "--output", metavar="FILE", type=Path, default=OUTPUT, help="file to write (default: %(default)s)"
    )
    parser.add_argument(
        "--points",
        metavar="C:ISL:OSL",
        nargs="+",
        help="points of throughput, as of `oscine bench engine` (default: "
        + "; ".join(f"{' '.join(points)} on a {'GPU' if gpu else 'CPU'}" for gpu, points in _POINTS.items())
        + ")",
    )
    parser.add_argument("--weights-only", action="store_true", help="ask no questions, and measure no throughput")
    add_some(parser, [OPTIONS[name] for name in (*_MODEL_OPTIONS, *_ENGINE_OPTIONS)])
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    check_output(args.output)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the engine process does, before torch is imported
    from oscine.extensions.bench.passes import MeasureError
    from oscine.extensions.bench.result import Point

    with ended_by(ValueError, status=USAGE):
        given = None if args.points is None else [Point.parse(text) for text in args.points]
        config = read_config(vars(args))
    if config.engine.model.device.count(","):
        raise CommandError("--device must be one device", USAGE)
    with ended_by(ValueError, OSError, MeasureError):
        report = _verify(config, args.reference, given, weights_only=args.weights_only)
    with ended_by(OSError):
        args.output.write_text(json.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    print("\n".join((*report.lines(), f"written: {args.output}")), flush=True)
    if report.difference is not None:
        raise CommandError(report.difference)


def _verify(
    config: Config, reference: Path | None, points: Sequence["Point"] | None, *, weights_only: bool
) -> "Report":
    from oscine import __version__
    from oscine.chat.tokenizer import Tokenizer
    from oscine.checkpoint.folder import fingerprint
    from oscine.checkpoint.hub import check_model
    from oscine.checkpoint.opened import open_model
    from oscine.executor.start.torch_process import use_threads
    from oscine.extensions.bench import machine
    from oscine.extensions.bench.engine import check_context
    from oscine.extensions.bench.result import Point
    from oscine.extensions.verify import harmony
    from oscine.extensions.verify.questions import most_tokens
    from oscine.extensions.verify.report import Report

    model = config.engine.model
    use_threads(config.engine.num_threads)
    tokenizer = Tokenizer(check_model(model))
    opened = open_model(model)
    if opened.path is None:
        raise ValueError("verify compares a checkpoint, and random weights have none")
    wanted = points or [Point.parse(text) for text in _POINTS[opened.device.type == "cuda"]]
    if not weights_only:
        with ended_by(ValueError, status=USAGE):
            check_context(config, wanted)
            _check_questions(model.max_model_len, most_tokens(tokenizer))
    compared = _compare(opened, reference or opened.path, tokenizer)
    checked = harmony.check(tokenizer)
    where = machine.describe(str(opened.device), None)
    answers, measured = None, tuple[Any, ...]()
    if not weights_only:
        answers, measured = _use(config, opened.config, tokenizer, wanted, where)
    return Report(
        model=model.model,
        fingerprint=fingerprint(opened.path),
        version=__version__,
        machine=where,
        layers=opened.config.num_hidden_layers,
        compared=compared,
        harmony=checked,
        answers=answers,
        points=measured,
    )


def _check_questions(max_model_len: int | None, most: int) -> None:
    """Raises OptionError."""
    rule = f"at least {most:,} for the questions and their answers, or given with --weights-only"
    require(max_model_len is None or max_model_len >= most, "max-model-len", rule, max_model_len)


def _compare(opened: "OpenedModel", folder: Path, tokenizer: "Tokenizer") -> "Compared":
    from oscine.checkpoint.folder import fingerprint
    from oscine.extensions.verify.compare import compare
    from oscine.extensions.verify.reference import CheckpointTensors, check_memory, reference_of
    from oscine.extensions.verify.report import Compared
    from oscine.extensions.verify.served import Served

    check_memory(opened.config)
    tensors = CheckpointTensors(folder, opened.config)
    reference = reference_of(tensors)
    prompt = _prompt(tokenizer)
    progress = sys.stderr.isatty()
    served = Served(opened, len(prompt) + NEW_TOKENS, progress=progress)
    found = compare(served, opened.source, tensors, reference, prompt, NEW_TOKENS, progress=progress)
    return Compared(
        reference=reference.name,
        folder=str(folder),
        fingerprint=fingerprint(folder),
        platform=served.platform.name,
        dtype=str(served.dtype).removeprefix("torch."),
        expert_inputs=served.arithmetic.expert_inputs,
        tokens=len(prompt) + NEW_TOKENS,
        found=found,
    )


def _prompt(tokenizer: "Tokenizer") -> list[int]:
    """A question behind as many facts as it takes to have PROMPT tokens."""
    from oscine.chat.harmony import HarmonyRenderer
    from oscine.chat.messages import Conversation, Message
    from oscine.extensions.verify.harmony import DATE

    renderer, facts, ids = HarmonyRenderer(tokenizer), list[str](), list[int]()
    while len(ids) < PROMPT:
        box = len(facts)
        facts.append(f"The code of box {box} is {box * 7919 % 10007}.")
        asked = f"{' '.join(facts)} What is the code of box 3?"
        ids = renderer.render(Conversation((Message("user", asked),), current_date=DATE))
    return ids


def _use(
    config: Config, shape: Any, tokenizer: "Tokenizer", points: Sequence["Point"], where: "Machine"
) -> "tuple[Answers, tuple[Result, ...]]":
    """The engine as it is served: its answers, and its throughput."""
    from oscine.engine.build import build_engine
    from oscine.extensions.bench.engine import EngineBench, measured
    from oscine.extensions.bench.machine import process_age_s
    from oscine.extensions.bench.passes import OwnEngine
    from oscine.extensions.verify.questions import ask

    options = replace(measured(config, points).engine, quiet=True)
    _free()
    engine = build_engine(options)
    ready_s = process_age_s()
    answers = ask(engine.loop, tokenizer)
    bench = EngineBench(OwnEngine(engine), shape, options.cache, ready_s)
    return answers, tuple(bench.run(points, passes=2, warmup_osl=None, where=where))


def _free() -> None:
    """Gives back the memory of the weights that were compared, so that the engine has it."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
