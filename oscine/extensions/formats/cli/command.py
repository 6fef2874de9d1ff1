"""`oscine pull`, `oscine list` and `oscine rm`: the models on this machine."""

import argparse
import sys

from oscine.cli.error import USAGE, CommandError, ended_by
from oscine.cli.parser import Parser
from oscine.cli.serve.options import add_some
from oscine.settings.config import OPTIONS, ModelOptions

_WIDTHS = "{:32}  {:14}  {:13}  {:>9}{}"


def arguments_of_pull(parser: Parser) -> None:
    parser.description = (
        "Download a model from Hugging Face into its cache, where `oscine serve` finds it without a network. "
        "An interrupted download is resumed."
    )
    parser.add_argument("model", metavar="MODEL", help="gpt-oss-20b, gpt-oss-120b, or owner/name of Hugging Face")
    add_some(parser, (OPTIONS["revision"], OPTIONS["download-dir"]))
    parser.set_defaults(run=run_pull)


def arguments_of_list(parser: Parser) -> None:
    parser.description = (
        "List the gpt-oss models on this machine: in Oscine itself, in Hugging Face's cache, and in Ollama's store."
    )
    add_some(parser, (OPTIONS["download-dir"],))
    parser.set_defaults(run=run_list)


def arguments_of_rm(parser: Parser) -> None:
    parser.description = "Remove a model from Hugging Face's cache, or weights that were repacked for this CPU."
    parser.add_argument("model", metavar="MODEL", help="name of a model, as `oscine list` shows it")
    parser.add_argument("--yes", action="store_true", help="remove the model without asking")
    add_some(parser, (OPTIONS["download-dir"],))
    parser.set_defaults(run=run_rm)


def run_pull(args: argparse.Namespace) -> None:
    from oscine.checkpoint.hub import pull
    from oscine.extensions.formats.installed import size_of

    given = vars(args)
    with ended_by(ValueError):
        folder = pull(ModelOptions(args.model, given.get("revision"), download_dir=given.get("download-dir")))
    print(f"{args.model}: {_gigabytes(size_of(folder))} in {folder}")


def run_list(args: argparse.Namespace) -> None:
    from oscine.extensions.formats.installed import installed

    with ended_by(OSError):
        models = installed(vars(args).get("download-dir"))
    print(_WIDTHS.format("NAME", "PLACE", "FORMAT", "SIZE", ""))
    for model in models:
        note = "" if model.whole else "  incomplete: `oscine pull` resumes it"
        print(_WIDTHS.format(model.name, model.place, model.format, _gigabytes(model.num_bytes), note))


def run_rm(args: argparse.Namespace) -> None:
    from oscine.extensions.formats.installed import find_removable, remove

    with ended_by(ValueError, OSError):
        models = find_removable(args.model, vars(args).get("download-dir"))
        what = ", ".join(f"{model.path} ({_gigabytes(model.num_bytes)})" for model in models)
        if args.yes or _confirmed(f"Remove {what}? [y/N] "):
            for model in models:
                remove(model)
                print(f"removed {model.name}: {_gigabytes(model.num_bytes)}")


def _confirmed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise CommandError("--yes is needed: there is no terminal to ask at", USAGE)
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        return False


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
