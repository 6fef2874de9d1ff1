"""The kinds of expected answers, and whether an answer of a model is one of them."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from oscine.extensions.eval import extract


class Call(NamedTuple):
    name: str
    arguments: str  # JSON text


class Answer(NamedTuple):
    """An answer of a model, without its reasoning."""

    content: str
    calls: tuple[Call, ...] = ()
    finish_reason: str = "stop"

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason == "length"


class Grade(NamedTuple):
    is_right: bool
    found: Any = None  # what the answer says, as JSON; None: nothing of this kind


class ExpectedError(ValueError):
    """An expected answer that cannot be one. `field` is the wrong key."""

    def __init__(self, field: str, why: str) -> None:
        super().__init__(f"{field}: {why}")
        self.field = field


@dataclass(frozen=True, slots=True)
class Expected:
    """What a task expects. `kind` is one of KINDS; `extra` has its other keys."""

    kind: str
    value: Any
    extra: Mapping[str, Any]

    @classmethod
    def read(cls, given: Any) -> "Expected":
        """From the `answer` of a task: one kind with its value, and the other keys of that kind. Raises ExpectedError.

        A schema needs the package jsonschema; ModuleNotFoundError if it is not there.
        """
        if not isinstance(given, dict):
            raise ExpectedError("answer", f"needs an object with one of {', '.join(KINDS)}")
        named = [name for name in KINDS if name in given]
        if len(named) != 1:
            raise ExpectedError("answer", f"needs exactly one of {', '.join(KINDS)}, and has {_listed(named)}")
        kind = KINDS[named[0]]
        extra = {key: value for key, value in given.items() if key != kind.name}
        if unknown := sorted(extra.keys() - kind.keys):
            raise ExpectedError(f"answer.{unknown[0]}", f"is unknown beside {kind.name}")
        kind.check(given[kind.name], extra)
        return cls(kind.name, given[kind.name], extra)

    def grade(self, answer: Answer) -> Grade:
        return KINDS[self.kind].grade(self, answer)


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "none"


def _require(condition: bool, field: str, rule: str) -> None:
    if not condition:
        raise ExpectedError(f"answer.{field}", rule)


# ---- one letter of several choices ----


def _check_choice(value: Any, extra: Mapping[str, Any]) -> None:
    count = extra.get("choices", 4)
    _require(type(count) is int and 2 <= count <= 26, "choices", "must be a whole number from 2 to 26")
    is_letter = isinstance(value, str) and len(value) == 1 and "A" <= value < chr(ord("A") + count)
    _require(is_letter, "choice", f"must be a letter from A to {chr(ord('A') + count - 1)}, not {value!r}")


def _grade_choice(expected: Expected, answer: Answer) -> Grade:
    found = extract.letter(answer.content, expected.extra.get("choices", 4))
    return Grade(found == expected.value, found)


# ---- a number ----


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_number(value: Any, extra: Mapping[str, Any]) -> None:
    _require(_is_number(value), "number", f"must be a number, not {value!r}")
    tolerance = extra.get("tolerance", 0)
    _require(_is_number(tolerance) and tolerance >= 0, "tolerance", f"must be a number from 0 on, not {tolerance!r}")


def _grade_number(expected: Expected, answer: Answer) -> Grade:
    """The difference is exact: 0.3 is within 0.1 of 0.2."""
    found = extract.number(answer.content)
    if found is None:
        return Grade(False)
    tolerance = Fraction(str(expected.extra.get("tolerance", 0)))
    return Grade(abs(found - Fraction(str(expected.value))) <= tolerance, str(found))


# ---- JSON ----


def _grade_json(expected: Expected, answer: Answer) -> Grade:
    is_json, value = extract.json_value(answer.content)
    return Grade(is_json and extract.same_json(value, expected.value), answer.content if is_json else None)


def _check_schema(value: Any, extra: Mapping[str, Any]) -> None:
    from jsonschema import Draft202012Validator, SchemaError

    _require(isinstance(value, dict), "schema", "must be an object")
    try:
        Draft202012Validator.check_schema(value)
    except SchemaError as error:
        raise ExpectedError("answer.schema", f"is not a JSON schema: {error.message}") from None


def _grade_schema(expected: Expected, answer: Answer) -> Grade:
    from jsonschema import Draft202012Validator

    is_json, value = extract.json_value(answer.content)
    is_right = is_json and Draft202012Validator(expected.value).is_valid(value)
    return Grade(is_right, answer.content if is_json else None)


# ---- a call of a function ----


def _check_call(value: Any, extra: Mapping[str, Any]) -> None:
    is_call = isinstance(value, dict) and value.keys() == {"name", "arguments"}
    _require(is_call, "call", "must be an object with name and arguments")
    _require(isinstance(value["name"], str), "call.name", f"must be a text, not {value['name']!r}")
    _require(isinstance(value["arguments"], dict), "call.arguments", f"must be an object, not {value['arguments']!r}")


def _found_calls(answer: Answer) -> list[dict[str, str]] | None:
    return [call._asdict() for call in answer.calls] or None


def _grade_call(expected: Expected, answer: Answer) -> Grade:
    """One call, of this function, with equal arguments."""
    if (found := _found_calls(answer)) is None:
        return Grade(False)
    is_json, arguments = extract.json_value(answer.calls[0].arguments)
    is_same = is_json and extract.same_json(arguments, expected.value["arguments"])
    return Grade(len(found) == 1 and answer.calls[0].name == expected.value["name"] and is_same, found)


# ---- a text ----


def _check_text(value: Any, extra: Mapping[str, Any]) -> None:
    _require(isinstance(value, str), "text", f"must be a text, not {value!r}")


def _grade_text(expected: Expected, answer: Answer) -> Grade:
    """Equal but for white space at the ends; a call is no text."""
    found = answer.content.strip()
    return Grade(not answer.calls and found == expected.value.strip(), found or None)


def _check_ends(value: Any, extra: Mapping[str, Any]) -> None:
    _require(value in ("text", "any"), "ends", f"must be text or any, not {value!r}")


def _grade_ends(expected: Expected, answer: Answer) -> Grade:
    """A text, or also a call, that is complete."""
    found = _found_calls(answer) or answer.content.strip() or None
    fits = expected.value == "any" or not answer.calls
    return Grade(found is not None and fits and not answer.is_truncated, found)


def _check_any(value: Any, extra: Mapping[str, Any]) -> None:
    """Every value of JSON will do."""


class Kind(NamedTuple):
    name: str
    check: Callable[[Any, Mapping[str, Any]], None]
    grade: Callable[[Expected, Answer], Grade]
    keys: frozenset[str] = frozenset()  # that it has beside its name


KINDS = {
    kind.name: kind
    for kind in (
        Kind("choice", _check_choice, _grade_choice, frozenset({"choices"})),
        Kind("number", _check_number, _grade_number, frozenset({"tolerance"})),
        Kind("json", _check_any, _grade_json),
        Kind("schema", _check_schema, _grade_schema),
        Kind("call", _check_call, _grade_call),
        Kind("text", _check_text, _grade_text),
        Kind("ends", _check_ends, _grade_ends),
    )
}


def answer_of(body: Any) -> tuple[Answer, int | None]:
    """The answer in a chat completion, and its generated tokens if the server counts them.

    Raises ValueError for anything else.
    """
    try:
        (choice,) = body["choices"]
        message = choice["message"]
        calls = [
            Call(str(c["function"]["name"]), str(c["function"]["arguments"])) for c in message.get("tool_calls") or ()
        ]
        answer = Answer(str(message.get("content") or ""), tuple(calls), str(choice.get("finish_reason") or ""))
        tokens = (body.get("usage") or {}).get("completion_tokens")
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError(f"not a chat completion: {json.dumps(body)[:200]}") from None
    return answer, tokens if isinstance(tokens, int) else None
