"""Finds what a text answers: a letter, a number, a JSON value."""

import json
import re
from fractions import Fraction
from typing import Any

_MARK = re.compile(r"answer[*_`\s]*[:=]", re.IGNORECASE)
_BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
_DRESSED = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\s*\{")
_SAID = re.compile(r"\banswer\s+is\s*[:(*_`\"'\s]*([A-Z])(?![\w'])")
_LISTED = re.compile(r"[\s(*_`\"'\[]*([A-Z])(?:[).:\]*_`\"'].*|\s*)")
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)\n?\s*```", re.DOTALL | re.IGNORECASE)
_MAX_DIGITS = 300  # of a number, so that no answer costs much time or memory
_NUMBER = re.compile(
    r"(?:(?<![\w).])[-+\u2212])?(?<![\w.])(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3}(?!\d))?"
    r"(?:\s*/\s*\d+)?"
    r"|(?:(?<![\w).])[-+\u2212])?(?<![\w.])\.\d+"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*\{(\d+)\}\s*\{(\d+)\}")


def letter(text: str, num_choices: int) -> str | None:
    """The letter of a choice: after the last "Answer:", in the last box, after "answer is", or as the last line."""
    allowed = [chr(ord("A") + index) for index in range(num_choices)]
    found = _marked_letter(text) or _boxed_letter(text) or _said_letter(text) or _listed_letter(text)
    return found if found in allowed else None


def _marked_letter(text: str) -> str | None:
    marked = _after_mark(text)
    return None if marked is None else _leading_letter(marked)


def _boxed_letter(text: str) -> str | None:
    boxes = _BOXED.findall(text)
    return _leading_letter(boxes[-1]) if boxes else None


def _leading_letter(text: str) -> str | None:
    plain = _DRESSED.sub(" ", text).lstrip(" ($*_`\"'[{\t")
    if (found := re.match(r"([A-Z])(?![\w'])", plain)) is None:
        found = re.match(r"([a-z])[)\]}$*_`\"'.\s]*$", plain)
    return None if found is None else found[1].upper()


def _said_letter(text: str) -> str | None:
    said = _SAID.findall(text)
    return said[-1] if said else None


def _listed_letter(text: str) -> str | None:
    """Of "B", "(B)" or "B) Paris" as the last line."""
    lines = text.strip().splitlines()
    found = _LISTED.fullmatch(lines[-1]) if lines else None
    return None if found is None else found[1]


def number(text: str) -> Fraction | None:
    """The number in the last box, after the last "Answer:", or else the last one of the text. It is exact."""
    plain = _FRACTION.sub(r"\1/\2", text).replace("{,}", ",").replace("\\,", "").replace("\\!", "")
    boxes, marked = _BOXED.findall(plain), _after_mark(plain)
    if boxes and (found := _first_number(boxes[-1])) is not None:
        return found
    if marked is not None and (found := _first_number(marked.rpartition("=")[2])) is not None:
        return found
    return _read_number(all_found[-1]) if (all_found := _NUMBER.findall(plain)) else None


def _first_number(text: str) -> Fraction | None:
    found = _NUMBER.search(text)
    return None if found is None else _read_number(found[0])


def _read_number(text: str) -> Fraction | None:
    if len(text) > _MAX_DIGITS:
        return None
    whole, slash, divisor = text.replace(",", "").replace("\u2212", "-").partition("/")
    value = Fraction(whole.strip())
    if not slash:
        return value
    return value / int(divisor) if int(divisor) else None


def _after_mark(text: str) -> str | None:
    """The rest of the line of the last "Answer:", or the next line if nothing else is there."""
    found = [*_MARK.finditer(text)]
    if not found:
        return None
    lines = text[found[-1].end() :].lstrip(" \t\r\n*_`").splitlines()
    return lines[0] if lines else ""


def json_value(text: str) -> tuple[bool, Any]:
    """Whether the text is JSON, which a Markdown fence may surround, and its value."""
    stripped = text.strip()
    fenced = _FENCED.fullmatch(stripped)
    try:
        return True, json.loads(fenced[1] if fenced else stripped)
    except (ValueError, RecursionError):
        return False, None


def same_json(one: Any, other: Any) -> bool:
    """Whether two values are equal in JSON: 1 is 1.0, but true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    return bool(one == other)
