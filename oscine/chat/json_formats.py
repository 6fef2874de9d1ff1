"""Patterns for the string formats of JSON schemas that llguidance checks only in part.

llguidance checks the digits of a date, but neither leap years nor leap seconds. It checks each label of a hostname,
but not the whole. The missing rules are added to the schema as a pattern, which applies together with the format.
"""

from collections.abc import Mapping
from typing import Any

_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = f"(?:[0-9]{{4}}-(?:[0-9]{{2}}-(?:[013][0-9]|2[0-8])|(?:0[13-9]|1[0-2])-29)|{_LEAP_YEAR}-02-29)"
_TIME = "[0-9]{2}:[0-9]{2}:[0-5][0-9]"  # leap seconds exist, but no rule says in which minutes
_LABEL = "(?:[^.]{1,2}|[^.]{2}(?:-|-?[^.-][^.]*))"  # none like xn--, which would need valid Punycode

_MISSING: Mapping[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DATE}$"},
    "time": {"pattern": f"^{_TIME}"},
    "date-time": {"pattern": f"^{_DATE}[Tt]{_TIME}"},
    "hostname": {"pattern": rf"^(?:{_LABEL}\.)*{_LABEL}$", "maxLength": 253},
}
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples")  # values, not schemas, even if they look like one


def exact_formats(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with the missing rules of its formats. Raises RecursionError if it is nested too deeply."""
    exact = {key: value if key in _VALUES else _exact_value(key, value) for key, value in schema.items()}
    name = schema.get("format")
    missing = _MISSING.get(name) if isinstance(name, str) else None
    if missing is None:
        return exact
    if missing.keys().isdisjoint(schema):
        return exact | missing
    more = exact.get("allOf", [])
    return {**exact, "allOf": [*more, missing]} if isinstance(more, list) else exact


def _exact_value(key: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_exact_value("", part) for part in value]
    if not isinstance(value, dict):
        return value
    if key in _SCHEMAS_BY_NAME:
        return {name: _exact_value("", part) for name, part in value.items()}
    return exact_formats(value)
