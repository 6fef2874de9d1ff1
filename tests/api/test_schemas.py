"""What requests of each API may ask of a schema, and how often a schema is compiled. No server is needed."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import get_ident
from typing import Any

import msgspec
import pytest

from oscine.api.common.errors import APIError
from oscine.api.common.work import INLINE_SIZE
from oscine.api.serving import formats
from oscine.api.serving.formats import Calls, Form, asked_form, constraint, text_constraint
from oscine.api.serving.schemas import ChatCompletionRequest
from oscine.chat.grammar import JsonFormat
from oscine.chat.messages import FunctionTool
from oscine.extensions.apis.anthropic.request import answer_form as messages_form
from oscine.extensions.apis.anthropic.request import chat_request
from oscine.extensions.apis.anthropic.schemas import MessagesRequest
from oscine.extensions.apis.compaction.seal import Seal
from oscine.extensions.apis.ollama.request import answer_form as ollama_form
from oscine.extensions.apis.ollama.schemas import OllamaChatRequest
from oscine.extensions.apis.responses.plan import _text_format
from oscine.extensions.apis.responses.schemas import ResponseRequest
from oscine.system.grammar_sandbox.check import GrammarCheck, Problem, first_problem

Asked = Callable[[dict[str, Any]], Form | None]

USER = [{"role": "user", "content": "x"}]
RESULTS = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
NEGLIGIBLE = {"type": "object", "properties": {"a": {"uniqueItems": False, "propertyNames": {"type": "string"}}}}


class Sandbox:
    """Decides at once and in this process, and notes what it was asked."""

    def __init__(self) -> None:
        self.checks: list[GrammarCheck] = []

    def check(self, checks: Sequence[GrammarCheck], owner: str | None = None) -> Future[Problem | None]:
        self.checks += checks
        result: Future[Problem | None] = Future()
        result.set_result(first_problem(checks))
        return result


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    made = Sandbox()
    monkeypatch.setattr(formats, "sandbox", lambda: made)
    monkeypatch.setattr(formats, "_results", {})
    return made


def chat(**fields: Any) -> Form | None:
    return asked_form(msgspec.convert({"messages": USER, **fields}, ChatCompletionRequest))


def by_response_format(schema: dict[str, Any], **more: Any) -> Form | None:
    wanted = {"name": "x", "schema": schema, **more}
    return chat(response_format={"type": "json_schema", "json_schema": wanted})


def by_responses(schema: dict[str, Any], **more: Any) -> Form | None:
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, **more}}
    return _text_format(msgspec.convert({"input": "x", "text": text}, ResponseRequest))[0][0]


def by_messages(schema: dict[str, Any]) -> Form | None:
    config = {"format": {"type": "json_schema", "schema": schema}}
    asked = {"model": "x", "messages": USER, "max_tokens": 9, "output_config": config}
    body = msgspec.convert(asked, MessagesRequest)
    return messages_form(body, chat_request(body, Seal(b"")))


def by_ollama(schema: dict[str, Any]) -> Form | None:
    return ollama_form(msgspec.convert({"model": "x", "messages": USER, "format": schema}, OllamaChatRequest))


FREE: dict[str, Asked] = {
    "response_format": by_response_format,
    "text.format": by_responses,
    "output_config": by_messages,
    "ollama": by_ollama,
    "guided_json": lambda schema: chat(guided_json=schema),
    "structured_outputs": lambda schema: chat(structured_outputs={"json": schema}),
    "sglang": lambda schema: chat(json_schema=schema),
}
STRICT: dict[str, Asked] = {
    "response_format": lambda schema: by_response_format(schema, strict=True),
    "text.format": lambda schema: by_responses(schema, strict=True),
}


def refusal(form: Form | None, calls: Calls = formats.NO_CALLS) -> str | None:
    """What the client is told; None if the form is enforced."""
    try:
        asyncio.run(constraint(form, calls))
    except APIError as error:
        return f"{error.status}: {error}"
    return None


@pytest.mark.parametrize("asked", FREE.values(), ids=FREE)
def test_every_api_judges_keywords_alike(sandbox: Sandbox, asked: Asked) -> None:
    assert refusal(asked(NEGLIGIBLE)) is None
    assert refusal(asked({"type": "string", "format": "password"})) is None
    assert "no grammar can express properties.a.uniqueItems" in str(refusal(asked(RESULTS)))


@pytest.mark.parametrize("asked", STRICT.values(), ids=STRICT)
def test_an_unknown_format_is_refused_where_strict_is_asked(sandbox: Sandbox, asked: Asked) -> None:
    told = refusal(asked({"properties": {"a": {"type": "string", "format": "uuid4"}}}))
    assert "cannot be enforced: no grammar knows the format 'uuid4' of properties.a" in str(told)
    assert refusal(asked(NEGLIGIBLE)) is None


def test_a_refusal_names_the_function(sandbox: Sandbox) -> None:
    def tools(schema: dict[str, Any], strict: bool) -> Calls:
        return Calls((FunctionTool("good", "", {}, strict=True), FunctionTool("bad", "", schema, strict=strict)))

    about = "400: Invalid value for 'tools': the schema of function 'bad' cannot be enforced: "
    told = refusal(None, tools(RESULTS, strict=True))
    assert told is not None
    assert about + "no grammar can express properties.a.uniqueItems" in told
    told = refusal(None, tools({"properties": {"a": {"format": "path"}}}, strict=True))
    assert told is not None
    assert about + "no grammar knows the format 'path' of properties.a" in told
    nested: dict[str, Any] = {}
    for _ in range(2_000):
        nested = {"items": nested}
    assert about + "it is nested too deeply" in str(refusal(None, tools(nested, strict=True)))
    assert refusal(None, tools(RESULTS, strict=False)) is None
    assert refusal(None, tools(NEGLIGIBLE, strict=True)) is None


def test_the_part_that_is_refused_is_sought_beside_the_event_loop(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: set[int] = set()

    def refuse(self: JsonFormat) -> dict[str, Any]:
        threads.add(get_ident())
        raise ValueError("never")

    monkeypatch.setattr(JsonFormat, "part", refuse)
    with pytest.raises(APIError, match=r"'format'.*never"):
        asyncio.run(text_constraint(Form(JsonFormat({}), "format"), size=INLINE_SIZE + 1))
    assert threads
    assert get_ident() not in threads


def test_a_text_that_cannot_be_is_said_in_words(sandbox: Sandbox) -> None:
    told = refusal(by_response_format({"type": "string", "format": "date", "pattern": "^x$"}))
    assert told is not None
    assert told.endswith("a text's pattern, format and lengths exclude each other, so no text satisfies them.")


def test_a_schema_is_compiled_once_alone_and_once_in_its_turn(sandbox: Sandbox) -> None:
    form = by_response_format(NEGLIGIBLE)
    assert form is not None
    assert refusal(form) is None
    assert [check.walk for check in sandbox.checks] == [True, False]
    assert refusal(form) is None
    assert len(sandbox.checks) == 2
    asyncio.run(text_constraint(form))
    assert [check.walk for check in sandbox.checks[2:]] == [True, False]
    assert refusal(None, Calls((FunctionTool("a", "", NEGLIGIBLE), FunctionTool("b", "", RESULTS)), "required")) is None
    assert [check.walk for check in sandbox.checks[4:]] == [True, True, False]
