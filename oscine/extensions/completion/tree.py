"""The commands, options and values of a command line, from its argparse parser: what a shell can complete."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from oscine.settings.config import NANO

Kind = Literal["choices", "files", "text"]
_FILES = ("FILE", "DIR", "FOLDER", "INPUT", "OUTPUT", "TARGET", "SOURCE", "MODEL", "20b|120b|FILE")
_MODELS = (NANO, "gpt-oss-20b", "gpt-oss-120b")
_MAX_WORDS = 12  # of a description


@dataclass(frozen=True, slots=True)
class Value:
    """What may stand in a place: one of some words, a file, or any text."""

    kind: Kind
    words: tuple[str, ...] = ()


@dataclass(slots=True)
class Command:
    path: str  # such as "bench serve"; empty for the program itself
    options: dict[str, str] = field(default_factory=dict)  # name -> description
    values: dict[str, Value] = field(default_factory=dict)  # of options that take one
    commands: dict[str, str] = field(default_factory=dict)  # name -> description
    positional: Value = Value("text")


def commands_of(parser: argparse.ArgumentParser, path: str = "") -> Iterator[Command]:
    """The command of the parser, and all below it."""
    command = Command(path)
    below: list[Command] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for choice in action._choices_actions:
                command.commands[choice.dest] = _short(choice.help)
            for name, sub in action.choices.items():
                below += commands_of(sub, f"{path} {name}".strip())
        elif not action.option_strings:
            command.positional = _value(action)
        elif action.help != argparse.SUPPRESS:
            for name in action.option_strings:
                command.options[name] = _short(action.help)
                if action.nargs != 0:
                    command.values[name] = _value(action)
    yield command
    yield from below


def _value(action: argparse.Action) -> Value:
    shown = str(action.metavar or "")
    choices = tuple(map(str, action.choices or ())) or _listed(shown)
    if choices:
        return Value("choices", choices)
    return Value("files", _MODELS if shown in ("MODEL", "SOURCE") else ()) if shown in _FILES else Value("text")


def _listed(metavar: str) -> tuple[str, ...]:
    """The words of a metavar like {a,b}."""
    return tuple(metavar[1:-1].split(",")) if metavar[:1] == "{" and metavar[-1:] == "}" else ()


def _short(text: str | None) -> str:
    words = (text or "").partition(" (default")[0].replace("%%", "%").split()
    return " ".join(words[:_MAX_WORDS]) + (" ..." if len(words) > _MAX_WORDS else "")
