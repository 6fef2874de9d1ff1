"""LangChain's ChatOpenAI over both of its APIs: answers, streams, bound tools, structured output."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel

if TYPE_CHECKING:  # takes a second, of each process that collects the tests
    from langchain_openai import ChatOpenAI

SUM = "What is 2 + 3?"
Chat = Callable[..., "ChatOpenAI"]


class Person(BaseModel):
    """A person."""

    name: str
    age: int


class get_weather(BaseModel):  # noqa: N801 - the name that the model calls
    """Gets the current weather for a city."""

    city: str


@pytest.fixture(params=["chat", "responses"])
def chat(request: pytest.FixtureRequest, base_url: str, monkeypatch: pytest.MonkeyPatch) -> Chat:
    from langchain_openai import ChatOpenAI

    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    usual: dict[str, Any] = {
        **{"model": "oscine-nano", "base_url": base_url, "api_key": "none", "max_retries": 0},
        **{"temperature": 0, "max_tokens": 400, "reasoning_effort": "low"},
        "use_responses_api": request.param == "responses",
    }
    return lambda **options: ChatOpenAI(**{**usual, **options})


def test_an_answer(chat: Chat) -> None:
    message = chat().invoke(SUM)
    assert "5" in message.text
    assert message.usage_metadata is not None
    assert message.usage_metadata["output_tokens"] > 0


def test_a_stream_adds_up_to_the_answer(chat: Chat) -> None:
    chunks = list(chat().stream(SUM))
    assert len(chunks) > 2
    assert "".join(chunk.text for chunk in chunks) == chat().invoke(SUM).text


def test_a_bound_tool_is_called_and_its_result_told(chat: Chat) -> None:
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage

    model = chat().bind_tools([get_weather])
    turns: list[Any] = [HumanMessage("What is the weather in Lisbon?")]
    called = model.invoke(turns)
    assert isinstance(called, AIMessage)
    (call,) = called.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Lisbon"})
    result = ToolMessage('{"temperature": 17, "sky": "sunny"}', tool_call_id=call["id"])
    assert "17" in model.invoke([*turns, called, result]).text


def test_a_call_in_a_stream(chat: Chat) -> None:
    from langchain_core.messages import AIMessageChunk

    whole = AIMessageChunk("")
    for chunk in chat().bind_tools([get_weather]).stream("What is the weather in Lisbon?"):
        assert isinstance(chunk, AIMessageChunk)
        whole = whole + chunk
    assert [(call["name"], call["args"]) for call in whole.tool_calls] == [("get_weather", {"city": "Lisbon"})]


@pytest.mark.parametrize("method", [None, "json_schema", "function_calling"])
def test_structured_output(chat: Chat, method: str | None) -> None:
    options: Any = {"method": method} if method else {}
    extract = chat().with_structured_output(Person, **options)
    assert extract.invoke("Anna is 31 years old.") == Person(name="Anna", age=31)


def test_every_effort_is_taken(chat: Chat) -> None:
    for effort in ("none", "minimal", "low", "medium", "high", "xhigh"):
        message = chat(reasoning_effort=effort, verbosity="low", max_tokens=1).invoke(SUM)
        assert message.usage_metadata is not None
        assert message.usage_metadata["output_tokens"] == 1


@pytest.mark.parametrize("chat", ["responses"], indirect=True)
def test_reasoning_is_shown_where_a_summary_is_asked_for(chat: Chat) -> None:
    summary = {"effort": "medium", "summary": "auto"}
    model = chat(reasoning=summary, reasoning_effort=None, output_version="responses/v1")
    blocks = model.invoke(SUM).content_blocks
    assert any("2 + 3" in block.get("reasoning", "") for block in blocks if block["type"] == "reasoning")
    assert "5" in "".join(block["text"] for block in blocks if block["type"] == "text")
