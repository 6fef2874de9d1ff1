"""What each keyword of a JSON schema means where llguidance has no such keyword.

A rule changes one schema whose parts are reduced already. It drops keywords that have no effect, rewrites those that
have an equivalent, and returns those that are left and cannot be expressed.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Any, NamedTuple

Schema = dict[str, Any] | bool

OF_TYPE = {  # keywords that concern values of one type only
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), "string"),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), "number"),
    **dict.fromkeys(("items", "additionalItems", "prefixItems", "minItems", "maxItems", "uniqueItems"), "array"),
    **dict.fromkeys(("contains", "minContains", "maxContains", "unevaluatedItems"), "array"),
    **dict.fromkeys(("properties", "patternProperties", "additionalProperties", "required"), "object"),
    **dict.fromkeys(("minProperties", "maxProperties", "propertyNames", "unevaluatedProperties"), "object"),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), "object"),
}
TYPES = ("null", "boolean", "number", "string", "array", "object")
_NO_ARRAY = {"type": [name for name in TYPES if name != "array"]}
_INDEPENDENT = {  # keywords that mean the same beside any others
    *("type", "pattern", "minLength", "maxLength", "minItems", "maxItems", "maxProperties", "anyOf"),
}


class Reference(NamedTuple):
    """The value of a `$ref`."""

    uri: str
    tag: str | None = None  # a property that is required of the target


class OneOf(list[Schema]):
    """The value of a `oneOf`, as opposed to a value in `const` that looks like one."""


def kinds(schema: Schema) -> list[str]:
    """The types that a schema names, `integer` as `number`; none if it names no types."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    names = kind if isinstance(kind, list) else [kind]
    return [*dict.fromkeys("number" if name == "integer" else name for name in names if isinstance(name, str))]


def listed(schema: Any) -> list[Any] | None:
    """The values that `const` or `enum` lists."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    return values if isinstance(values, list) else None


def texts(schema: Schema, keyword: str) -> list[str]:
    """The texts in the list that is the keyword's value."""
    values = schema.get(keyword) if isinstance(schema, dict) else None
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else []


def add(schema: dict[str, Any], other: Schema) -> None:
    """Adds a schema that must hold as well."""
    if isinstance(other, dict) and other.keys() <= _INDEPENDENT - schema.keys():
        schema.update(other)
    elif other is not True:
        schema["allOf"] = [*schema.get("allOf", ()), other]


def requiring(schema: Any, name: str) -> Any:
    """The schema with one more required property. For a reference that changes the target."""
    if not isinstance(schema, dict):
        return schema and {"required": [name]}
    if schema.keys() == {"$ref"}:
        return {"$ref": schema["$ref"]._replace(tag=name)}
    return {**schema, "required": [*dict.fromkeys((*texts(schema, "required"), name))]}


def equality_key(value: Any) -> str:
    """Equal for values that are equal in JSON, where 1 is 1.0 but not true."""
    return json.dumps(json.loads(json.dumps(value), parse_float=_number), sort_keys=True)


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _items(schema: dict[str, Any]) -> Iterable[str]:
    """Lists of items as drafts before 2020 have them."""
    others = schema.pop("additionalItems", None)
    if isinstance(schema.get("items"), list):
        schema["prefixItems"] = schema.pop("items")
        if others is not None:
            schema["items"] = others
    return ()


def _unevaluated(schema: dict[str, Any]) -> Iterable[str]:
    """Without applicators beside them, unevaluated ones are additional ones."""
    applied = [part for keyword in ("allOf", "anyOf", "oneOf") for part in schema.get(keyword, ())]
    applied += [schema[keyword] for keyword in ("$ref", "if", "then", "else") if keyword in schema]
    applied += [part for key in ("dependentSchemas", "dependencies") for part in schema.get(key, {}).values()]
    for keyword, others, more in (
        ("unevaluatedProperties", "additionalProperties", True),
        ("unevaluatedItems", "items", schema.get("contains", True)),
    ):
        rest = schema.pop(keyword, True)
        if rest is not True and others not in schema:
            if all(isinstance(part, bool) for part in (*applied, more)):
                schema[others] = rest
            else:
                yield keyword


def _contains(schema: dict[str, Any]) -> Iterable[str]:
    least, most = schema.pop("minContains", 1), schema.pop("maxContains", None)
    part = schema.pop("contains", None)
    if part is True:
        add(schema, {"minItems": least} if most is None else {"minItems": least, "maxItems": most})
    elif part is False and least != 0:
        add(schema, _NO_ARRAY)
    elif part and (least != 0 or most is not None):
        yield "contains"


def _unique_items(schema: dict[str, Any]) -> Iterable[str]:
    is_wanted, values = schema.pop("uniqueItems") is not False and _most_items(schema) > 1, listed(schema)
    if is_wanted and values is None:
        yield "uniqueItems"
    elif is_wanted and values is not None:
        schema.pop("const", None)
        schema["enum"] = [value for value in values if not isinstance(value, list) or _are_distinct(value)]


def _most_items(schema: dict[str, Any]) -> float:
    most = schema.get("maxItems")
    of_prefix = len(schema.get("prefixItems", ())) if schema.get("items") is False else inf
    return min(most, of_prefix) if isinstance(most, int) else of_prefix


def _are_distinct(values: list[Any]) -> bool:
    return len({*map(equality_key, values)}) == len(values)


