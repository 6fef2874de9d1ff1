"""`oscine calibrate MODEL --prompts FILE`: scales of keys and values in FP8, and what they change."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from oscine.cli.error import USAGE, CommandError, ended_by
from oscine.cli.parser import Parser
from oscine.cli.serve.options import add_some
from oscine.settings.config import NANO, OPTIONS, ModelOptions

if TYPE_CHECKING:
    from oscine.extensions.calibration.report import Report

_OPTIONS = ("revision", "tokenizer", "download-dir", "device", "dtype")
_FORMATS = (
    "in a file whose name ends in .jsonl each line is a chat completion's request, a line of a batch file, or a list "
    "of messages; in any other file each line is the text of a user's message"
)


def arguments(parser: Parser) -> None:
    parser.usage = "%(prog)s MODEL --prompts FILE [OPTIONS]"
    parser.description = (
        "Find a scale for the keys and the values of each layer and KV head, for --kv-cache-dtype fp8, and store them "
        "in the model's folder, or in Oscine's cache where a model was given by name or its folder cannot be written. "
        "Engines then use them. Without them each token has scales of its own, which are more accurate; with them a "
        "Hopper GPU computes steps of few tokens with more programs. The prompts should be like those that are served. "
        "They run through the model on one device, with exact and with FP8 keys and values, and the report says what "
        "changes. On a CPU plain torch computes them, so only small models are quick."
    )
    parser.add_argument(
        "model", metavar="MODEL", help=f"folder or name, as MODEL of `oscine serve`; {NANO} is embedded"
    )
    parser.add_argument(
        "--prompts", metavar="FILE", type=Path, required=True, help=f"prompts, one per line: {_FORMATS}"
    )
    parser.add_argument(
        "--check",
        metavar="FILE",
        type=Path,
        help="prompts whose errors and next tokens are reported (default: --prompts)",
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="file to write (default: where an engine finds it)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_some(parser, (OPTIONS[name] for name in _OPTIONS))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    given = {OPTIONS[name].field: vars(args)[name] for name in _OPTIONS if name in vars(args)}
    with ended_by(ValueError, OSError):
        options = ModelOptions(args.model, **given)
        if options.device.count(","):
            raise CommandError("--device must be one device: all KV heads are calibrated together", USAGE)
        report = _calibrate(options, args)
    print(json.dumps(report.as_json(), indent=2) if args.json else "\n".join(report.lines()))
    used = f"`--kv-cache-dtype fp8` uses {report.file}" if args.output is None else f"--kv-scales {report.file} uses it"
    if not args.json:
        print(f"\n{used}")


def _calibrate(options: ModelOptions, args: argparse.Namespace) -> "Report":
    """Raises ValueError and OSError."""
    from oscine.chat.tokenizer import Tokenizer
    from oscine.checkpoint.folder import fingerprint
    from oscine.checkpoint.hub import check_model
    from oscine.checkpoint.opened import open_model
    from oscine.executor.start.torch_process import use_threads
    from oscine.extensions.calibration.measure import Calibrated
    from oscine.extensions.calibration.prompts import read_prompts
    from oscine.extensions.calibration.report import Report, rows_of
    from oscine.extensions.calibration.scales import check_place, keep, place_of, scales_of

    use_threads(None)
    if args.output is not None:
        check_place(args.output)
    tokenizer = Tokenizer(check_model(options))
    opened = open_model(options)
    assert opened.path is not None
    config, files = opened.config, [args.prompts, args.check or args.prompts]
    prompts, checked = (read_prompts(file, tokenizer, config.max_position_embeddings) for file in files)
    weights = fingerprint(opened.path)  # before they are read: they may be replaced meanwhile
    file = args.output or place_of(weights, options, opened.path)
    model = Calibrated(opened, progress=sys.stderr.isatty())
    seen = model.look(prompts)
    exponents_L2G = seen.choose()
    errors, dynamic, calibrated = model.compare(checked, exponents_L2G)
    keep(scales_of(exponents_L2G.tolist(), weights, config.head_dim), file, opened.path)
    return Report(
        model=options.model,
        prompts=len(prompts),
        tokens=sum(map(len, prompts)),
        checked=len(checked),
        rows=rows_of(seen.largest_L2G, exponents_L2G, errors, config.head_dim),
        dynamic=dynamic,
        calibrated=calibrated,
        file=str(file),
    )
