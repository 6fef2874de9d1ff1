"""Parsers of command lines whose errors are one line, with the name that was probably meant."""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from oscine.cli.error import USAGE, CommandError
from oscine.settings.option import did_you_mean


class Parser(argparse.ArgumentParser):
    """Raises errors instead of printing the usage and exiting. So an error is one line that can name its source."""

    def __init__(self, **settings: Any) -> None:
        self.hint_of_further_words = ""  # ends the error about words that no positional argument takes
        super().__init__(**{"allow_abbrev": False} | settings)
        self.register("type", int, _reader(int, "a whole number"))
        self.register("type", float, _reader(_finite, "a number"))

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see {self.prog} --help)", USAGE)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Takes --max_num_seqs for --max-num-seqs. An unknown option is an error of its own command."""
        given = sys.argv[1:] if args is None else args
        parsed, unknown = super().parse_known_args(list(_with_hyphens(given)), namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            hint = "" if name.startswith("-") else self.hint_of_further_words
            hint = did_you_mean(name, self._option_string_actions) if name.startswith("--") else hint
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """Without -pp for -p, which argparse takes also where it allows no abbreviations."""
        return [found for found in super()._get_option_tuples(option_string) if option_string.startswith(found[1])]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            hint = did_you_mean(str(value), map(str, action.choices))
            allowed = ", ".join(map(str, action.choices))
            raise argparse.ArgumentError(action, f"it must be one of {allowed}, not {value!r}{hint}")


def subcommand(commands: "argparse._SubParsersAction[Parser]", name: str, what: str, **settings: Any) -> Parser:
    """The parser of a command. `what` it does is also its description, unless `settings` have another."""
    return commands.add_parser(name, **{"help": what, "description": f"{what[0].upper()}{what[1:]}."} | settings)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _reader(kind: Callable[[str], Any], noun: str) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"it must be {noun}, not {text!r}") from None

    return read


def _with_hyphens(arguments: Sequence[str]) -> Iterator[str]:
    options = True
    for argument in arguments:
        options = options and argument != "--"
        if options and argument.startswith("--"):
            name, equals, value = argument.partition("=")
            argument = name.replace("_", "-") + equals + value
        yield argument


class HelpAll(argparse.Action):
    """Prints the help with the options that --help leaves out. `texts`: the help of those options."""

    def __init__(self, texts: Mapping[argparse.Action, str], **settings: Any) -> None:
        super().__init__(nargs=0, **settings)
        self._texts = texts

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        for action, text in self._texts.items():
            action.help = text
        parser.print_help()
        parser.exit()
