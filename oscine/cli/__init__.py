"""The command line: `oscine serve`, `chat`, `batch`, `pull`, `list`, `rm`, `convert`, `bench`, `eval` and others.

Importing it loads neither the server nor the model.
"""

import os
import sys

import oscine
from oscine.cli.chat import command as chat_command
from oscine.cli.error import INTERRUPTED, USAGE, CommandError, ended_by
from oscine.cli.parser import Parser
from oscine.cli.serve import command as serve_command
from oscine.extensions.apis.batches import command as batch_command
from oscine.extensions.bench.cli import command as bench_command
from oscine.extensions.cluster.cli import command as cluster_command
from oscine.extensions.completion import command as completion_command
from oscine.extensions.doctor import command as machine_command
from oscine.extensions.dynamo import command as dynamo_worker
from oscine.extensions.eval.cli import command as eval_command
from oscine.extensions.formats.cli import command as models_command
from oscine.extensions.formats.cli import convert as convert_command
from oscine.system.environment import VariableError
from oscine.system.home import give_home


def _parser() -> Parser:
    parser = Parser(
        prog="oscine",
        usage="%(prog)s COMMAND [OPTIONS]",
        description="Serves OpenAI's gpt-oss models, or a small embedded model of the same architecture.",
    )
    parser.add_argument("--version", action="version", version=f"oscine {oscine.__version__}")
    commands = parser.add_subparsers(prog=parser.prog, metavar="COMMAND", required=True)
    of_models = serve_command, chat_command, batch_command, models_command, convert_command
    for command in (*of_models, bench_command, eval_command, cluster_command, machine_command, dynamo_worker):
        command.add_command(commands)
    completion_command.add_command(commands, _parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for a failure, 2 for bad usage; both are explained in one line on stderr."""
    try:
        with ended_by(OSError):
            give_home()
        args = _parser().parse_args(argv)
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
