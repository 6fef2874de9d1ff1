"""What a turn's grammar accepts and what it refuses, in both vocabularies."""

import json
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from oscine.chat.grammar import (
    ChoiceFormat,
    JsonFormat,
    LarkFormat,
    RegexFormat,
    TextFormat,
    check_of,
    header_grammar,
    said,
    text_grammar,
    turn_grammar,
)
from oscine.chat.harmony import HarmonyRenderer
from oscine.chat.messages import FunctionTool, Message, ToolCall
from oscine.chat.tokenizer import SPECIAL_TOKENS, Tokenizer
from oscine.checkpoint.hub import NANO_FOLDER
from oscine.system.grammar_sandbox.check import GrammarCheck, Problem, first_problem

Accepts = Callable[[str | None, str], bool]

THOUGHT = '<|channel|>analysis<|message|>So, a <thought>\n\n{"like": this<|end|><|start|>assistant'
PREAMBLE = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "unit": {"enum": ["c", "f"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
WEATHER = FunctionTool("get_weather", "", CITY, strict=True)
LOOSE = FunctionTool("get", "", {"type": "object", "properties": {"x": {"type": "integer"}}})
ARGUMENTS = '{"city": "Rome", "unit": "c"}'
CALL_HEADERS = [
    f"{to}{middle}{form}<|message|>"
    for (to, middle), form in product(
        [(" to=functions.{}", "<|channel|>commentary"), ("", "<|channel|>commentary to=functions.{}")],
        [" <|constrain|>json", "<|constrain|>json", " json", ""],
    )
]


def problem_of(text: TextFormat) -> Problem | None:
    try:
        return first_problem([check_of(text)])
    except ValueError as error:
        return Problem(0, str(error))


@cache
def ll_tokenizer(path: Path, end: int) -> LLTokenizer:
    return LLTokenizer(str(path), eos_token=end)


@pytest.fixture(scope="module")
def nano() -> Tokenizer:
    return Tokenizer(NANO_FOLDER)


@pytest.fixture(params=["nano", "o200k"])
def accepts(request: pytest.FixtureRequest) -> Accepts:
    tokenizer: Tokenizer = request.getfixturevalue(request.param)
    matchers = ll_tokenizer(tokenizer.path, tokenizer.endoftext)

    def accepts(grammar: str | None, text: str) -> bool:
        """Whether a turn may be the text, special tokens by name."""
        assert grammar is not None
        matcher = LLMatcher(matchers, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.consume_tokens(encode(tokenizer, text)) and matcher.is_stopped()

    return accepts


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = []
    named = {name: getattr(tokenizer, attribute) for attribute, name in SPECIAL_TOKENS.items()}
    while text:
        found = [(text.find(name), name) for name in named if name in text]
        start, name = min(found, default=(len(text), ""))
        ids += [*tokenizer.encode(text[:start]), *([named[name]] if name else [])]
        text = text[start + len(name) :]
    return ids


def final(text: str) -> str:
    return f"{FINAL}{text}<|return|>"


def call(name: str, arguments: str, header: str = CALL_HEADERS[0], end: str = "<|call|>") -> str:
    return header.format(name) + arguments + end


SCHEMAS: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "object"}, [{}, {"a": [1, {"b": None}]}], [[], 1, "x"]),
    (CITY, [{"city": "Oslo", "unit": "f"}], [{"city": "Oslo", "unit": "k"}, {"city": "Oslo"}, {}]),
    (CITY, [], [{"city": "Oslo", "unit": "f", "more": 1}, {"unit": "f", "city": "Oslo"}]),
    ({"enum": ["a", 1, None]}, ["a", 1, None], ["b", 2, True]),
    ({"const": {"a": [1, 2]}}, [{"a": [1, 2]}], [{"a": [2, 1]}]),
    ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]}, [12, "abc"], ["abcd", 1.5]),
    ({"type": ["integer", "null"], "minimum": 3, "maximum": 11}, [3, 11, None], [2, 12, "3"]),
    ({"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 2}, [[1], [1, 2.5]], [[], [1, 2, 3]]),
    ({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["", "abd"]),
    ({"type": "object", "additionalProperties": {"type": "integer"}}, [{"x": 1, "y": 2}], [{"x": "1"}]),
    (
        {
            "$ref": "#/$defs/node",
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {
                        "value": {"type": "integer"},
                        "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                    },
                    "required": ["value", "next"],
                    "additionalProperties": False,
                }
            },
        },
        [{"value": 1, "next": {"value": 2, "next": None}}],
        [{"value": 1, "next": {"value": "2", "next": None}}, {"value": 1}],
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("schema", "valid", "invalid"), SCHEMAS, ids=[str(schema)[:50] for schema, _, _ in SCHEMAS])
def test_the_final_message_satisfies_the_schema(
    accepts: Accepts, schema: dict[str, Any], valid: list[Any], invalid: list[Any]
) -> None:
    grammar = turn_grammar(JsonFormat(schema))
    for indent in (None, 2):
        for value in valid:
            assert accepts(grammar, THOUGHT + final(json.dumps(value, indent=indent)))
        for value in invalid:
            assert not accepts(grammar, THOUGHT + final(json.dumps(value, indent=indent)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "2023-02-28", "2023-12-31", "2023-01-29", "2023-11-29"],
            ["2023-02-29", "1900-02-29", "2100-02-29", "2022-02-29", "2023-02-30", "2023-04-31"],
        ),
        ("time", ["23:59:59Z", "12:00:00.5+01:30"], ["12:00:60Z", "23:59:60+01:00", "24:00:00Z"]),
        (
            "date-time",
            ["2024-02-29T12:00:00Z", "2023-01-31T23:59:59.25-08:00"],
            ["2023-02-29T12:00:00Z", "2023-01-01T12:00:60Z"],
        ),
        (
            "hostname",
            ["a", "www.example.com", "a-b.c--d.e", "ab-c", "1.2", "x" * 63 + ".org", ".".join(["x" * 62] * 4)],
            ["", "-a", "a-.b", "ab-", "a..b", "a_b", "x" * 64, "xn--x", "a.bc--d", ".".join(["x" * 63] * 4)],
        ),
    ],
)
def test_formats_admit_nothing_impossible(accepts: Accepts, name: str, valid: list[str], invalid: list[str]) -> None:
    text: dict[str, Any] = {"type": "string", "format": name}
    schemas: list[dict[str, Any]] = [
        text,
        {"anyOf": [{"allOf": [text]}, {"type": "null"}]},
        {"$ref": "#/$defs/x", "$defs": {"x": text}},
    ]
    for schema in [*schemas, {**text, "pattern": "^[^ ]*$"}]:
        grammar = text_grammar(JsonFormat(schema))
        assert [value for value in valid if not accepts(grammar, f"{json.dumps(value)}<|return|>")] == []
        assert [value for value in invalid if accepts(grammar, f"{json.dumps(value)}<|return|>")] == []


