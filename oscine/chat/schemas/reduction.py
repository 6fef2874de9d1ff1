"""JSON schemas reduced to what llguidance implements.

A keyword is judged by its value, not by its presence. `RULES` of rules.py drops what admits everything and
rewrites what has an equivalent; what is left is refused with its path. Annotations are dropped.

References are followed in the schema as it was given, and each target becomes a definition. So a target may lie in a
part that was dropped.
"""

import re
from collections.abc import Iterable
from typing import Any

from oscine.chat.schemas.exclusive import are_exclusive
from oscine.chat.schemas.formats import FORMATS, MISSING, WITHOUT_LOOK_AROUND
from oscine.chat.schemas.references import References
from oscine.chat.schemas.rules import (
    OF_TYPE,
    RULES,
    TYPES,
    OneOf,
    Reference,
    Schema,
    add,
    collapsed,
    kinds,
    listed,
    requiring,
    texts,
)

MAX_BYTES = 1 << 18  # of a schema, and of the parts of a grammar as JSON; larger ones take too long to compile
TOO_LARGE = f"what is to be enforced has more than {MAX_BYTES} bytes"

_CONTAINERS = (dict, list)
_LONGEST_PATH = 200  # characters
_KEYWORDS = {
    *("type", "const", "enum", "$ref", "$dynamicRef", "$recursiveRef", "allOf", "anyOf", "oneOf", "discriminator"),
    *("not", "if", "then", "else", *OF_TYPE),
}
_RULED = {keyword for keywords, _ in RULES for keyword in keywords}
_MAPS = {"properties", "patternProperties", "dependentSchemas", "dependentRequired", "dependencies"}
_LISTS = {"allOf", "anyOf", "oneOf", "prefixItems"}
_SCHEMAS = {
    *("items", "additionalItems", "additionalProperties", "contains", "propertyNames", "unevaluatedItems"),
    *("unevaluatedProperties", "not", "if", "then", "else"),
}
_COUNTS = {f"{limit}{of}" for limit in ("min", "max") for of in ("Length", "Items", "Properties", "Contains")}
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_SINCE = {  # the draft that introduced a keyword; earlier ones ignore it
    **dict.fromkeys(("contains", "propertyNames"), 6),
    **dict.fromkeys(("if", "then", "else"), 7),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "minContains", "maxContains"), 2019),
    **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties", "$recursiveRef"), 2019),
    **dict.fromkeys(("prefixItems", "$dynamicRef"), 2020),
}


class _Refusal(str):
    """The value of a keyword that no grammar can express: the error if the keyword is still there in the end."""

    __slots__ = ()


def reduced(schema: dict[str, Any], *, lenient: bool = False, any_format: bool = False) -> dict[str, Any]:
    """The equivalent schema for llguidance.

    `lenient`: what no grammar can express is skipped instead of refused. `any_format`: so are unknown formats. Raises
    ValueError that names what is refused, and RecursionError for a schema that is nested too deeply.
    """
    whole = _Reduction(schema, lenient, any_format or lenient).whole()
    if whole is False and not lenient:
        raise ValueError("it admits nothing")
    return whole if isinstance(whole, dict) else {}


