"""`oscine doctor`."""

import argparse

from oscine.cli.parser import Parser


def arguments(parser: Parser) -> None:
    parser.description = (
        "Show what this machine is, which models are on it and which fit, and what is missing. The exit status is 1 if "
        "nothing can be served. Paste the output into an issue."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> None:
    from oscine.extensions.doctor import checks as doctor

    doctor.run(args)
