"""Ollama's own client against the embedded model: answers, streams, thinking, tools, formats, models, errors."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest
from pydantic import BaseModel

from tests.server import ServerProcess

SUM, WEATHER = "What is 27 + 58?", "What is the weather in Lisbon?"
GREEDY = {"temperature": 0, "num_predict": 400}


class Person(BaseModel):
    name: str
    age: int


def get_weather(city: str) -> str:
    """Gets the current weather for a city.

    Args:
        city: The name of the city
    """
    return json.dumps({"temperature": 17, "sky": f"sunny in {city}"})


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture
def client(nano_server: ServerProcess) -> Iterator[ollama.Client]:
    with ollama.Client(nano_server.url) as client:
        yield client


def test_an_answer_with_its_thinking_and_its_durations(client: ollama.Client) -> None:
    answer = client.chat("oscine-nano", [user(SUM)], options=GREEDY)
    assert answer.message.content == "27 + 58 = 85."
    assert answer.message.thinking
    assert "85" in answer.message.thinking
    assert (answer.model, answer.done, answer.done_reason) == ("oscine-nano", True, "stop")
    assert answer.prompt_eval_count
    assert answer.eval_count
    assert answer.total_duration
    assert answer.eval_duration
    assert answer.prompt_eval_duration
    assert answer.load_duration == 0
    assert answer.prompt_eval_duration + answer.eval_duration <= answer.total_duration


def test_a_stream_adds_up_to_the_answer(client: ollama.Client) -> None:
    whole = client.chat("oscine-nano", [user(SUM)], options=GREEDY)
    *parts, last = client.chat("oscine-nano", [user(SUM)], options=GREEDY, stream=True)
    assert len(parts) > 5
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert "".join(part.message.thinking or "" for part in parts) == whole.message.thinking
    assert (last.done, last.done_reason, last.eval_count) == (True, "stop", whole.eval_count)
    assert last.prompt_eval_count == whole.prompt_eval_count
    assert not any(part.done for part in parts)


def test_the_asynchronous_client(nano_server: ServerProcess) -> None:
    async def ask() -> str:
        async with ollama.AsyncClient(nano_server.url) as client:
            stream = await client.chat("oscine-nano", [user(SUM)], options=GREEDY, stream=True)
            return "".join([part.message.content or "" async for part in stream])

    assert asyncio.run(ask()) == "27 + 58 = 85."


def test_thinking_that_is_switched_off_is_left_out(client: ollama.Client) -> None:
    answer = client.chat("oscine-nano", [user(SUM)], options=GREEDY, think=False)
    assert answer.message.thinking is None
    assert "85" in (answer.message.content or "")
    for effort in ("low", "medium", "high", True):
        client.chat("oscine-nano", [user(SUM)], options={"num_predict": 1}, think=effort)  # type: ignore[arg-type]


@pytest.mark.parametrize("stream", [False, True])
def test_a_function_is_called_and_its_result_sent(client: ollama.Client, stream: bool) -> None:
    said: list[Any] = [user(WEATHER)]
    asked: dict[str, Any] = {"model": "oscine-nano", "tools": [get_weather], "options": GREEDY}
    if stream:
        parts = [part.message for part in client.chat(messages=said, stream=True, **asked)]
        (calls,) = (part.tool_calls for part in parts if part.tool_calls)
        thinking = "".join(part.thinking or "" for part in parts)
        called = ollama.Message(role="assistant", thinking=thinking, tool_calls=calls)
    else:
        called = client.chat(messages=said, **asked).message
    assert called.tool_calls
    (call,) = called.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Lisbon"})
    result = {"role": "tool", "content": get_weather(**call.function.arguments), "tool_name": call.function.name}
    assert "17" in (client.chat(messages=[*said, called, result], **asked).message.content or "")


def test_a_schema_is_enforced(client: ollama.Client) -> None:
    asked: dict[str, Any] = {"format": Person.model_json_schema(), "options": GREEDY}
    said = client.chat("oscine-nano", [user("Anna is 31 years old.")], **asked).message.content
    assert Person.model_validate_json(said or "") == Person(name="Anna", age=31)
    said = client.generate("oscine-nano", "Anna is 31 years old.", **asked).response
    assert Person.model_validate_json(said or "") == Person(name="Anna", age=31)
    said = client.chat("oscine-nano", [user(SUM)], format="json", options=GREEDY).message.content
    assert isinstance(json.loads(said or ""), dict)


def test_generate_answers_a_prompt_like_a_chat_message(client: ollama.Client) -> None:
    system = {"role": "system", "content": "Be brief."}
    chat = client.chat("oscine-nano", [system, user(SUM)], options=GREEDY)
    whole = client.generate("oscine-nano", SUM, system="Be brief.", options=GREEDY)
    assert (whole.response, whole.thinking) == (chat.message.content, chat.message.thinking)
    *parts, last = client.generate("oscine-nano", SUM, system="Be brief.", options=GREEDY, stream=True)
    assert "".join(part.response or "" for part in parts) == whole.response
    assert "".join(part.thinking or "" for part in parts) == whole.thinking
    assert (last.done_reason, last.eval_count) == ("stop", chat.eval_count)


def completed(server: ServerProcess, path: str, **body: Any) -> Any:
    response = httpx.post(server.url + path, json={"model": "oscine-nano", **body}, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1, "seed": 5, "top_k": 40, "min_p": 0.01}])
def test_tokens_equal_those_of_chat_completions(
    nano_server: ServerProcess, client: ollama.Client, options: dict[str, Any]
) -> None:
    talk = [{"role": "system", "content": "Be brief."}, user(SUM)]
    theirs = completed(nano_server, "/v1/chat/completions", messages=talk, max_tokens=300, logprobs=True, **options)
    (choice,), usage = theirs["choices"], theirs["usage"]
    asked = {**options, "num_predict": 300}
    ours = client.chat("oscine-nano", talk, options=asked, logprobs=True, top_logprobs=2)
    assert ours.message.content == choice["message"]["content"]
    assert (ours.message.thinking or None) == choice["message"]["reasoning"]
    assert (ours.prompt_eval_count, ours.eval_count) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert ours.logprobs
    assert [token.token for token in ours.logprobs] == [token["token"] for token in choice["logprobs"]["content"]]
    assert all(len(token.top_logprobs or ()) == 2 for token in ours.logprobs)


def test_a_raw_prompt_is_continued(nano_server: ServerProcess, client: ollama.Client) -> None:
    theirs = completed(nano_server, "/v1/completions", prompt="What is", max_tokens=12, temperature=0, logprobs=0)
    options = {"temperature": 0, "num_predict": 12}
    ours = client.generate("oscine-nano", "What is", raw=True, options=options, logprobs=True)
    (choice,) = theirs["choices"]
    assert (ours.response, ours.done_reason, ours.eval_count) == (choice["text"], "length", 12)
    assert ours.logprobs
    assert [token.logprob for token in ours.logprobs] == choice["logprobs"]["token_logprobs"]
    *parts, _ = client.generate("oscine-nano", "What is", raw=True, options=options, logprobs=True, stream=True)
    assert "".join(part.response or "" for part in parts) == ours.response
    assert [token for part in parts for token in part.logprobs or ()] == [*ours.logprobs]


def test_a_limit_and_a_stop_string_end_an_answer(client: ollama.Client) -> None:
    cut = client.chat("oscine-nano", [user(SUM)], options={"temperature": 0, "num_predict": 5})
    assert (cut.done_reason, cut.eval_count) == ("length", 5)
    stopped = client.chat("oscine-nano", [user(SUM)], options={**GREEDY, "stop": ["= "]})
    assert (stopped.done_reason, stopped.message.content) == ("stop", "27 + 58 ")


def test_lists_and_descriptions_of_models(nano_server: ServerProcess, client: ollama.Client) -> None:
    (listed,), (loaded,) = client.list().models, client.ps().models
    assert listed.model == loaded.model == loaded.name == "oscine-nano:latest"
    assert listed.digest == loaded.digest
    assert listed.size == loaded.size
    assert listed.size
    assert listed.size > 10_000_000
    assert listed.details == loaded.details
    assert listed.details
    assert (listed.details.family, listed.details.quantization_level) == ("gptoss", "MXFP4")
    assert listed.details.parameter_size == "12.4M"
    card = httpx.get(f"{nano_server.url}/v1/models").json()["data"][0]
    assert loaded.context_length == card["max_model_len"]
    shown = client.show("oscine-nano")
    assert shown.modelinfo
    assert shown.modelinfo["gptoss.context_length"] == loaded.context_length
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.details == listed.details


def test_a_served_model_can_be_pulled_and_loaded(client: ollama.Client) -> None:
    assert client.pull("oscine-nano").status == "success"
    assert [part.status for part in client.pull("oscine-nano", stream=True)][-1] == "success"
    assert client.chat("oscine-nano").done_reason == "load"
    assert client.generate("oscine-nano").done_reason == "load"
    for never in (0, "0", "0s"):
        assert client.generate("oscine-nano", keep_alive=never).done_reason == "unload"
    assert client.chat("oscine-nano", keep_alive="5m").done_reason == "load"
    (still,) = client.ps().models
    assert still.model == "oscine-nano:latest"


def test_errors_have_ollamas_form(client: ollama.Client) -> None:
    for ask in (client.chat, client.pull, client.show):
        with pytest.raises(ollama.ResponseError, match=r"^model 'none' not found") as error:
            ask("none")
        assert error.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="not found"):
        list(client.chat("none", stream=True))
    for change in (lambda: client.delete("a"), lambda: client.copy("a", "b"), lambda: client.push("a")):
        with pytest.raises(ollama.ResponseError, match="only has the models") as error:
            change()
        assert error.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="embeddings"):
        client.embed("oscine-nano", "hi")
    with pytest.raises(ollama.ResponseError, match=r"messages\[0\].images"):
        client.chat("oscine-nano", [{"role": "user", "content": "What is it?", "images": [b"a picture"]}])
    with pytest.raises(ollama.ResponseError, match="repeat_penalty"):
        client.chat("oscine-nano", [user(SUM)], options={"repeat_penalty": -1})