@pytest.mark.long
def test_what_looks_like_a_format_is_none(accepts: Accepts) -> None:
    schema = {"properties": {"format": {"const": {"format": "date"}}}, "additionalProperties": False}
    grammar = text_grammar(JsonFormat({"type": "object", **schema, "required": ["format"]}))
    assert accepts(grammar, '{"format": {"format": "date"}}<|return|>')


def test_reasoning_is_free_and_may_be_left_out(accepts: Accepts) -> None:
    grammar = turn_grammar(JsonFormat(CITY))
    assert accepts(grammar, final(ARGUMENTS))
    assert accepts(grammar, f"<|channel|>final <|constrain|>json<|message|>{ARGUMENTS}<|return|>")
    assert not accepts(grammar, "<|channel|>analysis<|message|>{}<|return|>")
    assert not accepts(
        grammar, "<|channel|>analysis<|message|>a <|channel|> b<|end|><|start|>assistant" + final(ARGUMENTS)
    )
    assert not accepts(grammar, "<|channel|>commentary<|message|>Well<|end|><|start|>assistant" + final(ARGUMENTS))
    assert not accepts(grammar, f"{FINAL}{ARGUMENTS}<|end|>")
    assert not accepts(grammar, THOUGHT)
    assert not accepts(grammar, ARGUMENTS + "<|return|>")


