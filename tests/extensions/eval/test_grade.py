"""Tables of answers and their grades."""

from typing import Any

import pytest

from oscine.extensions.eval.grade import Answer, Call, Expected, ExpectedError, answer_of

CHOICES = [
    ("B", True),
    ("(B)", True),
    ("B.", True),
    ("**B**", True),
    ("B) Paris", True),
    ("b", None),
    ("Answer: B", True),
    ("answer : b", True),
    ("**Answer:** B", True),
    ("**Answer: B**", True),
    ("Answer:\n\nB", True),
    ("Answer: (B) Paris", True),
    ("Answer: $\\boxed{\\text{B}}$", True),
    ("Answer: B because A is wrong", True),
    ("First I thought Answer: A, but no.\nAnswer: B", True),
    ("The answer is B.", True),
    ("So the answer is (B), not C.", True),
    ("It is $\\boxed{B}$, unlike A.", True),
    ("Answer: C", False),
    ("A is wrong, so it is\n\nC", False),
    ("Answer: Berlin", None),
    ("Answer: E", None),  # there are four choices
    ("B is a letter of the alphabet.", None),
    ("I cannot say.", None),
    ("", None),
]
NUMBERS = [
    ("42", 42, True),
    ("The sum is 42.", 42, True),
    ("27 + 15 = 42", 42, True),
    ("Answer: 42 (not 43)", 42, True),
    ("**Answer:** $x = 42$", 42, True),
    ("Answer:\n42", 42, True),
    ("\\boxed{42} as 6 * 7", 42, True),
    ("1,234,567", 1234567, True),
    ("$1{,}234$", 1234, True),
    ("-5", -5, True),
    ("\u22125 degrees", -5, True),
    ("from 3-5", 5, True),
    ("0.5", 0.5, True),
    (".5", 0.5, True),
    ("1/2", 0.5, True),
    ("$\\boxed{-\\frac{1}{2}}$", -0.5, True),
    ("6.02e23", 6.02e23, True),
    ("042", 42, True),
    ("42%", 42, True),
    ("41", 42, False),
    ("42.5", 42, False),
    ("x2", 2, None),
    ("1/0", 1, None),
    ("9" * 400, 9, None),
    ("forty-two", 42, None),
    ("", 0, None),
]


def grade(expected: dict[str, Any], content: str, *calls: Call, finish: str = "stop") -> bool | None:
    """None if nothing was found, which is never right."""
    found = Expected.read(expected).grade(Answer(content, calls, finish))
    assert not (found.is_right and found.found is None)
    return None if found.found is None else found.is_right


@pytest.mark.parametrize(("text", "right"), CHOICES)
def test_a_choice(text: str, right: bool | None) -> None:
    assert grade({"choice": "B"}, text) is right


@pytest.mark.parametrize(("text", "number", "right"), NUMBERS)
def test_a_number(text: str, number: float, right: bool | None) -> None:
    assert grade({"number": number}, text) is right


def test_a_tolerance_is_exact_and_includes_its_end() -> None:
    for text, right in {"0.3": True, "0.1": True, "0.30001": False, "0.2": True}.items():
        assert grade({"number": 0.2, "tolerance": 0.1}, text) is right, text


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"a": 1, "b": [true, null]}', True),
        ('{"b":[true,null],"a":1.0}', True),
        ('```json\n{"a": 1, "b": [true, null]}\n```', True),
        ('{"a": true, "b": [true, null]}', False),
        ('{"a": 1, "b": [null, true]}', False),
        ('{"a": 1}', False),
        ('{"a": 1, "b": [true, null]', None),
        ("[" * 100_000, None),
        ('It is {"a": 1, "b": [true, null]}', None),
    ],
)
def test_json(text: str, right: bool | None) -> None:
    assert grade({"json": {"a": 1, "b": [True, None]}}, text) is right


@pytest.mark.parametrize(
    ("text", "right"), [('{"age": 3}', True), ('{"age": "3"}', False), ('{"age": 3, "x": 1}', False), ("3 years", None)]
)
def test_a_schema(text: str, right: bool | None) -> None:
    schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "additionalProperties": False}
    assert grade({"schema": schema}, text) is right


@pytest.mark.parametrize(
    ("calls", "right"),
    [
        ([Call("add", '{"a": 1, "b": 2}')], True),
        ([Call("add", '{"b":2,"a":1}')], True),
        ([Call("sub", '{"a": 1, "b": 2}')], False),
        ([Call("add", '{"a": 1}')], False),
        ([Call("add", '{"a": 1, "b": ')], False),
        ([Call("add", '{"a": 1, "b": 2}')] * 2, False),
        ([], None),
    ],
)
def test_a_call(calls: list[Call], right: bool | None) -> None:
    assert grade({"call": {"name": "add", "arguments": {"a": 1, "b": 2}}}, "text beside it", *calls) is right


def test_a_text_and_an_end() -> None:
    call = Call("add", "{}")
    assert grade({"text": "Yes."}, " Yes.\n") is True
    assert grade({"text": "Yes."}, "yes.") is False
    assert grade({"text": "Yes."}, "Yes.", call) is False
    assert grade({"text": "Yes."}, "") is None
    assert grade({"ends": "text"}, "Anything") is True
    assert grade({"ends": "text"}, "Anything", finish="length") is False
    assert grade({"ends": "text"}, "", call) is False
    assert grade({"ends": "any"}, "", call) is True
    assert grade({"ends": "any"}, "") is None


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ("B", "answer"),
        ({}, "answer"),
        ({"choice": "A", "number": 1}, "answer"),
        ({"choice": "E"}, "answer.choice"),
        ({"choice": "b"}, "answer.choice"),
        ({"choice": "AB"}, "answer.choice"),
        ({"choice": "A", "choices": 1}, "answer.choices"),
        ({"choice": "A", "choices": True}, "answer.choices"),
        ({"choice": "A", "tolerance": 1}, "answer.tolerance"),
        ({"number": "1"}, "answer.number"),
        ({"number": True}, "answer.number"),
        ({"number": float("nan")}, "answer.number"),
        ({"number": 1, "tolerance": -1}, "answer.tolerance"),
        ({"schema": {"type": "integr"}}, "answer.schema"),
        ({"schema": []}, "answer.schema"),
        ({"call": {"name": "f"}}, "answer.call"),
        ({"call": {"name": 1, "arguments": {}}}, "answer.call.name"),
        ({"call": {"name": "f", "arguments": "{}"}}, "answer.call.arguments"),
        ({"text": 5}, "answer.text"),
        ({"ends": True}, "answer.ends"),
    ],
)
def test_what_cannot_be_an_answer(given: Any, field: str) -> None:
    with pytest.raises(ExpectedError) as raised:
        Expected.read(given)
    assert raised.value.field == field
    assert str(raised.value).startswith(f"{field}: ")


def test_the_answer_in_a_chat_completion() -> None:
    message = {"role": "assistant", "content": None, "reasoning": "hm"}
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    body = {
        "choices": [{"index": 0, "message": message | {"tool_calls": calls}, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 7},
    }
    assert answer_of(body) == (Answer("", (Call("f", "{}"),), "tool_calls"), 7)
    cut = {"choices": [{"message": {"content": "Once"}, "finish_reason": "length"}]}
    assert answer_of(cut) == (Answer("Once", (), "length"), None)
    assert answer_of(cut)[0].is_truncated
    for bad in ({}, [], None, {"choices": []}, {"choices": [{"message": None}]}, {"choices": ["text"]}):
        with pytest.raises(ValueError, match="not a chat completion"):
            answer_of(bad)
