"""Schemas that are reduced before they become a grammar. The oracle is jsonschema."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from llguidance import LLMatcher, LLTokenizer

from oscine.chat.grammar import JsonFormat
from oscine.chat.schemas.reduction import MAX_BYTES, _Reduction, reduced
from oscine.chat.schemas.rules import Reference, Schema

BYTES = LLTokenizer("byte")
NINETEENTH = "https://json-schema.org/draft/2019-09/schema"
FOURTH = "http://json-schema.org/draft-04/schema#"
SEVENTH = "http://json-schema.org/draft-07/schema#"

SCALARS: list[Any] = [None, True, 0, 1, 1.5, -3, "", "a", "ab", "abc", "A-1"]
ARRAYS: list[Any] = [[], [1], ["a"], [1, 1], [1, 2], ["a", 1], [1, "a", None], [[1], [1]]]
OBJECTS: list[Any] = [
    *({}, {"a": 1}, {"a": "x"}, {"b": 1}, {"a": 1, "b": 2}, {"a": 1, "b": "x"}, {"abc": 1}, {"A-1": 1}, {"a": None}),
    *({"a": 1, "kind": "cat"}, {"b": 1, "kind": "dog"}, {"kind": "cow"}, {"a": [1, 1]}, {"a": {"a": 1}}, {"": 1}),
]
INSTANCES = [*SCALARS, *ARRAYS, *OBJECTS]

NEGLIGIBLE: list[dict[str, Any]] = [  # keywords that admit everything
    {"uniqueItems": False},
    {"uniqueItems": True, "maxItems": 1},
    {"uniqueItems": True, "type": "string"},
    {"uniqueItems": True, "prefixItems": [{}], "items": False},
    {"propertyNames": {"type": "string"}},
    {"propertyNames": {"type": ["string", "null"]}},
    {"propertyNames": True},
    {"propertyNames": {"description": "any"}},
    {"propertyNames": {"pattern": "^x"}, "maxProperties": 0},
    {"unevaluatedProperties": True, "unevaluatedItems": {}},
    {"unevaluatedProperties": False, "additionalProperties": {"type": "integer"}},
    {"contains": {"const": 7}, "minContains": 0},
    {"contains": {}, "minContains": 0},
    {"minContains": 3, "maxContains": 1},
    {"contains": False, "minContains": 0},
    {"if": {"required": ["a"]}},
    {"if": {"required": ["a"]}, "then": {}, "else": True},
    {"then": False, "else": False},
    {"dependentRequired": {}, "dependentSchemas": {}, "dependencies": {}},
    {"dependentRequired": {"a": [], "b": ["b"]}, "dependentSchemas": {"a": {}}},
    {"dependentRequired": {"b": ["a"]}, "required": ["a"]},
    {"not": False},
    {"not": {"not": {}}},
    {"not": {"anyOf": []}},
    {"minProperties": 0, "minLength": 0, "minItems": 0},
    {"type": "integer", "multipleOf": 1},
    {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a"], "minProperties": 1},
    {"type": "object", "properties": {"a": {}, "b": {}}, "additionalProperties": False, "maxProperties": 2},
    {"allOf": [{}, True, {"title": "x"}]},
    {"allOf": []},
    {"title": "x", "examples": [1], "deprecated": True, "readOnly": True, "$comment": "", "x-order": 3},
    {"contentEncoding": "base64", "contentMediaType": "application/json", "contentSchema": {"uniqueItems": True}},
    {"$defs": {"unused": {"not": {"const": 1}}}, "definitions": {"bad": {"$ref": "#/nowhere"}}},
    {"$vocabulary": {}, "$anchor": "top", "$dynamicAnchor": "top", "nullable": True, "discriminator": {}},
    {"type": "integer", "format": "int64", "minLength": 3, "propertyNames": False, "dependentRequired": {"a": ["b"]}},
    {"propertyNames": {"$ref": "#/$defs/Key"}, "$defs": {"Key": {"type": "string"}}},
    {"$schema": SEVENTH, "unevaluatedProperties": False, "dependentRequired": {"a": ["b"]}},
    {"$schema": "http://json-schema.org/draft-04/schema#", "contains": False, "propertyNames": False, "if": True},
]
EQUIVALENT: list[dict[str, Any]] = [  # keywords that can be rewritten
    {"uniqueItems": True, "enum": [[1, 1], [1, 2], [1, 1.0], "a"]},
    {"uniqueItems": True, "const": [1, 2]},
    {"propertyNames": False},
    {"propertyNames": {"type": "integer"}},
    {"propertyNames": {"pattern": "^[a-c]+$"}, "additionalProperties": {"type": "integer"}},
    {"propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}},
    {"propertyNames": {"const": "a"}, "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    {"propertyNames": {"pattern": "^a"}, "properties": {"b": {}, "abc": {"const": 1}}},
    {"propertyNames": {"minLength": 1, "maxLength": 2}},
    {"propertyNames": {"minLength": 2}},
    {"propertyNames": {"$ref": "#/$defs/Key"}, "$defs": {"Key": {"$ref": "#/$defs/a"}, "a": {"enum": ["a", "b"]}}},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "unevaluatedProperties": False},
    {"properties": {"a": {"type": "integer"}}, "unevaluatedProperties": {"type": "string"}},
    {"prefixItems": [{"type": "integer"}], "unevaluatedItems": False},
    {"unevaluatedItems": {"type": "integer"}},
    {"unevaluatedProperties": False, "allOf": [{}], "properties": {"a": {}}},
    {"contains": {}},
    {"contains": True, "minContains": 2},
    {"contains": {}, "minContains": 0, "maxContains": 1},
    {"contains": {}, "minContains": 2, "maxContains": 2, "maxItems": 3},
    {"contains": False},
    {"type": ["array", "null"], "contains": False},
    {"if": True, "then": {"type": "string"}, "else": False},
    {"if": False, "then": False, "else": {"type": "string"}},
    {"if": {"not": {}}, "else": {"type": "integer"}},
    {"if": {"required": ["a"]}, "then": {"type": "object"}, "else": {"type": "object"}},
    {"type": "object", "required": ["a"], "dependentRequired": {"a": ["b"], "b": ["a"]}},
    {"type": "object", "required": ["a"], "dependentSchemas": {"a": {"properties": {"a": {"const": 1}}}}},
    {"dependentSchemas": {"a": False}},
    {"type": "object", "required": ["a"], "dependencies": {"a": {"required": ["b"]}}, "$schema": SEVENTH},
    {"type": "object", "properties": {"a": {"not": {}}}},
    {"properties": {"a": False, "b": True}, "additionalProperties": False},
    {"anyOf": [{"type": "string"}, {}]},
    {"anyOf": [False, {"type": "string"}, {"type": "null"}]},
    {"oneOf": [{"type": "string"}, False]},
    {"oneOf": [{"enum": [1, 2]}, {"enum": [1.5, "1"]}, {"type": "array"}]},
    {"oneOf": [{"type": "integer"}, {"type": "string"}, {"const": None}]},
    {"items": [{"type": "integer"}, {"type": "string"}], "additionalItems": False, "$schema": SEVENTH},
    {"items": [{"type": "integer"}], "$schema": SEVENTH},
    {"items": {"type": "integer"}, "additionalItems": False},
    {"items": [{"type": "integer"}], "unevaluatedItems": False, "$schema": NINETEENTH},
    {"items": [{}], "additionalItems": {"type": "integer"}, "unevaluatedItems": False, "$schema": NINETEENTH},
    {"prefixItems": [False]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}, "maxLength": 2},
    {"$ref": "#/definitions/a", "definitions": {"a": {"type": "string"}}, "maxLength": 2, "$schema": SEVENTH},
]
REFERRING: list[dict[str, Any]] = [
    {"if": {"type": "string"}, "$ref": "#/if"},
    {
        "properties": {
            "a": {"propertyNames": {"type": "string"}, "$ref": "#/properties/b/if"},
            "b": {"if": {"type": "null"}},
        }
    },
    {"allOf": [{}, {"type": "string"}, {"$ref": "#/allOf/1"}]},
    {"$ref": "#/$defs/x%20y~1z", "$defs": {"x y/z": {"$anchor": "here", "maxLength": 1}}},
    {"$ref": "#here", "$defs": {"x": {"$anchor": "here", "maxLength": 1}}},
    {"$ref": "#here", "definitions": {"x": {"id": "#here", "maxLength": 1}}, "$schema": FOURTH},
    {"$id": "User", "$ref": "#/$defs/x", "$defs": {"x": {"id": "Name", "maxLength": 1}}},
    {"$id": "https://example.com/a", "$ref": "b", "$defs": {"b": {"$id": "b", "$ref": "#/x", "x": {"type": "string"}}}},
    {"$id": "urn:example:a", "$ref": "#/$defs/b", "$defs": {"b": {"type": "string"}}},
]


CAT = {"type": "object", "properties": {"kind": {"const": "cat"}, "a": {"type": "integer"}}, "required": ["kind"]}
DOG = {"type": "object", "properties": {"kind": {"enum": ["dog", "hound"]}, "b": {}}, "required": ["kind"]}
BY_REFERENCE = [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]
PETS: list[Any] = [
    *({"kind": "cat"}, {"kind": "cat", "a": 1}, {"kind": "cat", "a": "1"}, {"kind": "hound"}, {"kind": "cow"}),
    *({}, [], None, [{"kind": "cat"}, {"kind": "dog"}], [{"kind": "cow"}], {"a": 1}, {"b": 1}),
]


def grammar_of(schema: dict[str, Any], **leniency: bool) -> LLMatcher:
    parts = [{"lark_grammar": "start: @text"}, {"name": "text", **JsonFormat(schema, **leniency).part()}]
    matcher = LLMatcher(BYTES, json.dumps({"grammars": parts}), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def admitted(schema: dict[str, Any], instances: list[Any], **leniency: bool) -> list[Any]:
    """Those of the instances that the grammar of the schema accepts."""
    grammar = grammar_of(schema, **leniency)

    def accepts(instance: Any) -> bool:
        matcher = grammar.deep_copy()
        return matcher.consume_tokens([*json.dumps(instance).encode()]) and matcher.is_accepting()

    return [instance for instance in instances if accepts(instance)]


def valid(schema: dict[str, Any], instances: list[Any]) -> list[Any]:
    validator = validator_for(schema, default=Draft202012Validator)(schema)
    return [instance for instance in instances if validator.is_valid(instance)]


@pytest.mark.long
@pytest.mark.parametrize("schemas", [NEGLIGIBLE, EQUIVALENT, REFERRING], ids=["negligible", "equivalent", "referring"])
def test_a_reduced_schema_admits_what_the_oracle_does(schemas: list[dict[str, Any]]) -> None:
    differ = [schema for schema in schemas if admitted(schema, INSTANCES) != valid(schema, INSTANCES)]
    assert differ == []


def places(schema: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Schemas with this one in each place where a schema can stand, and the path of the place."""
    yield schema, ""
    for keyword in ("items", "additionalProperties"):
        yield {keyword: schema}, f"{keyword}."
    for keyword in ("unevaluatedItems", "unevaluatedProperties"):
        yield {keyword: schema}, f"{keyword}."
    for keyword in ("allOf", "anyOf", "oneOf", "prefixItems"):
        yield {keyword: [{"type": "null"}, schema]}, f"{keyword}.1."
    for keyword in ("properties", "patternProperties"):
        yield {keyword: {"x": schema}}, f"{keyword}.x."
    yield {"items": [schema], "$schema": SEVENTH}, "items.0."
    yield {"items": [True], "additionalItems": schema, "$schema": SEVENTH}, "additionalItems."
    yield {"if": True, "then": schema}, "then."
    yield {"if": False, "else": schema}, "else."
    yield {"type": "object", "required": ["a"], "dependentSchemas": {"a": schema}}, "dependentSchemas.a."
    yield {"$ref": "#/$defs/x", "$defs": {"x": schema}}, "$defs.x."
    yield {"$ref": "#/definitions/x", "definitions": {"x": schema}, "$schema": SEVENTH}, "definitions.x."
    yield {"properties": {"x": {"items": {"anyOf": [{"type": "null"}, schema]}}}}, "properties.x.items.anyOf.1."


