"""JSON schemas as the TypeScript-like types that gpt-oss was trained to read.

The output equals that of oss-harmony, token for token, where oss-harmony expresses the whole schema. It keeps more than
oss-harmony: references become named types; anyOf, allOf, const and untyped enums become TypeScript; other constraints
become a comment after the property.

Text of a schema stands in comments and in JSON strings only, none of which it can end. Names that could be read as
anything else are written as JSON strings.
"""

import json
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any
from urllib.parse import unquote

from oscine.chat.messages import ConversationError
from oscine.chat.schemas.references import References

_NAMES = {"integer": "number", "number": "number", "string": "string", "boolean": "boolean", "null": "null"}
_LISTED_NAMES = {**_NAMES, "array": "array", "object": "object"}
_PLAIN = str.maketrans("", "", "-.$@")  # beside letters, digits and `_` in names that stand without quotes
_OBJECT_KEYWORDS = ("properties", "additionalProperties", "required")
_ARRAY_KEYWORDS = ("items", "prefixItems")
_VALUE_KEYWORDS = ("const", "enum", *_OBJECT_KEYWORDS, *_ARRAY_KEYWORDS)
# Keywords that no type can express, in the order of the comment.
_CONSTRAINTS = (
    *("format", "pattern", "minLength", "maxLength", "contentEncoding", "contentMediaType"),
    *("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf"),
    *("minItems", "maxItems", "uniqueItems", "contains", "minContains", "maxContains"),
    *("minProperties", "maxProperties", "propertyNames", "patternProperties", "dependentRequired", "dependentSchemas"),
    *("not", "if", "then", "else", "deprecated", "readOnly", "writeOnly"),
)
_LONGEST_NAME = 128  # characters of a type's name
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf")


def compact_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class _Definitions:
    """The schemas that references lead to, and the names of their types. See SchemaTypes."""

    def __init__(self, root: dict[str, Any], owner: str, taken: dict[str, int]) -> None:
        self._root = root
        self._owner = owner  # the tool, for errors
        self._taken = taken
        self._names: dict[str, str] = {}  # by the URI of the reference
        self.uris: list[str] = []  # in order of first use

    def name(self, uri: str) -> str:
        """Of the type that a reference stands for."""
        if uri not in self._names:
            self.target(uri)
            document, _, fragment = uri.partition("#")
            last = (fragment or document).rstrip("/").rpartition("/")[2]
            stem = re.sub(r"\W", "_", unquote(last))[:_LONGEST_NAME].strip("_") or f"{self._owner}_parameters"
            name = stem
            while name in self._taken:
                self._taken[stem] += 1
                name = f"{stem}_{self._taken[stem]}"
            self._taken[name] = 1
            self._names[uri] = name
            self.uris.append(uri)
        return self._names[uri]

    @cached_property
    def _references(self) -> References:
        return References(self._root)

    def uri(self, schema: dict[str, Any]) -> str:
        try:
            return self._references.uri(schema["$ref"], schema)
        except ValueError as error:
            raise self._refusal(error) from None

    def target(self, uri: str) -> Any:
        try:
            return self._references.target(uri)[0]
        except ValueError as error:
            raise self._refusal(error) from None

    def _refusal(self, error: ValueError) -> ConversationError:
        return ConversationError("tools", f"tool {self._owner!r}: {error}")


