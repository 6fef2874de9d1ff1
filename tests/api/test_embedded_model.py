"""The embedded model in a real server, through the real OpenAI client."""

import asyncio
import json
import math
import re
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from tests.server import ServerProcess

MODEL = "oscine-nano"
README = Path(__file__).parents[2] / "README.md"
SUM = "What is 27 + 58?"
GREEDY: Any = {"temperature": 0, "max_tokens": 300}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Gets the current weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city"}},
            "required": ["city"],
        },
    },
}


@pytest.fixture(scope="module")
def client(nano_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{nano_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_example_of_the_readme(nano_server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
    exec(example.replace("http://127.0.0.1:8000", nano_server.url), {})
    assert capsys.readouterr().out.strip()  # a sample, whose words are random


def user(text: str) -> list[ChatCompletionMessageParam]:
    return [{"role": "user", "content": text}]


def ask(client: openai.OpenAI, question: str, **parameters: Any) -> ChatCompletion:
    answer = client.chat.completions.create(
        **{"model": MODEL, "messages": user(question), **GREEDY, **parameters}  # type: ignore[arg-type]
    )
    assert isinstance(answer, ChatCompletion)
    return answer


def reasoning(answer: ChatCompletion) -> str:
    return str((answer.choices[0].message.model_extra or {})["reasoning"])


def test_reasons_and_answers(client: openai.OpenAI) -> None:
    answer = ask(client, SUM)
    (choice,) = answer.choices
    assert "85" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert 0 < (answer.usage.completion_tokens_details.reasoning_tokens or 0) < answer.usage.completion_tokens
    efforts = [len(reasoning(ask(client, SUM, reasoning_effort=effort))) for effort in ("low", "medium", "high")]
    assert efforts == sorted(set(efforts))


@pytest.mark.parametrize("parameters", [{}, {"temperature": 1.0, "seed": 7, "top_p": 0.95}], ids=["greedy", "sampled"])
def test_streamed_is_whole(client: openai.OpenAI, parameters: dict[str, Any]) -> None:
    whole = ask(client, SUM, **parameters).choices[0].message
    parameters = {**GREEDY, **parameters}
    deltas = [
        chunk.choices[0].delta
        for chunk in client.chat.completions.create(model=MODEL, messages=user(SUM), stream=True, **parameters)
    ]
    assert "".join(delta.content or "" for delta in deltas) == whole.content
    assert (
        "".join((delta.model_extra or {}).get("reasoning") or "" for delta in deltas) == whole.model_extra["reasoning"]
    )  # type: ignore[index]


def test_choices_are_reproducible_one_by_one(client: openai.OpenAI) -> None:
    sampled: dict[str, Any] = {"temperature": 1.5, "max_tokens": 24}
    together = client.completions.create(model=MODEL, prompt="What is", n=3, seed=5, **sampled)
    alone = [client.completions.create(model=MODEL, prompt="What is", seed=5 + i, **sampled) for i in range(3)]
    texts = [choice.text for choice in together.choices]
    assert texts == [answer.choices[0].text for answer in alone]
    assert len(set(texts)) == 3


def test_logprobs_are_those_of_the_answer(client: openai.OpenAI) -> None:
    (choice,) = ask(client, SUM, logprobs=True, top_logprobs=4).choices
    assert choice.logprobs is not None
    tokens = choice.logprobs.content
    assert tokens
    assert bytes(byte for token in tokens for byte in token.bytes or ()).decode() == choice.message.content
    for token in tokens:
        tops = [other.logprob for other in token.top_logprobs]
        assert len(tops) == 4
        assert tops == sorted(tops, reverse=True)
        assert token.logprob == tops[0]  # greedy
        assert sum(map(math.exp, tops)) <= 1 + 1e-5


def test_scoring_a_text_agrees_with_generating_it(client: openai.OpenAI) -> None:
    made = client.completions.create(model=MODEL, prompt="What is", max_tokens=12, temperature=0, logprobs=0)
    assert made.choices[0].logprobs is not None
    generated = made.choices[0].logprobs
    assert generated.tokens is not None
    assert generated.token_logprobs is not None
    tokens = [
        *takewhile(lambda token: not token.startswith("<|"), generated.tokens)
    ]  # typed in, a marker is plain text
    assert len(tokens) >= 4
    text = "What is" + "".join(tokens)
    scored = client.completions.create(model=MODEL, prompt=text, max_tokens=0, echo=True, logprobs=0).choices[0]
    assert scored.text == text
    assert scored.logprobs is not None
    assert scored.logprobs.tokens is not None
    count = len(tokens)
    assert scored.logprobs.tokens[-count:] == tokens
    assert scored.logprobs.token_logprobs is not None
    assert scored.logprobs.token_logprobs[-count:] == pytest.approx(generated.token_logprobs[:count], abs=1e-3)


def test_logit_bias_decides(client: openai.OpenAI, nano_server: ServerProcess) -> None:
    (token,) = nano_server.post("/tokenize", {"prompt": "7"})["tokens"]
    answer = client.completions.create(
        model=MODEL, prompt="What", max_tokens=5, temperature=0, logit_bias={str(token): 100}
    )
    assert answer.choices[0].text == "77777"


def test_a_tool_is_called_and_its_result_used(client: openai.OpenAI) -> None:
    question = user("What is the weather in Lisbon?")
    called = client.chat.completions.create(model=MODEL, messages=question, tools=[WEATHER], **GREEDY).choices[0]
    assert called.finish_reason == "tool_calls"
    assert called.message.tool_calls is not None
    (call,) = called.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Lisbon"})
    stream = client.chat.completions.create(model=MODEL, messages=question, tools=[WEATHER], **GREEDY, stream=True)
    parts = [part for chunk in stream for part in chunk.choices[0].delta.tool_calls or ()]
    assert [part.function.name for part in parts if part.function and part.function.name] == ["get_weather"]
    assert "".join(p.function.arguments or "" for p in parts if p.function) == call.function.arguments
    result: ChatCompletionMessageParam = {
        "role": "tool",
        "tool_call_id": call.id,
        "content": '{"temperature": 17, "sky": "sunny"}',
    }
    turns: list[Any] = [*question, called.message.model_dump(exclude_none=True), result]
    final = client.chat.completions.create(model=MODEL, messages=turns, tools=[WEATHER], **GREEDY).choices[0]
    assert final.finish_reason == "stop"
    assert "17" in (final.message.content or "")


def test_json_for_a_schema_that_is_shown(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
    }
    shown = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}, "enforce": False}
    answer = ask(client, "Anna is 31 years old.", response_format=shown)
    assert json.loads(answer.choices[0].message.content or "") == {"name": "Anna", "age": 31}


def test_a_stop_string_is_never_shown(client: openai.OpenAI) -> None:
    whole = ask(client, SUM, reasoning_effort="low").choices[0].message.content or ""
    (choice,) = ask(client, SUM, reasoning_effort="low", stop=["85"]).choices
    assert choice.message.content == whole.partition("85")[0]
    assert choice.finish_reason == "stop"


def test_company_changes_nothing(nano_server: ServerProcess, client: openai.OpenAI) -> None:
    parameters: dict[str, Any] = {"model": MODEL, **GREEDY, "reasoning_effort": "low"}
    questions = [user(f"What is {a} + {3 * a}?") for a in range(1, 7)]
    alone = [client.chat.completions.create(messages=question, **parameters) for question in questions]

    async def ask_all() -> list[ChatCompletion]:
        async with openai.AsyncOpenAI(base_url=f"{nano_server.url}/v1", api_key="none", max_retries=0) as client:
            asked = [client.chat.completions.create(messages=question, **parameters) for question in questions]
            return list(await asyncio.gather(*asked))

    together = asyncio.run(ask_all())
    assert [a.choices[0].message for a in together] == [a.choices[0].message for a in alone]
    nano_server.wait_idle()
