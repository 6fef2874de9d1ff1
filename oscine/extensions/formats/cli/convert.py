"""`oscine convert SOURCE TARGET`: a model in the published layout, with its experts in MXFP4."""

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING

from oscine.cli.error import ended_by
from oscine.cli.parser import Parser
from oscine.cli.serve.options import add_some
from oscine.settings.config import OPTIONS, ModelOptions
from oscine.settings.option import BYTES, read_size

if TYPE_CHECKING:
    from oscine.extensions.formats.convert import Errors

_PLACE = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(?:_blocks)?")
_OPTIONS = ("revision", "tokenizer", "download-dir")


def arguments(parser: Parser) -> None:
    parser.description = (
        "Write a model in the published layout: experts in MXFP4, everything else in bfloat16. SOURCE may be a "
        "fine-tune as transformers, Unsloth, mlx-lm or another tool of docs/checkpoints.md saves it, or a GGUF file. "
        "An interrupted conversion is continued."
    )
    parser.add_argument("source", metavar="SOURCE", help="folder, GGUF file, or name, as MODEL of `oscine serve`")
    parser.add_argument("target", metavar="TARGET", type=Path, help="folder to write")
    parser.add_argument("--lora", metavar="FOLDER", type=Path, help="LoRA adapter of PEFT to merge into SOURCE")
    parser.add_argument("--shard-bytes", metavar=BYTES, type=size, help="most bytes of a file (default: 2GiB)")
    add_some(parser, (OPTIONS[name] for name in _OPTIONS))
    parser.set_defaults(run=run)


def size(text: str) -> int:
    """Named by argparse in its error."""
    return read_size(text, BYTES)


def run(args: argparse.Namespace) -> None:
    from oscine.extensions.formats.convert import SHARD_BYTES, convert

    given = {OPTIONS[name].field: vars(args)[name] for name in _OPTIONS if name in vars(args)}
    with ended_by(ValueError, OSError):
        options = ModelOptions(args.source, device="cpu", **given)
        errors = convert(options, args.target, lora=args.lora, shard_bytes=args.shard_bytes or SHARD_BYTES)
    print(_report(errors) if errors else "The experts were in MXFP4 already and were copied.")
    merged = "" if args.lora is None else f", with the adapter {args.lora} merged into it,"
    print(f"{args.source}{merged} is in {args.target}: `oscine serve {args.target}`")


def _report(errors: "Errors") -> str:
    """The relative error of each layer, and of all."""
    from oscine.checkpoint.quantize import MAX_ERROR, QuantizationError

    layers: dict[int, dict[str, float]] = {}
    for name, error in errors.items():
        found = _PLACE.fullmatch(name)
        assert found is not None
        layers.setdefault(int(found[1]), {})[found[2]] = error.relative
    rows = [
        f"{layer:5}  {own.get('gate_up', 0.0):7.2%}  {own.get('down', 0.0):7.2%}"
        for layer, own in sorted(layers.items())
    ]
    all_of_them = sum(errors.values(), QuantizationError()).relative
    head = "Relative error of the experts in MXFP4 (root mean square):\nlayer  gate_up     down"
    rows.append(f"all    {all_of_them:7.2%}")
    if all_of_them > MAX_ERROR:
        rows.append(f"Warning: more than {MAX_ERROR:.0%}, so answers may be worse. Measure them with `oscine eval`.")
    return "\n".join([head, *rows])
