"""`oscine doctor`, and NIM's `oscine list-model-profiles` and `oscine download-to-cache`."""

import argparse

from oscine.cli.parser import Parser, subcommand


def add_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    _add_doctor(commands)
    _add_list(commands)
    _add_download(commands)


def _add_doctor(commands: "argparse._SubParsersAction[Parser]") -> None:
    more = (
        "Show what this machine is, which models are on it and which fit, and what is missing. The exit status is 1 if "
        "nothing can be served. Paste the output into an issue."
    )
    parser = subcommand(commands, "doctor", "say what fits this machine, and what is missing", description=more)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_doctor)


def _add_list(commands: "argparse._SubParsersAction[Parser]") -> None:
    more = "List the layouts of the published models, as NIM's model profiles, by whether they run on this machine."
    parser = subcommand(commands, "list-model-profiles", "list NIM's model profiles", description=more)
    parser.set_defaults(run=_list)


def _add_download(commands: "argparse._SubParsersAction[Parser]") -> None:
    more = "Download the models of some profiles into NIM_CACHE_PATH, or into Hugging Face's cache."
    parser = subcommand(commands, "download-to-cache", "download models, by NIM's profiles", description=more)
    which = parser.add_mutually_exclusive_group()
    named = "id or name of a profile (default: NIM_MODEL_PROFILE, or NIM_MODEL_PATH)"
    which.add_argument("--profiles", "--profile", "-p", nargs="+", metavar="ID", default=(), help=named)
    which.add_argument("--all", action="store_true", help="the models of all profiles")
    parser.set_defaults(run=_download)


def _doctor(args: argparse.Namespace) -> None:
    from oscine.extensions.doctor import checks as doctor

    doctor.run(args)


def _list(args: argparse.Namespace) -> None:
    from oscine.extensions.apis.conventions import nim_commands as nim

    nim.run_list(args)


def _download(args: argparse.Namespace) -> None:
    from oscine.extensions.apis.conventions import nim_commands as nim

    nim.run_download(args)
