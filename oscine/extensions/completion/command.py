"""`oscine completion bash|zsh|fish`: prints the script that completes commands, options and values."""

import argparse

from oscine.cli.parser import Parser
from oscine.extensions.completion.shells import SHELLS
from oscine.extensions.completion.tree import commands_of

_MORE = """Print a script that completes commands, options and values:

  bash:  echo 'source <(oscine completion bash)' >> ~/.bashrc
  zsh:   oscine completion zsh > ~/.zfunc/_oscine     (~/.zfunc in fpath, before compinit)
  fish:  oscine completion fish > ~/.config/fish/completions/oscine.fish
"""


def arguments(parser: Parser) -> None:
    parser.description = _MORE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("shell", choices=tuple(SHELLS), help="shell to complete in")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> None:
    from oscine.cli import whole_parser

    print(SHELLS[args.shell]([*commands_of(whole_parser())]), end="")