class SchemaTypes:
    """Writes the types of one root schema and collects the definitions it refers to.

    `taken` holds the names in use in the namespace, each with the last number that was appended to make another name
    (1: none). Names given to definitions are added. After `type_of`, take the definitions from `declarations`.
    """

    def __init__(self, root: dict[str, Any], owner: str, taken: dict[str, int]) -> None:
        self._definitions = _Definitions(root, owner, taken)

    def declarations(self) -> Iterator[str]:
        """Every definition referred to so far, as lines that end in a blank one. Writing one may refer to others."""
        definitions = self._definitions
        for uri in definitions.uris:  # which grows meanwhile
            schema = definitions.target(uri)
            about = _keywords(schema)
            for comment in [*text_lines(about.get("description")), *constraints(schema)]:
                yield f"// {comment}"
            bare = {key: value for key, value in about.items() if key != "description"}
            if isinstance(bare.get("$ref"), str):
                bare["$ref"] = definitions.uri(about)
            yield f"type {definitions.name(uri)} = {self.type_of(bare if about else schema)};\n"

    def type_of(self, schema: Any, indent: str = "") -> str:
        """The type of a schema; `indent` stands before the lines of an object's properties."""
        if schema is False:
            return "never"
        if not isinstance(schema, dict):
            return "any"
        parts = [*self._combined(schema, indent)]
        if not parts or any(key in schema for key in _VALUE_KEYWORDS):
            parts.insert(0, self._plain(schema, indent))
        text = parts[0] if len(parts) == 1 else " & ".join(f"({part})" if "|" in part else part for part in parts)
        return f"{text} | null" if schema.get("nullable") is True and not _admits_null(schema) else text

    def _combined(self, schema: dict[str, Any], indent: str) -> Iterator[str]:
        """The types of $ref, allOf, anyOf and oneOf; all of them hold at once."""
        if isinstance(schema.get("$ref"), str):
            yield self._definitions.name(self._definitions.uri(schema))
        for part in _list(schema, "allOf"):
            yield self.type_of(part, indent)
        any_of = _list(schema, "anyOf")
        if any(map(trailing_comments, any_of)):
            yield self._variants(any_of, indent)
        elif any_of:
            yield " | ".join(self.type_of(variant, indent) for variant in any_of)
        one_of = _list(schema, "oneOf")
        if one_of:
            yield self._variants(one_of, indent)

    def _variants(self, variants: list[Any], indent: str) -> str:
        """One variant per line, each with its comments."""
        out = ""
        for variant in variants:
            comments = trailing_comments(variant, bare_enum=False)
            out += f"\n{indent} | {self.type_of(variant, indent + '   ')}{_trailing(comments)}"
        return out

    def _plain(self, schema: dict[str, Any], indent: str) -> str:
        """The type without regard to combinators."""
        kind = schema.get("type")
        if "const" in schema:
            return compact_json(schema["const"])
        values = _list(schema, "enum")
        if kind == "string":
            values = [value for value in values if isinstance(value, str)]
        if values:
            return " | ".join(map(compact_json, values))
        if isinstance(kind, list) and kind:
            kinds = [name if isinstance(name, str) else "any" for name in kind]
            if any(key in schema for key in _VALUE_KEYWORDS if key != "enum"):  # once each, else inner schemas multiply
                return " | ".join(self._of_kind(name, schema, indent) for name in dict.fromkeys(kinds))
            return " | ".join(_LISTED_NAMES.get(name, "any") for name in kinds)
        if kind is None:
            kind = "object" if any(k in schema for k in _OBJECT_KEYWORDS) else kind
            kind = "array" if any(k in schema for k in _ARRAY_KEYWORDS) else kind
        return self._of_kind(kind, schema, indent)

    def _of_kind(self, kind: Any, schema: dict[str, Any], indent: str) -> str:
        if kind == "object":
            return self._object(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        return _NAMES.get(kind, "any") if isinstance(kind, str) else "any"

    def _array(self, schema: dict[str, Any], indent: str) -> str:
        prefix = _list(schema, "prefixItems")
        if prefix:
            parts = [self.type_of(part, indent) for part in prefix]
            rest = schema.get("items", True)
            return f"[{', '.join(parts if rest is False else [*parts, f'...{self._items(rest, indent)}'])}]"
        return self._items(schema["items"], indent) if "items" in schema else "Array<any>"

    def _items(self, items: Any, indent: str) -> str:
        text = self.type_of(items, indent)
        return f"({text})[]" if _binds_loosely(items) else f"{text}[]"

    def _object(self, schema: dict[str, Any], indent: str) -> str:
        head = "".join(f"{indent}{line}\n" for line in _comments(schema, "description"))
        properties = _keywords(schema.get("properties"))
        required = dict.fromkeys(key for key in _list(schema, "required") if isinstance(key, str))
        lines = [self._property(key, value, key in required, indent) for key, value in properties.items()]
        lines += [f"{indent}{_name(key)}: any,\n" for key in required if key not in properties]
        others = schema.get("additionalProperties", False)
        if others is not False:
            comments = trailing_comments(others)
            lines.append(f"{indent}[key: string]: {self.type_of(others, indent + '    ')},{_trailing(comments)}\n")
        return head + "{\n" + "".join(lines) + indent + "}"

    def _property(self, key: str, schema: Any, required: bool, indent: str) -> str:
        about = _keywords(schema)
        name = _name(key) if required else f"{_name(key)}?"
        variants = _listed_variants(about)
        if variants:
            return self._union_property(name, about, variants, indent)
        lines = _comments(about, "title", "description", "examples")
        trailing = _trailing(trailing_comments(about, described=True))
        type_ = self.type_of(schema, indent + "    ")
        return "".join(f"{indent}{line}\n" for line in lines) + f"{indent}{name}: {type_},{trailing}\n"

    def _union_property(self, name: str, schema: dict[str, Any], variants: list[Any], indent: str) -> str:
        """A property that is one of several types, one per line, between its name and the comma."""
        lines = [*_comments(schema, "title", "examples", "description")]
        lines += [f"// {comment}" for comment in trailing_comments(schema, described=True)]
        lines.append(f"{name}:")
        for variant in variants:
            said = _keywords(variant).get("description") == schema.get("description")
            trailing = _trailing(trailing_comments(variant, described=said))
            lines.append(f" | {self.type_of(variant, indent + '   ')}{trailing}")
        if schema.get("nullable") is True and not _admits_null(schema):
            lines.append(" | null")
        return "".join(f"{indent}{line}\n" for line in [*lines, ","])


def _name(key: str) -> str:
    """A property's name, as a JSON string unless all of its characters are usual ones."""
    plain = key and f"_{key.translate(_PLAIN)}".isidentifier()
    return key if plain else json.dumps(key, ensure_ascii=not key.isprintable())


def text_lines(text: Any) -> list[str]:
    """Lines without their ends, LF or CRLF; no other separator counts."""
    lines = text.replace("\r\n", "\n").split("\n") if isinstance(text, str) else []
    return lines[:-1] if lines and not lines[-1] else lines


def trailing_comments(schema: Any, described: bool = False, bare_enum: bool = True) -> list[str]:
    """The description (unless it was `described` already), the default and the constraints of a schema.

    The default of a string enum stands without quotes if `bare_enum`.
    """
    if not isinstance(schema, dict):
        return []
    description = schema.get("description")
    comments = (
        [" ".join(filter(None, text_lines(description)))] if isinstance(description, str) and not described else []
    )
    if "default" in schema:
        default = schema["default"]
        bare = bare_enum and isinstance(default, str) and bool(_list(schema, "enum")) and _is_line(default)
        comments.append(f"default: {default if bare else compact_json(default)}")
    return comments + constraints(schema)


def constraints(schema: Any) -> list[str]:
    """Constraints of a schema, of its items and of its parts that no type can express, as `keyword: JSON`.

    The bounds of a number stand only where it has no default, as in oss-harmony.
    """
    if not isinstance(schema, dict):
        return []
    unsaid = _BOUNDS if "default" in schema and schema.get("type") in ("number", "integer") else ()
    keywords = [keyword for keyword in _CONSTRAINTS if keyword in schema and keyword not in unsaid]
    said = [f"{keyword}: {compact_json(schema[keyword])}" for keyword in keywords]
    said += [f"items: {comment}" for comment in _inner_comments(schema.get("items"))]
    return said + [comment for part in _list(schema, "allOf") for comment in _inner_comments(part)]


def _inner_comments(schema: Any) -> list[str]:
    """The comments of a type within a type, the description of an object included."""
    return trailing_comments(schema, described=_keywords(schema).get("type") == "object")


def _is_line(text: str) -> bool:
    return text == "".join(text.splitlines())


def _trailing(comments: list[str]) -> str:
    return f" // {' '.join(comments)}" if comments else ""


def _comments(schema: dict[str, Any], *keywords: str) -> Iterator[str]:
    """The lines before a property that say these of its title, description and examples."""
    for keyword in keywords:
        if keyword == "examples" and (examples := _list(schema, keyword)):
            yield from ("// Examples:", *(f"// - {compact_json(example)}" for example in examples))
        elif keyword != "examples" and isinstance(schema.get(keyword), str):
            lines = text_lines(schema[keyword]) or [""]
            yield from (*(f"// {line}" for line in lines), *(["//"] if keyword == "title" else []))


def _keywords(schema: Any) -> dict[str, Any]:
    """Of a schema; none of what is not an object."""
    return schema if isinstance(schema, dict) else {}


def _list(schema: dict[str, Any], keyword: str) -> list[Any]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _listed_variants(schema: dict[str, Any]) -> list[Any]:
    """The variants of a property that is exactly one of them, one per line: oneOf, commented anyOf."""
    unions = [keyword for keyword in ("oneOf", "anyOf") if _list(schema, keyword)]
    if len(unions) != 1 or any(keyword in schema for keyword in (*_VALUE_KEYWORDS, "$ref", "allOf")):
        return []
    variants = _list(schema, unions[0])
    return variants if unions == ["oneOf"] or any(map(trailing_comments, variants)) else []


def _admits_null(schema: Any) -> bool:
    """Whether the written type lists null already."""
    schema = _keywords(schema)
    kind = schema.get("type")
    if kind == "null" or (isinstance(kind, list) and "null" in kind) or schema.get("const", 0) is None:
        return True
    if None in _list(schema, "enum") and kind != "string":
        return True
    variants = [*_list(schema, "anyOf"), *_list(schema, "oneOf")]
    return any(_admits_null(variant) or _keywords(variant).get("nullable") is True for variant in variants)


def _binds_loosely(items: Any) -> bool:
    """Whether the type of an array's items needs parentheses; string enums, type lists and oneOf go without."""
    items = _keywords(items)
    untyped_enum = bool(_list(items, "enum")) and items.get("type") != "string"
    return untyped_enum or items.get("nullable") is True or bool(_list(items, "anyOf") or _list(items, "allOf"))
