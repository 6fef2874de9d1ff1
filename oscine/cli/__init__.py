"""The command line: `oscine serve` and `oscine chat`. Importing it loads neither the server nor the model."""

import argparse
import sys

import oscine
from oscine.cli import chat, serve
from oscine.cli.error import INTERRUPTED, CommandError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="oscine",
        description="Serves OpenAI's gpt-oss models, or a small embedded model of the same architecture.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"oscine {oscine.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    serve.add_command(commands)
    chat.add_command(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for a failure (one line on stderr); bad usage exits with 2."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except CommandError as error:
        print(f"oscine: error: {error}", file=sys.stderr)
        return error.status
    return 0
