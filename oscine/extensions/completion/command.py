"""`oscine completion bash|zsh|fish`: prints the script that completes commands, options and values."""

import argparse
from collections.abc import Callable

from oscine.cli.parser import Parser, subcommand
from oscine.extensions.completion.shells import SHELLS
from oscine.extensions.completion.tree import commands_of

_MORE = """Print a script that completes commands, options and values:

  bash:  echo 'source <(oscine completion bash)' >> ~/.bashrc
  zsh:   oscine completion zsh > ~/.zfunc/_oscine     (~/.zfunc in fpath, before compinit)
  fish:  oscine completion fish > ~/.config/fish/completions/oscine.fish
"""


def add_command(commands: "argparse._SubParsersAction[Parser]", whole: Callable[[], Parser]) -> None:
    """`whole`: makes the parser of the whole command line."""
    parser = subcommand(
        commands,
        "completion",
        "print a completion script for a shell",
        description=_MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=tuple(SHELLS), help="shell to complete in")
    parser.set_defaults(run=lambda args: print(SHELLS[args.shell]([*commands_of(whole())]), end=""))