UNSUPPORTED: dict[str, dict[str, Any]] = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "propertyNames": {"propertyNames": {"pattern": "^a", "maxLength": 3}},
    "contains": {"contains": {"type": "string"}},
    "if": {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "not": {"not": {"const": 1}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "unevaluatedProperties": {
        "anyOf": [{"properties": {"a": {}}}, {"required": ["b"]}],
        "unevaluatedProperties": False,
    },
    "unevaluatedItems": {"anyOf": [{"prefixItems": [{}]}, {"maxItems": 1}], "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#x"},
    "$recursiveRef": {"$recursiveRef": "#"},
}


@pytest.mark.parametrize(("keyword", "schema"), UNSUPPORTED.items())
def test_what_no_grammar_can_express_is_refused_with_its_path(keyword: str, schema: dict[str, Any]) -> None:
    for whole, path in places(schema):
        if "$schema" in whole and keyword not in (
            "uniqueItems",
            "propertyNames",
            "contains",
            "if",
            "not",
            "dependencies",
        ):
            continue  # which the seventh draft does not know
        with pytest.raises(ValueError, match=f"^no grammar can express {re.escape(path + keyword)}$"):
            reduced(whole)
        reduced(whole, lenient=True)


def test_a_refusal_in_a_part_without_effect_is_none() -> None:
    unsupported = {"not": {"const": 1}}
    for whole in ({"if": unsupported}, {"contains": unsupported, "minContains": 0}, {"$defs": {"a": unsupported}}):
        assert reduced(whole) == {}
    assert reduced({"anyOf": [unsupported, True]}) == {}
    assert reduced({"type": "string", "items": unsupported}) == {"type": "string"}


@pytest.mark.parametrize("name", ["password", "uuid4", "path", "byte", "binary", "json-pointer", "file-path", "odd"])
def test_an_unknown_format_is_an_annotation_unless_all_is_to_be_enforced(name: str) -> None:
    for whole, path in places({"type": "string", "format": name}):
        reduced(whole, any_format=True)
        with pytest.raises(
            ValueError, match=f"^no grammar knows the format '{name}' of {re.escape(path[:-1] or 'the text')}$"
        ):
            reduced(whole)
    text = {"type": "string", "format": name, "minLength": 2}
    assert admitted(text, SCALARS, any_format=True) == ["ab", "abc", "A-1"]
    assert reduced({"type": "integer", "format": name}) == {"type": "integer"}


def test_the_format_of_a_name_is_an_annotation_unless_all_is_to_be_enforced() -> None:
    """pydantic writes it for a dictionary with keys of that type."""
    by_id = {"type": "object", "propertyNames": {"format": "uuid"}}
    assert admitted(by_id, [{}, {"a": 1}, []], any_format=True) == [{}, {"a": 1}]
    with pytest.raises(ValueError, match=r"^no grammar can express propertyNames$"):
        reduced(by_id)


def test_null_is_no_value_of_a_keyword() -> None:
    """Serializers write it for what is not set."""
    keywords = ("type", "enum", "$ref", "pattern", "format", "minLength", "minimum", "required", "properties", "items")
    assert reduced(dict.fromkeys((*keywords, "additionalProperties", "anyOf", "not"))) == {}
    assert admitted({"const": None}, SCALARS) == [None]


def test_a_type_of_another_language_admits_everything_unless_it_is_enforced() -> None:
    for name in ("any", "STRING", "dict", "float"):
        schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": name, "maxLength": 1}}}
        values = [{"a": 1}, {"a": "x"}, {"a": "xy"}, {"a": None}, 1]
        assert admitted(schema, values, lenient=True) == [{"a": 1}, {"a": "x"}, {"a": None}]
        assert reduced(schema) == {"type": "object", "properties": {"a": {"type": name}}}  # which llguidance refuses


def test_look_around_is_refused_unless_it_can_be_left_out() -> None:
    text = {"type": "string", "pattern": "^(?!x)[a-c]+$", "minLength": 2}
    assert admitted(text, SCALARS, lenient=True) == ["ab", "abc", "A-1"]
    assert reduced(text) == text  # llguidance says what it does not support


def test_an_email_address_of_zod_needs_no_look_around() -> None:
    pattern = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    locals_ = ("a", "a.b", ".a", "a.", "a..b", "o'b", "a'", "-", "a.-", "'.a", "a+b_c", "")
    texts = [f"{local}@{domain}" for local in locals_ for domain in ("a.bc", "a-1.b.cd", "-a.bc", "a..bc", "a.b")]
    schema = {"type": "string", "format": "email", "pattern": pattern}
    assert admitted(schema, texts) == [text for text in texts if re.search(pattern, text)]


def test_known_formats_stay() -> None:
    assert admitted({"format": "date"}, ["2024-02-29", "2023-02-29", "x", 1], any_format=True) == ["2024-02-29", 1]


@pytest.mark.parametrize(
    "union",
    [
        {"oneOf": BY_REFERENCE},
        {"oneOf": [CAT, DOG]},
        {"oneOf": [{"$ref": "#/$defs/Alias"}, {"$ref": "#/$defs/Dog"}]},
        {"oneOf": [*BY_REFERENCE, {"type": "null"}]},
        {"oneOf": BY_REFERENCE, "anyOf": [{"required": ["a"]}, {"required": ["kind"]}]},
        {"type": "array", "items": {"oneOf": BY_REFERENCE, "discriminator": {"propertyName": "kind"}}},
        {"anyOf": [{"oneOf": [CAT, DOG]}, {"type": "array", "items": {"oneOf": BY_REFERENCE}}]},
    ],
)
def test_variants_that_a_tag_tells_apart_are_one_of_them(union: dict[str, Any]) -> None:
    schema = {**union, "$defs": {"Cat": CAT, "Dog": DOG, "Alias": BY_REFERENCE[0]}}
    assert admitted(schema, PETS) == valid(schema, PETS)


def test_a_discriminator_is_required() -> None:
    """pydantic lists no property that has a default as required."""
    pets: dict[str, Any] = {
        name: {key: value for key, value in pet.items() if key != "required"}
        for name, pet in (("Cat", CAT), ("Dog", DOG))
    }
    schema = {"oneOf": BY_REFERENCE, "discriminator": {"propertyName": "kind"}, "$defs": pets}
    assert admitted(schema, PETS) == [{"kind": "cat"}, {"kind": "cat", "a": 1}, {"kind": "hound"}]
    inner = {"a": {"$ref": "#"}, "kind": {"const": "cat"}}
    recursive: dict[str, Any] = {**schema, "$defs": {**pets, "Cat": {"type": "object", "properties": inner}}}
    assert admitted(recursive, [{"a": {"kind": "dog"}, "kind": "cat"}, {"a": {"a": 1}, "kind": "cat"}]) == [
        {"a": {"kind": "dog"}, "kind": "cat"}
    ]


@pytest.mark.parametrize(
    "variants",
    [
        [CAT, CAT],
        [BY_REFERENCE[0], BY_REFERENCE[0]],
        [{"type": "integer"}, {"type": "number"}],
        [{"enum": [1]}, {"enum": [1.0]}],
        [{"type": "integer"}, {"const": 1}],
        [{"type": "object"}, {"type": ["object", "null"]}],
        [{"type": "string"}, {"maxLength": 1}],
    ],
)
def test_variants_that_overlap_stay_one_of_them(variants: list[Any]) -> None:
    assert "oneOf" in reduced({"oneOf": variants, "$defs": {"Cat": CAT, "Dog": DOG}})


KEYWORDS = ["type", "properties", "items", "enum", "anyOf", "oneOf", "allOf", "required", "$ref", "$id", "$defs", "not"]
KEYWORDS += ["if", "then", "contains", "propertyNames", "uniqueItems", "dependencies", "dependentRequired", "format"]
values: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from([None, True, False, 0, 2.0, "string", "#", "#/$defs/a", "http://[", ["a"], ["string"], [[]]]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYWORDS, "a"]), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.long
@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(KEYWORDS), values, max_size=4))
def test_no_schema_does_worse_than_a_clear_error(schema: dict[str, Any]) -> None:
    said = ""
    try:
        assert {*reduced(schema)}.isdisjoint(UNSUPPORTED)
    except ValueError as error:
        said = str(error)
    assert "\n" not in said


