"""`oscine doctor`."""

import argparse
from pathlib import Path

from oscine.cli.parser import Parser


def arguments(parser: Parser) -> None:
    parser.description = (
        "Show what this machine is, which models are on it and which fit, and what is missing. The exit status is 1 if "
        "nothing can be served. Paste the output into an issue."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="also check and time every op on the GPU, at the shapes of 20b and 120b with random weights, and measure "
        "ten points of load; ten minutes, one file",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="file of --gpu (default: oscine-gpu-NAME-DATE.txt, by the GPU's name)",
    )
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> None:
    if args.gpu:
        from oscine.extensions.doctor import gpu

        gpu.run(args)
        return
    from oscine.extensions.doctor import checks as doctor

    doctor.run(args)
