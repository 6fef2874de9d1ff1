"""What a name means that stands on the command line of `oscine serve`, or is a key of one of its YAML files."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Values = dict[str, Any]  # by the name of the option
NOTES = "notes"  # key of Values: what was accepted without effect, and why


@dataclass(frozen=True)
class Name:
    help: str
    read: Callable[[Any], Values]  # what a value sets: text, YAML, or a bool for a flag; raises OptionError
    nargs: int | str | None = None  # as in argparse; 0 is a flag
    metavar: str | None = None


def note(*texts: str) -> Values:
    return {NOTES: texts}


def merge(values: Values, new: Values) -> None:
    """Adds new values; several of one option are joined."""
    for key, value in new.items():
        values[key] = (*values.get(key, ()), *value) if isinstance(value, tuple) else value