def test_reasoning_is_not_repeated(accepts: Accepts) -> None:
    thoughts = THOUGHT + THOUGHT
    assert not accepts(turn_grammar(JsonFormat(CITY)), thoughts + final(ARGUMENTS))
    assert not accepts(turn_grammar(tools=[LOOSE], tool_choice="required"), thoughts + call("get", "{}"))
    assert not accepts(turn_grammar(tools=[WEATHER]), thoughts + call("get_weather", ARGUMENTS))
    assert not accepts(turn_grammar(tools=[WEATHER]), PREAMBLE + PREAMBLE + call("get_weather", ARGUMENTS))
    assert accepts(turn_grammar(tools=[WEATHER]), THOUGHT + PREAMBLE + THOUGHT + call("get_weather", ARGUMENTS))


def test_whitespace_is_bounded(accepts: Accepts) -> None:
    grammar = turn_grammar(JsonFormat({"type": "object"}))
    assert accepts(grammar, final("{" + "\n" + " " * 19 + "}"))
    assert not accepts(grammar, final("{" + " " * 21 + "}"))
    assert not accepts(grammar, final(" {}"))
    assert not accepts(grammar, final("{} "))


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "valid", "invalid"),
    [
        (RegexFormat(r"\d{3}-\d{2}"), ["123-45"], ["123-4", "x123-45", "123-45 "]),
        (RegexFormat(r"^a/b?$"), ["a/", "a/b"], ["a", "^a/b"]),
        (RegexFormat('é"|\n'), ['é"', "\n"], ["é"]),
        (ChoiceFormat(("yes", 'no "way"\\', "line\nline")), ["yes", 'no "way"\\', "line\nline"], ["no", "yesyes", ""]),
        (
            LarkFormat('start: pair ("," pair)*\npair: /[a-z]+/ "=" INT\nINT: /[0-9]+/'),
            ["a=1", "a=1,b=22"],
            ["a=", "a=1,"],
        ),
    ],
)
def test_other_forms(accepts: Accepts, form: Any, valid: list[str], invalid: list[str]) -> None:
    assert problem_of(form) is None
    for text in valid:
        assert accepts(turn_grammar(form), THOUGHT + final(text))
        assert accepts(text_grammar(form), f"{text}<|return|>")
        assert accepts(text_grammar(form), f"{text}<|endoftext|>")
    for text in invalid:
        assert not accepts(turn_grammar(form), THOUGHT + final(text))
        assert not accepts(text_grammar(form), f"{text}<|return|>")


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (ChoiceFormat(("a<|end|>b",)), "a<|end|>b"),
        (JsonFormat({"enum": ["<|end|>"]}), '"<|end|>"'),
        (RegexFormat(r"a\x3c\|end\|\x3eb"), "a<|end|>b"),
    ],
)
def test_a_name_of_a_special_token_is_text(nano: Tokenizer, form: Any, text: str) -> None:
    matcher = LLMatcher(ll_tokenizer(nano.path, nano.endoftext), text_grammar(form), log_level=0)
    for token in [*nano.encode(text), nano.return_]:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert mask >> token & 1
        assert not mask >> nano.end & 1
        assert matcher.consume_token(token)
    assert matcher.is_stopped()


@pytest.mark.long
def test_a_required_call_is_one_of_the_tools_and_satisfies_its_schema(accepts: Accepts) -> None:
    grammar = turn_grammar(tools=[WEATHER, LOOSE], tool_choice="required")
    for header in CALL_HEADERS:
        assert accepts(grammar, call("get_weather", ARGUMENTS, header))
        assert accepts(grammar, THOUGHT + call("get", '{"x": 1, "more": []}', header))
        assert not accepts(grammar, call("get_weather", '{"city": "Rome"}', header))
        assert not accepts(grammar, call("get", '{"x": "1"}', header))
        assert not accepts(grammar, call("get_wea", ARGUMENTS, header))
        assert not accepts(grammar, call("other", "{}", header))
        assert not accepts(grammar, call("get_weather", ARGUMENTS, header, "<|return|>"))
    assert not accepts(grammar, final("Rome is warm."))
    assert not accepts(grammar, call("get", "[]"))


def test_several_calls_only_where_they_may_be(accepts: Accepts) -> None:
    two = call("get_weather", ARGUMENTS, end="<|end|>") + "<|start|>assistant" + call("get", "{}")
    tools = [WEATHER, LOOSE]
    assert accepts(turn_grammar(tools=tools, tool_choice="required"), two)
    assert not accepts(turn_grammar(tools=tools, tool_choice="required", parallel=False), two)
    assert accepts(turn_grammar(tools=tools, parallel=False), call("get", "{}"))
    assert not accepts(turn_grammar(tools=[LOOSE], parallel=False), two)