def _property_names(schema: dict[str, Any]) -> Iterable[str]:
    names = schema.pop("propertyNames")
    if isinstance(names, dict):
        of_texts = not kinds(names) or "string" in kinds(names)
        names = of_texts and ({key: value for key, value in names.items() if key != "type"} or True)
    if names is False:
        add(schema, {"maxProperties": 0})
    elif names is not True and schema.get("maxProperties") != 0:
        admitted = _admitting(names)
        if admitted is None:
            yield "propertyNames"
        else:
            add(schema, {**admitted, "additionalProperties": False})


def _admitting(names: dict[str, Any]) -> dict[str, Any] | None:
    """Keywords that admit properties whose names satisfy the schema; None if there are none that do."""
    values = listed(names)
    if values is not None and len(names) == 1:
        return {"properties": {value: True for value in values if isinstance(value, str)}}
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if names.keys() <= {"minLength", "maxLength"} and isinstance(least, int) and isinstance(most or 0, int):
        return {"patternProperties": {rf"^[\s\S]{{{least},{most}}}$": True}}
    pattern = names.get("pattern")
    return {"patternProperties": {pattern: True}} if len(names) == 1 and isinstance(pattern, str) else None


def _condition(schema: dict[str, Any]) -> Iterable[str]:
    condition = schema.pop("if", None)
    then, otherwise = schema.pop("then", True), schema.pop("else", True)
    if condition is None or then == otherwise:
        add(schema, then if condition is not None else True)
    elif isinstance(condition, bool):
        add(schema, then if condition else otherwise)
    else:
        yield "if"


def _dependencies(schema: dict[str, Any]) -> Iterable[str]:
    """A schema that depends on a required property always holds."""
    is_old = "dependencies" in schema
    keywords = ("dependentRequired", "dependencies", "dependentSchemas")
    depending = [pair for keyword in keywords for pair in schema.pop(keyword, {}).items()]
    names: dict[str, list[str]] = {name: [] for name, _ in depending}
    for name, part in depending:
        names[name] += map(str, part) if isinstance(part, list) else ()
    required = dict.fromkeys(texts(schema, "required"))
    left = [*required]
    while left:
        new = [name for name in names.get(left.pop(), ()) if name not in required]
        required.update(dict.fromkeys(new))
        left += new
    if required:
        schema["required"] = [*required]
    if any(other not in required and other != name for name, others in names.items() for other in others):
        yield "dependencies" if is_old else "dependentRequired"
    for name, part in depending:
        if part is False:
            add(schema, {"properties": {name: False}})
        elif isinstance(part, dict) and name in required and schema.get("type") == "object":
            add(schema, part)
        elif isinstance(part, dict):
            yield "dependencies" if is_old else "dependentSchemas"


def _negation(schema: dict[str, Any]) -> Iterable[str]:
    part = schema.pop("not")
    if isinstance(part, bool):
        add(schema, not part)
    else:
        yield "not"


def _counts(schema: dict[str, Any]) -> Iterable[str]:
    """Numbers of properties that no object can miss."""
    least, most = schema.get("minProperties"), schema.get("maxProperties")
    if isinstance(least, int) and least <= len({*texts(schema, "required")}):
        del schema["minProperties"]
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if isinstance(most, int) and is_closed and most >= len(schema.get("properties", ())):
        del schema["maxProperties"]
    return ()


def _discriminator(schema: dict[str, Any]) -> Iterable[str]:
    """The property that tells variants apart has to be there; a schema often leaves that to its default."""
    tag = schema.pop("discriminator")
    name = tag.get("propertyName") if isinstance(tag, dict) else None
    if isinstance(name, str) and "oneOf" in schema:
        schema["oneOf"] = [requiring(variant, name) for variant in schema["oneOf"]]
    return ()


def _dynamic_reference(schema: dict[str, Any]) -> Iterable[str]:
    return [keyword for keyword in ("$dynamicRef", "$recursiveRef") if keyword in schema]


def _booleans(schema: dict[str, Any]) -> Iterable[str]:
    """Members of allOf, anyOf and oneOf that are booleans. The last rule: it decides some lists as a whole."""
    changed = {"allOf": [part for part in schema.get("allOf", ()) if part is not True]}
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            members = [part for part in schema[keyword] if part is not False]
            num_true = sum(part is True for part in members)
            if not members or (keyword == "oneOf" and num_true > 1):
                changed["allOf"].append(False)
            is_decided = num_true > 0 and (keyword == "anyOf" or len(members) == 1)
            changed[keyword] = [] if is_decided else OneOf(members) if keyword == "oneOf" else members
    for keyword, members in changed.items():
        if members:
            schema[keyword] = members
        else:
            schema.pop(keyword, None)
    return ()


RULES: Sequence[tuple[tuple[str, ...], Callable[[dict[str, Any]], Iterable[str]]]] = (
    (("items", "additionalItems"), _items),
    (("unevaluatedProperties", "unevaluatedItems"), _unevaluated),
    (("contains", "minContains", "maxContains"), _contains),
    (("uniqueItems",), _unique_items),
    (("propertyNames",), _property_names),
    (("if", "then", "else"), _condition),
    (("dependentRequired", "dependentSchemas", "dependencies"), _dependencies),
    (("not",), _negation),
    (("minProperties", "maxProperties"), _counts),
    (("discriminator",), _discriminator),
    (("$dynamicRef", "$recursiveRef"), _dynamic_reference),
    (("allOf", "anyOf", "oneOf"), _booleans),
)


def collapsed(schema: dict[str, Any]) -> Schema:
    """The schema as a boolean or as its only member, where that is all."""
    together = schema.get("allOf", ())
    if any(part is False for part in together):
        return False
    return together[0] if schema.keys() == {"allOf"} and len(together) == 1 else schema or True
