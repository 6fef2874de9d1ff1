"""The command line: `oscine serve`, `chat`, `batch`, `pull`, `list`, `rm`, `convert`, `bench`, `eval` and others.

Importing it loads neither the server nor the model.
"""

import argparse
import os
import sys

import oscine
from oscine.cli.commands import Command, find, installed
from oscine.cli.error import INTERRUPTED, USAGE, CommandError, ended_by
from oscine.cli.parser import Parser, subcommand
from oscine.system.environment import VariableError
from oscine.system.home import give_home

# Commands of other programs
_ELSEWHERE = {"run": "chat", "ls": "list", "remove": "rm", "delete": "rm", "download": "pull", "start": "serve"}


def whole_parser() -> Parser:
    """With the arguments of all commands."""
    return _parser(installed(), installed())


def _parser(listed: list[Command], used: list[Command]) -> Parser:
    """Knows the names of `listed` commands, and the arguments of `used` ones."""
    parser = Parser(
        prog="oscine",
        usage="%(prog)s COMMAND [OPTIONS]",
        description="Serves OpenAI's gpt-oss models, or a small embedded model of the same architecture.",
    )
    parser.add_argument("--version", action="version", version=f"oscine {oscine.__version__}")
    commands = parser.add_subparsers(prog=parser.prog, metavar="COMMAND", required=True)
    for command in listed:
        added = subcommand(commands, command.name, command.help)
        if command in used:
            command.arguments()(added)
    return parser


def _parse(argv: list[str]) -> argparse.Namespace:
    name = next((word for word in argv if not word.startswith("-")), None)
    command = None if name is None else find(name)
    used = [] if command is None else [command]
    listed = installed()
    if command is None and name in _ELSEWHERE:
        raise CommandError(f"there is no command {name!r}; did you mean {_ELSEWHERE[name]}? (see oscine --help)", USAGE)
    return _parser(listed if command in listed else [*listed, *used], used).parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for a failure, 2 for bad usage; both are explained in one line on stderr."""
    try:
        with ended_by(OSError):
            give_home()
        given = sys.argv[1:] if argv is None else argv
        if not given:
            _parser(installed(), []).print_help()
            return USAGE
        args = _parse(given)
        vars(args).pop("run")(args)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output has closed it; nothing more may be flushed there at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except CommandError as error:
        print(f"oscine: error: {error}", file=sys.stderr)
        return error.status
    except VariableError as error:
        print(f"oscine: error: {error}", file=sys.stderr)
        return USAGE
    return 0