def test_strict_tools_are_kept_strict_where_a_call_is_free(accepts: Accepts) -> None:
    for text in (None, JsonFormat(CITY)):
        grammar = turn_grammar(text, [WEATHER, LOOSE])
        assert accepts(grammar, THOUGHT + call("get_weather", ARGUMENTS))
        assert accepts(grammar, PREAMBLE + THOUGHT + call("get_weather", ARGUMENTS))
        assert accepts(grammar, call("get", "whatever"))
        assert not accepts(grammar, call("get_weather", "{}"))
        assert not accepts(grammar, call("nobody", "{}"))
        assert accepts(grammar, final(ARGUMENTS))
        assert accepts(grammar, final("Hello")) == (text is None)
        assert accepts(grammar, PREAMBLE + final(ARGUMENTS)) == (text is None)


def test_other_recipients_are_called_freely(accepts: Accepts) -> None:
    grammar = turn_grammar(tools=[WEATHER], tool_choice="required", other_recipients=("python", "browser.search"))
    assert accepts(grammar, "<|channel|>analysis to=python code<|message|>print(1)<|call|>")
    assert accepts(grammar, THOUGHT + "<|channel|>analysis to=python code<|message|>print(1)<|call|>")
    assert accepts(grammar, " to=browser.search<|channel|>commentary <|constrain|>json<|message|>{}<|call|>")
    assert accepts(grammar, call("get_weather", ARGUMENTS))
    assert not accepts(grammar, "<|channel|>analysis to=bash<|message|>ls<|call|>")


def test_what_the_renderer_writes_is_accepted(accepts: Accepts, nano: Tokenizer) -> None:
    message = Message(
        "assistant", "", "A thought.", (ToolCall("1", "get", "{}"), ToolCall("2", "get_weather", ARGUMENTS))
    )
    written = nano.decode(HarmonyRenderer(nano).render_completion(message))
    assert accepts(turn_grammar(tools=[WEATHER, LOOSE], tool_choice="required"), written)
    answer = nano.decode(HarmonyRenderer(nano).render_completion(Message("assistant", ARGUMENTS, "A thought.")))
    assert accepts(turn_grammar(JsonFormat(CITY)), answer)


@pytest.mark.parametrize("kind", ["object", ["object", "null"], "dict", None])
def test_arguments_are_an_object_whatever_type_the_schema_names(accepts: Accepts, kind: Any) -> None:
    grammar = turn_grammar(
        tools=[FunctionTool("f", "", {"type": kind, "properties": {"a": {}}})], tool_choice="required"
    )
    assert accepts(grammar, call("f", '{"a": 1}'))
    assert not accepts(grammar, call("f", "null"))


def test_a_tool_without_parameters_is_called_without_arguments(accepts: Accepts) -> None:
    grammar = turn_grammar(tools=[FunctionTool("now")], tool_choice="required")
    assert accepts(grammar, call("now", "{}"))
    assert not accepts(grammar, call("now", '{"zone": 1}'))


def test_nothing_to_enforce_is_no_grammar() -> None:
    assert turn_grammar() is None
    assert turn_grammar(tools=[LOOSE]) is None
    assert turn_grammar(tools=[WEATHER], tool_choice="none") is None
    assert turn_grammar(tool_choice="none", parallel=False) is None


@pytest.mark.long
@pytest.mark.parametrize("opening", ["<|end|><|start|>assistant", "<|start|>assistant", ""])
def test_headers_name_no_recipient_but_those_that_may_be_called(accepts: Accepts, opening: str) -> None:
    free, called = header_grammar(), header_grammar([LOOSE, WEATHER], ["python", "browser.search"])
    for header in ["analysis", "commentary", "final", "final <|constrain|>json", "final json"]:
        for grammar in (free, called):
            assert accepts(grammar, f"{opening}<|channel|>{header}<|message|>")
    names = ["functions.get", "functions.get_weather", "python", "browser.search"]
    others = ["functions.get_", "functions.", "functions.get_weathers", "get", "browser.open", "pythons", "assistant"]
    for name in names + others:
        for form in ("", " <|constrain|>json", "<|constrain|>json", " json", " code"):
            for channel in ("analysis", "commentary"):
                header = f"{opening}<|channel|>{channel} to={name}{form}<|message|>"
                assert accepts(called, header) == (name in names)
                assert not accepts(free, header)
            header = f"{opening} to={name}<|channel|>commentary{form}<|message|>"
            assert accepts(called, header) == (name in names and opening != "")
            assert not accepts(free, header)