class _Reduction:
    def __init__(self, root: dict[str, Any], lenient: bool, any_format: bool) -> None:
        self._root, self._lenient, self._any_format = root, lenient, any_format
        self._of_root = References(root)
        self._draft = self._of_root.draft
        self._targets: dict[int, Schema] = {}  # reduced, by the id() of the schema as it was given
        self._ends: dict[Reference, Schema] = {}  # of references that lead to others
        self._names: dict[Reference, str] = {}  # of definitions
        self._references: list[Reference] = []  # those with a name, in order of first use
        self._left = MAX_BYTES  # parts that may still be written or compared

    def whole(self) -> Schema:
        written: Schema = self._written(self._reduced(self._root))
        definitions: dict[str, Schema] = {}
        for reference in self._references:  # which grows meanwhile
            definitions[self._names[reference]] = self._written(self._target(reference))
        return {**written, "$defs": definitions} if isinstance(written, dict) and definitions else written

    def _reduced(self, schema: Any, path: tuple[str, ...] = ()) -> Schema:
        """Without references being followed. What cannot be expressed becomes a _Refusal."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise ValueError(f"{_dotted(path)} is no schema: neither an object nor a boolean")
        only_reference = self._draft < 2019 and schema.get("$ref") is not None
        keywords = {"$ref"} if only_reference else _KEYWORDS
        if self._lenient and not {*kinds(schema)}.issubset(TYPES):
            keywords = keywords - {"type"}  # a type of another language, such as `any`
        types = {None, *(kinds(schema) if "type" in keywords else ())}
        kept: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword not in keywords or self._draft < _SINCE.get(keyword, 0):
                continue
            if value is None and keyword != "const":  # serializers write what is not set
                continue
            if len(types) == 1 or OF_TYPE.get(keyword) in types:  # else the values that it is about are refused
                kept[keyword] = self._part(keyword, value, (*path, keyword), schema)
        self._check_pattern(kept)
        self._check_format(kept, path)
        if not _RULED.isdisjoint(kept):
            self._apply_rules(kept, path)
        return collapsed(kept)

    def _apply_rules(self, schema: dict[str, Any], path: tuple[str, ...]) -> None:
        for keywords, rule in RULES:
            for keyword in () if schema.keys().isdisjoint(keywords) else rule(schema):
                schema.pop(keyword, None)
                if not self._lenient:
                    schema[keyword] = _Refusal(f"no grammar can express {_dotted((*path, keyword))}")

    def _part(self, keyword: str, value: Any, path: tuple[str, ...], schema: dict[str, Any]) -> Any:
        """The value of a keyword of a schema, with reduced schemas."""
        if keyword == "$ref":
            if not isinstance(value, str):
                raise ValueError(f"{_dotted(path)} is no text")
            return Reference(self._of_root.uri(value, schema))
        if keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
            if not isinstance(value, list):
                raise ValueError(f"{_dotted(path)} is no list")
            return [self._reduced(part, (*path, str(index))) for index, part in enumerate(value)]
        if keyword in _MAPS:
            if not isinstance(value, dict):
                raise ValueError(f"{_dotted(path)} is no object")
            names = keyword in ("dependentRequired", "dependencies")  # lists of them
            return {
                name: part if names and isinstance(part, list) else self._reduced(part, (*path, name))
                for name, part in value.items()
            }
        if keyword in _COUNTS and isinstance(value, float) and value.is_integer():
            return int(value)
        if keyword == "propertyNames":
            return self._names_admitted(self._reduced(value, path))
        return self._reduced(value, path) if keyword in _SCHEMAS else value

    def _names_admitted(self, names: Schema) -> Schema:
        """Without references. No grammar checks the format of a name, so it is an annotation unless all is enforced."""
        names = self._followed(names)
        self._spend(len(listed(names) or ()))
        if isinstance(names, dict) and self._any_format:
            return {keyword: value for keyword, value in names.items() if keyword != "format"}
        return names

    def _followed(self, schema: Schema) -> Schema:
        """What a reference leads to in the end. Raises RecursionError for one that leads to itself."""
        if not isinstance(schema, dict) or schema.keys() != {"$ref"}:
            return schema
        reference = schema["$ref"]
        if reference not in self._ends:
            self._ends[reference] = self._followed(self._target(reference))
        return self._ends[reference]

    def _check_pattern(self, schema: dict[str, Any]) -> None:
        """Look-around is left to llguidance's refusal, unless an equivalent pattern has none."""
        pattern = schema.get("pattern")
        if not isinstance(pattern, str):
            return
        schema["pattern"] = WITHOUT_LOOK_AROUND.get(pattern, pattern)
        if self._lenient and _LOOK_AROUND.search(schema["pattern"]):
            del schema["pattern"]

    def _check_format(self, schema: dict[str, Any], path: tuple[str, ...]) -> None:
        name = schema.get("format")
        if not isinstance(name, str):
            return
        if name in MISSING:
            add(schema, MISSING[name])
        elif name not in FORMATS:
            del schema["format"]
            if not self._any_format:
                schema["format"] = _Refusal(
                    f"no grammar knows the format {name[:80]!r} of {_dotted(path) or 'the text'}"
                )

    def _written(self, node: Any) -> Any:
        """The part with the names of its definitions. Raises ValueError for the first refusal in it."""
        if isinstance(node, Reference):
            return f"#/$defs/{self._name(node)}"
        if isinstance(node, _Refusal):
            raise ValueError(str(node))
        if not isinstance(node, _CONTAINERS):
            return node
        self._spend(len(node))
        if isinstance(node, list):
            return [self._written(part) for part in node]
        if isinstance(variants := node.get("oneOf"), OneOf) and self._are_exclusive(variants):
            node = {key: value for key, value in node.items() if key != "oneOf"}
            add(node, {"anyOf": variants})
        return {key: self._written(part) for key, part in node.items()}

    def _spend(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise ValueError(TOO_LARGE)

    def _name(self, reference: Reference) -> str:
        """Of the definition. A tag that the target requires anyway makes no other definition."""
        if reference.tag is not None:
            plain = reference._replace(tag=None)
            required = texts(self._target(plain), "required")
            self._spend(len(required))
            reference = plain if reference.tag in required else reference
        if reference not in self._names:
            self._names[reference] = str(len(self._names))
            self._references.append(reference)
        return self._names[reference]

    def _target(self, reference: Reference) -> Schema:
        """The reduced schema that a reference leads to. Raises ValueError for one that leads nowhere."""
        node, path = self._of_root.target(reference.uri)
        if id(node) not in self._targets:
            self._targets[id(node)] = self._reduced(node, path)
        target = self._targets[id(node)]
        return target if reference.tag is None else requiring(target, reference.tag)

    def _are_exclusive(self, variants: Iterable[Any]) -> bool:
        """See are_exclusive. References are followed."""
        resolved = (self._target(v["$ref"]) if isinstance(v, dict) and "$ref" in v else v for v in variants)
        return are_exclusive(map(self._followed, resolved), self._spend)


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(path)[:_LONGEST_PATH]
