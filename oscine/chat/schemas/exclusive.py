"""Whether the variants of a oneOf exclude one another, so that it is an anyOf."""

from collections.abc import Callable, Iterable
from typing import Any

from oscine.chat.schemas.rules import Schema, equality_key, kinds, listed, texts

Spend = Callable[[int], None]  # counts parts that are compared; raises ValueError when they are too many


def are_exclusive(variants: Iterable[Schema], spend: Spend) -> bool:
    """Whether it is plain that no value satisfies two of them: by types, listed values or a tag of objects."""
    types: list[str] = []
    values: list[str] = []
    objects: list[Any] = []
    for schema in variants:
        if (of := listed(schema)) is not None:
            values += _keys(of, spend)
            types += {f"listed {_type_of(value)}" for value in of} - {*types}
        elif kinds(schema) == ["object"]:
            objects.append(schema)
        elif kinds(schema):
            types += kinds(schema)
        else:
            return False
    types += ["object"] if objects else []
    return (
        len({*types}) == len(types)
        and len({*values}) == len(values)
        and not any(f"listed {kind}" in types for kind in types)
        and (len(objects) < 2 or _have_tag(objects, spend))
    )


def _have_tag(objects: list[dict[str, Any]], spend: Spend) -> bool:
    """Whether a property is required in all objects, and no two list a common value for it."""
    names = {*texts(objects[0], "required")}
    for schema in objects:
        required = texts(schema, "required")
        spend(len(required))
        names.intersection_update(required)
    return any(_is_tag(name, objects, spend) for name in sorted(names))


def _is_tag(name: str, objects: Iterable[dict[str, Any]], spend: Spend) -> bool:
    seen: set[str] = set()
    for schema in objects:
        of = listed(schema.get("properties", {}).get(name))
        keys = {*_keys(of or (), spend)}
        if of is None or not seen.isdisjoint(keys):
            return False
        seen |= keys
    return True


def _keys(values: Iterable[Any], spend: Spend) -> list[str]:
    """Texts that are equal for values that are equal in JSON."""
    keys = [*map(equality_key, values)]
    spend(1 + sum(map(len, keys)))
    return keys


def _type_of(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "number")
