"""Conditions on the attributes of files: comparisons, joined by `and` and `or`."""

from typing import Any, Literal

from msgspec import Struct

from oscine.api.common.errors import invalid
from oscine.api.serving.schemas import convert

_DEEPEST, _MAX_CONDITIONS = 8, 64
_LISTS = ("in", "nin")

Scalar = str | int | float | bool


class Comparison(Struct, frozen=True):
    """`ne` and `nin` are the opposites of `eq` and `in`: a file without the attribute satisfies them.

    A text is never equal to, above or below a number.
    """

    key: str
    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "in", "nin"]
    value: Scalar | list[Scalar]


class _Compound(Struct):
    type: Literal["and", "or"]
    filters: list[dict[str, Any]]


class Joined(Struct, frozen=True):
    type: Literal["and", "or"]
    filters: tuple["Filter", ...]


Filter = Comparison | Joined


def read_filter(given: dict[str, Any] | None, where: str) -> Filter | None:
    """`where`: the parameter. Raises APIError that names what is wrong."""
    left = [_MAX_CONDITIONS]
    return _read(given, where, _DEEPEST, left) if given else None


def _read(given: dict[str, Any], where: str, depth: int, left: list[int]) -> Filter:
    left[0] -= 1
    if left[0] < 0 or not depth:
        raise invalid(where, f"a filter has at most {_MAX_CONDITIONS} conditions, {_DEEPEST} deep")
    if given.get("type") in ("and", "or"):
        joined = convert(given, _Compound, where)
        inner = (_read(one, f"{where}.filters[{i}]", depth - 1, left) for i, one in enumerate(joined.filters))
        return Joined(joined.type, tuple(inner))
    found = convert(given, Comparison, where)
    if isinstance(found.value, list) is not (found.type in _LISTS):
        what = "a list" if found.type in _LISTS else "a text, a number, true or false"
        raise invalid(f"{where}.value", f"{found.type!r} compares with {what}")
    if isinstance(found.value, list) and len(found.value) > _MAX_CONDITIONS:
        raise invalid(f"{where}.value", f"a list has at most {_MAX_CONDITIONS} values")
    if isinstance(found.value, bool) and found.type not in ("eq", "ne"):
        raise invalid(f"{where}.type", "true and false are compared with 'eq' and 'ne'")
    return found