def test_names_of_properties_are_no_keywords() -> None:
    names = ["const", "enum", "oneOf", "$ref", "$id", "not", "if", "uniqueItems", "format", "discriminator"]
    schema = {"type": "object", "properties": {name: {"type": "integer", "title": ""} for name in names}}
    assert reduced(schema) == {"type": "object", "properties": {name: {"type": "integer"} for name in names}}
    data = {"oneOf": [{"$ref": "#/x"}, {"not": 1}], "uniqueItems": True, "format": "odd", "title": "t"}
    assert reduced({"const": data}) == {"const": data}
    assert reduced({"enum": [data]}) == {"enum": [data]}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a": 5}}, "properties.a is no schema: neither an object nor a boolean"),
        ({"items": [{}, "x"]}, "items.1 is no schema: neither an object nor a boolean"),
        ({"anyOf": {}}, "anyOf is no list"),
        ({"properties": []}, "properties is no object"),
        ({"$ref": 5}, "$ref is no text"),
        ({"$ref": "#/a"}, "the '$ref' '#/a' leads nowhere"),
        ({"$ref": "#a"}, "the '$ref' '#a' leads nowhere"),
        ({"not": {}}, "it admits nothing"),
        ({"allOf": [True, False]}, "it admits nothing"),
        ({"oneOf": [True, True]}, "it admits nothing"),
    ],
)
def test_what_is_wrong_is_said(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        reduced(schema)


@pytest.mark.long
def test_the_work_of_a_schema_is_bounded() -> None:
    """References could multiply it: each of these unions compares many long texts."""
    tags = {
        "type": "object",
        "properties": {"k": {"enum": [f"{i}{'x' * 5_000}" for i in range(40)]}},
        "required": ["k"],
    }
    unions = [
        {"oneOf": [{"$ref": "#/$defs/x"}, {"type": "object", "properties": {"k": {"const": -1}}, "required": ["k"]}]}
    ]
    with pytest.raises(ValueError, match=f"more than {MAX_BYTES} bytes"):
        reduced({"anyOf": unions * 90, "$defs": {"x": tags}})
    names = {"$ref": "#/$defs/x"}
    with pytest.raises(ValueError, match=f"more than {MAX_BYTES} bytes"):
        reduced({"anyOf": [{"propertyNames": names}] * 3000, "$defs": {"x": {"enum": [*map(str, range(100))]}}})


def test_a_chain_of_references_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[Reference] = []
    target = _Reduction._target

    def counted(self: _Reduction, reference: Reference) -> Schema:
        followed.append(reference)
        return target(self, reference)

    monkeypatch.setattr(_Reduction, "_target", counted)
    chain = {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(100)} | {"100": {"type": "string"}}
    assert reduced({"anyOf": [{"propertyNames": {"$ref": "#/$defs/0"}}] * 100, "$defs": chain}) == {}
    assert len(followed) == 101