@pytest.mark.parametrize(
    "header", ["<|message|>", "<|channel|>", "<|channel|>analysis", "<|channel|>thought<|message|>"]
)
def test_a_header_is_whole(accepts: Accepts, header: str) -> None:
    assert not accepts(header_grammar([LOOSE]), f"<|start|>assistant{header}")


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {}},
        {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}},
        {"oneOf": [{"minimum": 1}, {"maximum": 5}]},
        {"format": "odd"},
    ],
)
def test_what_no_grammar_keeps_is_refused_or_passed_over(schema: dict[str, Any]) -> None:
    assert problem_of(JsonFormat(schema))
    assert problem_of(JsonFormat(schema, lenient=True)) is None


@pytest.mark.parametrize(
    ("schema", "about"),
    [
        ({"$ref": "#"}, "refers to itself"),
        ({"allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "refers to itself"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "'oneOf' overlap"),
        ({"$ref": "https://example.com/schema"}, "another document"),
        ({"type": "string", "format": "date", "pattern": "^x$"}, "pattern, format and lengths exclude each other"),
        ({"enum": ["aa"], "type": "string", "pattern": "b"}, "pattern, format and lengths exclude each other"),
        (
            {
                "items": {"$ref": "#/$defs/x"},
                "minItems": 1,
                "$defs": {"x": {"type": "string", "format": "date", "pattern": "x"}},
            },
            "pattern, format and lengths exclude each other",
        ),
        ({"type": "object", "properties": {"a": {}}, "minProperties": 1}, "all listed properties are required"),
        ({"type": "integer", "minimum": 1e30}, "beyond what a grammar can count"),
        ({"patternProperties": {"(a|b)*c{50}(x|y)*": {}, "(a|b)*.{40}a": {}}}, "too complex to tell apart"),
    ],
)
def test_a_problem_is_a_sentence_about_the_schema(schema: dict[str, Any], about: str) -> None:
    problem = problem_of(JsonFormat(schema))
    assert problem is not None
    sentence = said(problem.message)
    assert about in sentence
    internals = ("<", "option", "NoExtensionBias", "retriever", "Regex", "Some(", "processing")
    assert not any(word in sentence for word in internals)


@pytest.mark.parametrize(
    "form",
    [
        JsonFormat({"type": "strong"}),
        JsonFormat({"$ref": "#/$defs/nobody"}),
        JsonFormat({"type": "integer", "minimum": 5, "maximum": 4}),
        JsonFormat({"pattern": "("}),
        RegexFormat("(?=a)"),
        RegexFormat(r"(a)\1"),
        RegexFormat("[b-a]"),
        LarkFormat("root: /a/"),
        LarkFormat("start: nobody"),
        LarkFormat("start: @text2"),
        LarkFormat('start: "<" <|end|>'),
        LarkFormat("start: <[5]> // <"),
    ],
)
def test_broken_forms_have_a_problem(form: Any) -> None:
    assert problem_of(form)


@pytest.mark.long
@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "object", "properties": {f"x{i}": {}}, "required": [f"x{i}"]} for i in range(2500)]},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(600)}},
        {
            "properties": {"a": {"type": "array", "items": {"enum": [{f"k{i}": i} for i in range(2500)]}}},
            "required": ["a"],
        },
    ],
)
def test_what_compiles_but_cannot_be_followed_has_a_problem(schema: dict[str, Any]) -> None:
    grammar = JsonFormat({"type": "object", **schema})
    assert first_problem([GrammarCheck(text_grammar(grammar))]) is None
    problem = problem_of(grammar)
    assert problem is not None
    assert "items" in problem.message


def test_a_schema_cannot_change_how_it_is_read() -> None:
    lenient = JsonFormat({"not": {}, "x-guidance": {"lenient": True}})
    assert problem_of(lenient)


def test_angle_brackets_in_texts_name_no_token() -> None:
    assert problem_of(LarkFormat('start: "<a>" /<b>\\/</ // <c>\n')) is None
    assert problem_of(ChoiceFormat(("<|end|>",))) is None
