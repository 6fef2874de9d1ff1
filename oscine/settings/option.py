"""What an option is: declared once, as the default of a dataclass field in oscine.settings.config.

The command line, YAML files, the deployment file of a cluster and the documents follow from the declaration.
"""

import dataclasses
import datetime
import difflib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

T = TypeVar("T")
BYTES, TOKENS = "BYTES", "TOKENS"  # metavars of numbers that may have a unit, such as 1GiB and 128K
_FILES = ("FOLDER", "DIR", "FILE")  # metavars of paths
_PATHS = ("MODEL", *_FILES)  # of what may be a path, also below ~
_DECLARED = "option"  # key of a field's metadata
_NOUNS: dict[type, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_READ_FROM: dict[type, Any] = {
    str: str | int | float | datetime.date,
    int: int | str,
    float: int | float | str,
    bool: bool,
}
_SIZES = {
    BYTES: "a number of bytes such as 1073741824, 512M, 1GiB (powers of 1024) or 1GB (of 1000)",
    TOKENS: "a number of tokens such as 131072, 128K (131072) or 128k (128000)",
}
_SIZE = re.compile(r"(?P<number>[\d_]+(?:\.\d+)?)\s*(?:(?P<prefix>[kKMGTmgt])(?P<binary>i?)(?P<bytes>[bB]?)|[bB])?")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_TOO_LARGE = 1 << 63  # for other processes and for C


class OptionError(ValueError):
    """A value that an option does not take. `rule` continues the option's name, as in "must be positive, not 0"."""

    prefix: ClassVar[str] = "--"

    def __init__(self, option: str, rule: str, *related: str) -> None:
        """`related`: other options that the rule is about."""
        super().__init__(option, rule, *related)
        self.option, self.rule, self.related = option, rule, related

    def __str__(self) -> str:
        return f"{self.prefix}{self.option} {self.rule}"


class FileKeyError(OptionError):
    """The same for a key of a file, as it is written there."""

    prefix = ""


def require(condition: bool, option: str, rule: str, value: object, *related: str) -> None:
    """Raises OptionError unless the condition holds. `value`: what was given; None: nothing, or it says nothing."""
    if not condition:
        given = "" if value is None else f", not {as_written(value)}"
        raise OptionError(option, f"must be {rule}{given}", *related)


def as_written(value: object) -> str:
    """A value as users write it: as in YAML, unlike Python's None, True and False."""
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A hint to append to an error; empty if no known name is similar."""
    found = difflib.get_close_matches(given, list(known), n=1, cutoff=0.7)
    return f"; did you mean {found[0]}?" if found else ""


def read_size(text: str, unit: str) -> int:
    """A number with a unit: 512M and 1GiB are powers of 1024, 1GB and 500k of 1000. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None or (unit == TOKENS and text.rstrip()[-1:] in "bB"):
        raise ValueError(text)
    prefix = match["prefix"] or ""
    binary = bool(match["binary"]) or (prefix.isupper() and not match["bytes"])
    value = Decimal(match["number"].replace("_", "")) * (1024 if binary else 1000) ** _POWERS.get(prefix.lower(), 0)
    if value != int(value):
        raise ValueError(text)
    return int(value)


def write_size(size: int) -> str:
    """A number of bytes in the largest unit of 1024 that leaves a whole number."""
    power = max((p for p in range(5) if size % 1024**p == 0), default=0) if size else 0
    return f"{size // 1024**power}{('', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


@dataclass(frozen=True)
class Option:
    """A declaration. What is not declared follows from the field: its name, type and default, and the group."""

    default: Any
    help: str  # a phrase; the default is appended
    metavar: str = ""
    shown: str | None = None  # says what the default is, where its value does not
    name: str = ""
    group: str = ""
    aliases: tuple[str, ...] = ()  # names that other servers have for it; a dot is a level of a YAML file
    opposites: tuple[str, ...] = ()  # flags of other servers that undo it
    excludes: tuple[str, ...] = ()  # options that set the same thing in another way
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    choices: tuple[Any, ...] = ()
    rule: tuple[str, Callable[[Any], bool]] | None = None  # what a value must be, and whether it is
    split: Callable[[str], Iterable[str]] | None = None  # takes one word of several values apart
    field: str = ""
    type: type = str
    several: bool = False  # its value is a tuple
    nargs: str | None = None  # argparse's, of a command line; an option of several values may always be repeated

    @property
    def is_flag(self) -> bool:
        return self.type is bool

    @property
    def value_text(self) -> str:
        return self.metavar or f"{{{','.join(map(str, self.choices))}}}"

    @property
    def help_text(self) -> str:
        unsaid = self.is_flag or not self.default_text
        return self.help if unsaid else f"{self.help} (default: {self.default_text})"

    @property
    def default_text(self) -> str:
        if self.shown is not None or self.default is None:
            return self.shown or ""
        if self.metavar == BYTES:
            return write_size(self.default)
        return f"{self.default:.10g}" if isinstance(self.default, float) else str(self.default)

    def read(self, value: object) -> Any:
        """The field's value, from text or from YAML. Raises OptionError."""
        if not self.several:
            read = self._convert(value)
        else:
            items = value if isinstance(value, list) else [value]
            texts = [self._convert(item) for item in items]
            read = tuple(part for text in texts for part in (self.split(text) if self.split else (text,)))
        self.check(read)
        if self.type is float and not math.isfinite(read):
            raise self._error("finite", read)
        return read

    def _convert(self, value: Any) -> Any:
        sized = self.metavar in _SIZES
        if isinstance(value, _READ_FROM[self.type]) and isinstance(value, bool) == self.is_flag:
            try:
                read: Any = read_size(value, self.metavar) if sized and isinstance(value, str) else self.type(value)
            except (ValueError, OverflowError):
                pass
            else:
                if self.type is int and abs(read) >= _TOO_LARGE:
                    raise self._error("below 2^63", value)
                return os.path.expanduser(read) if self.metavar in _PATHS else read
        raise self._error(_SIZES[self.metavar] if sized else _NOUNS[self.type], value)

    def check(self, value: Any) -> None:
        """Raises OptionError for a value of the field that is out of bounds."""
        if value is None and self.default is None:
            return
        for one in value if self.several else (value,):
            if self.choices and one not in self.choices:
                raise self._error(either(self.choices), one, did_you_mean(str(one), map(str, self.choices)))
            if self.metavar in _FILES and not one:  # it would mean the working folder
                raise self._error("a path", one)
            if self.rule is not None and not self.rule[1](one):
                raise self._error(self.rule[0], one)
            low = (self.at_least is None or one >= self.at_least) and (self.above is None or one > self.above)
            if not (low and (self.at_most is None or one <= self.at_most)):
                raise self._error(self._bounds(), one)

    def _bounds(self) -> str:
        if self.at_least is not None and self.at_most is not None:
            return f"between {self.at_least} and {self.at_most}"
        if self.above is not None:
            most = "" if self.at_most is None else f" and at most {self.at_most}"
            return f"above {self.above}{most}" if self.above or most else "positive"
        return f"at least {self.at_least}"

    def _error(self, rule: str, value: object, hint: str = "") -> OptionError:
        return OptionError(self.name, f"must be {rule}, not {as_written(value)}{hint}")


def either(choices: tuple[Any, ...]) -> str:
    *others, last = map(str, choices)
    return f"{', '.join(others)} or {last}" if others else last


def option(default: T, help: str, metavar: str = "", **declared: Any) -> T:
    """The default of a dataclass field that is an option. `declared`: further fields of Option."""
    of_field: T = dataclasses.field(default=default, metadata={_DECLARED: Option(default, help, metavar, **declared)})
    return of_field


@dataclass(frozen=True)
class Options:
    """A dataclass whose fields may be options. A value out of bounds raises OptionError."""

    group: ClassVar[str]  # title in the help

    def __init_subclass__(cls, group: str) -> None:
        cls.group = group

    @classmethod
    def of(cls, values: Mapping[str, Any], **fields: Any) -> Self:
        """From values by the names of options, and from other fields. Raises OptionError."""
        given = {declared.field: values[declared.name] for declared in options_of(cls) if declared.name in values}
        return cls(**given, **fields)

    def __post_init__(self) -> None:
        for declared in options_of(type(self)):
            declared.check(getattr(self, declared.field))


def options_of(section: type[Options]) -> tuple[Option, ...]:
    fields = dataclasses.fields(section)
    return tuple(_of_field(section, field) for field in fields if _DECLARED in field.metadata)


def _of_field(section: type[Options], field: "dataclasses.Field[Any]") -> Option:
    declared: Option = field.metadata[_DECLARED]
    kind: Any = field.type
    if get_origin(kind) in (UnionType, Union):  # with None
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    several = get_origin(kind) is tuple
    choices = get_args(kind) if get_origin(kind) is Literal else declared.choices
    return dataclasses.replace(
        declared,
        name=declared.name or field.name.replace("_", "-"),
        group=declared.group or section.group,
        field=field.name,
        type=str if several or get_origin(kind) is Literal else kind,
        several=several,
        choices=choices,
    )
