"""NIM's `oscine list-model-profiles` and `oscine download-to-cache`."""

import argparse

from oscine.cli.parser import Parser


def arguments_of_list(parser: Parser) -> None:
    parser.description = (
        "List the layouts of the published models, as NIM's model profiles, by whether they run on this machine."
    )
    parser.set_defaults(run=_list)


def arguments_of_download(parser: Parser) -> None:
    parser.description = "Download the models of some profiles into NIM_CACHE_PATH, or into Hugging Face's cache."
    which = parser.add_mutually_exclusive_group()
    named = "id or name of a profile (default: NIM_MODEL_PROFILE, or NIM_MODEL_PATH)"
    which.add_argument("--profiles", "--profile", "-p", nargs="+", metavar="ID", default=(), help=named)
    which.add_argument("--all", action="store_true", help="the models of all profiles")
    parser.set_defaults(run=_download)


def _list(args: argparse.Namespace) -> None:
    from oscine.extensions.doctor import nim

    nim.run_list(args)


def _download(args: argparse.Namespace) -> None:
    from oscine.extensions.doctor import nim

    nim.run_download(args)
