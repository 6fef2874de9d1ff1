"""Moves the tensors of nested records, such as the prepared weights of a model, to other addresses."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor


def moved(value: Any, move: Callable[[Tensor], Tensor]) -> Any:
    """The same value with `move` of each tensor in it: in dataclasses, named tuples, tuples, lists and dicts.

    A list is changed in place, item by item, so that the memory of an item can be freed before the next one is moved.
    Anything else stays as it is.
    """
    if isinstance(value, Tensor):
        return move(value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{name: moved(getattr(value, name), move) for name in _names(value)})
    if isinstance(value, list):
        for place, item in enumerate(value):
            value[place] = moved(item, move)
        return value
    if isinstance(value, tuple):
        items = [moved(item, move) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):
        return {key: moved(item, move) for key, item in value.items()}
    return value


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Each tensor in it."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    moved(list(value) if isinstance(value, list) else value, note)
    return iter(found)


def _names(record: Any) -> list[str]:
    return [field.name for field in fields(record) if field.init]
