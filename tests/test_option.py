"""What follows from the declaration of an option: what it reads, what it refuses and in which words."""

import datetime
import pickle
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import pytest

from oscine.settings.config import EngineOptions
from oscine.settings.option import (
    BYTES,
    TOKENS,
    OptionError,
    Options,
    option,
    options_of,
    read_size,
    require,
    write_size,
)


@dataclass(frozen=True)
class Example(Options, group="example"):
    name: str = option("x", "a name", "NAME")
    count: int = option(1, "a number", "N", at_least=1)
    port: int = option(0, "a port", "PORT", at_least=0, at_most=9)
    size: int | None = option(None, "a size", BYTES, above=0)
    context: int = option(64, "a length", TOKENS)
    share: float = option(0.5, "a share", "SHARE", above=0, at_most=1)
    kind: Literal["long", "short"] = option("long", "a kind")
    off: bool = option(True, "do less", name="no-more")
    words: tuple[str, ...] = option((), "words", "WORD", shown="none", split=lambda text: text.split(","))
    level_s: float = option(2.5, "seconds", "SECONDS", name="level")
    folder: str | None = option(None, "a folder", "DIR")
    files: tuple[str, ...] = option((), "files", "FILE", shown="none")
    hidden: int = 0


EXAMPLE = {declared.field: declared for declared in options_of(Example)}


@pytest.mark.parametrize(
    ("field", "given", "read"),
    [
        ("name", "a", "a"),
        ("name", 12, "12"),
        ("name", datetime.date(2025, 8, 5), "2025-08-05"),
        ("count", 3, 3),
        ("count", "3", 3),
        ("size", "1GB", 10**9),
        ("size", 7, 7),
        ("context", "128K", 131072),
        ("share", 1, 1.0),
        ("share", "0.25", 0.25),
        ("kind", "short", "short"),
        ("off", False, False),
        ("words", "a,b", ("a", "b")),
        ("words", ["a", "b,c", 7], ("a", "b", "c", "7")),
        ("level_s", 3, 3.0),
        ("folder", "~/a", "/home/own/a"),
        ("folder", "a/~", "a/~"),
        ("folder", ":temporary:", ":temporary:"),
        ("files", ["~/a", "~"], ("/home/own/a", "/home/own")),
        ("name", "~/a", "~/a"),
    ],
)
def test_text_and_yaml_are_read_by_the_type_of_the_field(
    field: str, given: object, read: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/own")
    found = EXAMPLE[field].read(given)
    assert (found, type(found)) == (read, type(read))


@pytest.mark.parametrize(
    ("field", "given", "said"),
    [
        ("name", True, "--name must be text, not true"),
        ("name", None, "--name must be text, not null"),
        ("count", "x", "--count must be a whole number, not 'x'"),
        ("count", 1.5, "--count must be a whole number, not 1.5"),
        ("count", True, "--count must be a whole number, not true"),
        ("count", 0, "--count must be at least 1, not 0"),
        ("port", 10, "--port must be between 0 and 9, not 10"),
        ("size", 0, "--size must be positive, not 0"),
        ("share", 0, "--share must be above 0 and at most 1, not 0.0"),
        ("share", "nan", "--share must be above 0 and at most 1, not nan"),
        ("level_s", "inf", "--level must be finite, not inf"),
        ("count", 1 << 63, "--count must be below 2^63, not 9223372036854775808"),
        ("size", "9999999999T", "--size must be below 2^63, not '9999999999T'"),
        ("kind", "shor", "--kind must be long or short, not 'shor'; did you mean short?"),
        ("off", 1, "--no-more must be true or false, not 1"),
        ("words", [{}], "--words must be text, not {}"),
        ("level_s", "x", "--level must be a number, not 'x'"),
        ("folder", "", "--folder must be a path, not ''"),
        ("files", ["a", ""], "--files must be a path, not ''"),
    ],
)
def test_what_is_refused_is_named_with_the_rule(field: str, given: object, said: str) -> None:
    with pytest.raises(OptionError) as caught:
        EXAMPLE[field].read(given)
    assert str(caught.value) == said
    assert caught.value.option == EXAMPLE[field].name


@pytest.mark.parametrize("given", [{"count": 0}, {"share": 2.0}, {"kind": "other"}, {"port": -1}])
def test_bounds_hold_for_the_record_as_well(given: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"--{next(iter(given))} must be"):
        Example(**given)
    assert Example(size=None, hidden=-1).hidden == -1


def test_the_help_ends_with_the_default() -> None:
    helps = {field: declared.help_text for field, declared in EXAMPLE.items()}
    assert helps["count"] == "a number (default: 1)"
    assert helps["words"] == "words (default: none)"
    assert helps["level_s"] == "seconds (default: 2.5)"
    assert (helps["size"], helps["off"]) == ("a size", "do less")


def test_an_error_crosses_processes() -> None:
    error = pickle.loads(pickle.dumps(OptionError("a", "must be 1", "b")))
    assert (str(error), error.option, error.related) == ("--a must be 1", "a", ("b",))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("0", 0), ("5", 5), ("5B", 5), ("1_000", 1000), ("1GB", 10**9), ("1gb", 10**9), ("500k", 500_000)),
        *(("512M", 512 << 20), ("1GiB", 1 << 30), ("1gib", 1 << 30), ("1 G", 1 << 30), ("1.5G", 3 << 29)),
        ("2T", 2 << 40),
    ],
)
def test_bytes(text: str, expected: int) -> None:
    assert read_size(text, BYTES) == expected


def test_tokens() -> None:
    assert [read_size(text, TOKENS) for text in ("131072", "128K", "128k")] == [131072, 131072, 128_000]


@pytest.mark.parametrize("text", ["", "x", "-1", "1.5", "1Q", "1GBB", "0x10", "1e3"])
def test_what_is_no_size_is_said_with_examples(text: str) -> None:
    with pytest.raises(OptionError, match=r"--size must be a number of bytes such as .* 512M"):
        EXAMPLE["size"].read(text)


def test_a_rule_about_what_was_not_given_quotes_nothing() -> None:
    with pytest.raises(OptionError, match=r"--users must be given$"):
        require(False, "users", "given", None)
    with pytest.raises(OptionError, match=r"--head must be true, not false$"):
        require(False, "head", "true", False)


@pytest.mark.parametrize("text", ["128KB", "128KiB", "5B"])
def test_tokens_are_no_bytes(text: str) -> None:
    with pytest.raises(OptionError, match="--context must be a number of tokens"):
        EXAMPLE["context"].read(text)


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0"), (1000, "1000"), (32 << 20, "32MiB"), (1 << 30, "1GiB"), (1536, "1536")]
)
def test_written_as_it_is_read(size: int, text: str) -> None:
    assert write_size(size) == text
    assert read_size(text, BYTES) == size


@pytest.mark.parametrize(
    ("asked_s", "on_gpu", "limit_s"), [(None, True, 120.0), (None, False, 900.0), (7.0, True, 7.0), (0.0, True, inf)]
)
def test_a_gpu_is_waited_for_less_long(asked_s: float | None, on_gpu: bool, limit_s: float) -> None:
    assert EngineOptions(engine_timeout_s=asked_s).hang_limit_s(on_gpu=on_gpu) == limit_s
