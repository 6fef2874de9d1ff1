"""Room reserved for the answer: if the budget runs out in reasoning, the final message is forced."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import openai
import pytest

from oscine.types import GenerationOutput, GenerationRequest, TokenLogprobs
from tests.api.scripted_engine import MAX_MODEL_LEN
from tests.api.scripted_server import ScriptedServer
from tests.api.test_chat_stream import deltas
from tests.server import ServerProcess

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
HEADER = "<|channel|>analysis<|message|>"


def thinks_for_ever(server: ScriptedServer, size: int, *start: str | int, answer: str = "It is 4.") -> None:
    """Answers when it is asked a second time: behind the forced header."""
    t = server.tokenizer

    def ids(*parts: str | int) -> list[int]:
        return [i for part in parts for i in ([part] if isinstance(part, int) else t.encode(part))]

    def script(request: GenerationRequest) -> Iterable[GenerationOutput]:
        forced = t.decode(request.prompt_token_ids).endswith("<|channel|>final<|message|>")
        said = ids(answer, t.return_) if forced else ids(*(start or (t.channel, "analysis", t.message)), "hm " * 800)
        limit = request.sampling.max_tokens
        cut = said[:limit]
        for i in range(0, len(cut), size):
            last = i + size >= len(cut)
            reason: Any = None if not last else "length" if len(said) > limit else "stop"
            yield GenerationOutput(request.request_id, cut[i : i + size], finish_reason=reason)

    server.engine.script = script


@pytest.mark.parametrize("size", [1, 4, 20, 1000])
def test_the_answer_is_forced(scripted: ScriptedServer, size: int) -> None:
    thinks_for_ever(scripted, size)
    answer = scripted.chat(max_tokens=100, final_headroom=40, temperature=0.5, seed=3)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "It is 4."
    reasoning = ("hm " * 800)[: 60 - len("analysis") - 2]  # a vocabulary of bytes
    assert choice["message"]["reasoning"] == reasoning
    assert choice["finish_reason"] == "stop"
    first, second = scripted.engine.requests
    assert scripted.tokenizer.decode(second.prompt_token_ids[len(first.prompt_token_ids) :]) == (
        f"{HEADER}{reasoning}<|end|><|start|>assistant<|channel|>final<|message|>"
    )
    assert (second.sampling.max_tokens, second.sampling.seed, second.sampling.temperature) == (40, 3, 0.5)
    assert answer["usage"]["completion_tokens"] == 60 + len("It is 4.") + 1
    assert answer["usage"]["prompt_tokens"] == len(first.prompt_token_ids)
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(reasoning)
    assert scripted.engine.cancelled == ([first.request_id] if size < 1000 else [])
    events = scripted.chat_events(max_tokens=100, final_headroom=40)
    assert "".join(d.get("reasoning", "") for d in deltas(events)) == reasoning
    assert "".join(d.get("content", "") for d in deltas(events)) == "It is 4."
    assert [c["finish_reason"] for e in events for c in e["choices"]][-1] == "stop"


def test_logprobs_are_those_of_the_answer(scripted: ScriptedServer) -> None:
    t = scripted.tokenizer
    thinks_for_ever(scripted, 7)
    plain = scripted.engine.script

    def script(request: GenerationRequest) -> Iterable[GenerationOutput]:
        for output in plain(request):
            assert isinstance(output, GenerationOutput)
            yield replace(output, logprobs=[TokenLogprobs(i, -0.01 * i, ()) for i in output.token_ids])

    scripted.engine.script = script
    (choice,) = scripted.chat(max_tokens=100, final_headroom=40, logprobs=True)["choices"]
    entries = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == "It is 4."
    assert [entry["logprob"] for entry in entries] == [-0.01 * i for i in t.encode("It is 4.")]


def test_an_answer_that_has_begun_goes_on(scripted: ScriptedServer) -> None:
    t = scripted.tokenizer
    thinks_for_ever(scripted, 3, t.channel, "final", t.message)
    (choice,) = scripted.chat(max_tokens=100, final_headroom=90)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ("hm " * 800)[: 100 - len("final") - 2]
    assert len(scripted.engine.requests) == 1


def test_a_call_that_has_begun_goes_on(scripted: ScriptedServer) -> None:
    t = scripted.tokenizer
    thinks_for_ever(scripted, 3, t.channel, "commentary to=functions.add ", t.constrain, "json", t.message)
    (choice,) = scripted.chat(max_tokens=100, final_headroom=50, tools=[TOOL])["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "add"
    assert len(scripted.engine.requests) == 1


@pytest.mark.parametrize("size", [1, 20])
def test_what_ends_in_time_is_not_touched(scripted: ScriptedServer, size: int) -> None:
    t = scripted.tokenizer
    scripted.says(t.channel, "analysis", t.message, "2", t.end, t.start, "assistant", t.channel, "final", size=size)
    whole = [t.message, *b"4", t.return_]
    scripted.says(*(t.channel, "final"), *whole, size=size)
    for budget in range(len("final") + len(whole) + 1, 40):
        (choice,) = scripted.chat(max_tokens=budget, final_headroom=1)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("4", "stop")
    assert not scripted.engine.cancelled


def test_an_answer_that_is_complete_is_not_followed_by_another(scripted: ScriptedServer) -> None:
    """With ignore_eos the engine goes on behind the answer, and what it says there is left out."""
    t = scripted.tokenizer
    thinks_for_ever(scripted, 3, t.channel, "final", t.message, "4", t.return_)
    (choice,) = scripted.chat(max_tokens=100, final_headroom=40, ignore_eos=True)["choices"]
    assert choice["message"]["content"] == "4"
    assert len(scripted.engine.requests) == 1


def test_a_header_is_replaced(scripted: ScriptedServer) -> None:
    t = scripted.tokenizer
    thinks_for_ever(scripted, 7, t.channel, "analysis", t.message, "2", t.end, t.start, "assistant", t.channel, "fin")
    (choice,) = scripted.chat(max_tokens=64, final_headroom=64 - 25)["choices"]
    assert choice["message"]["content"] == "It is 4."
    assert choice["message"]["reasoning"] == "2"


def test_every_choice_has_its_own(scripted: ScriptedServer) -> None:
    thinks_for_ever(scripted, 5)
    answer = scripted.chat(max_tokens=60, final_headroom=30, n=3)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["It is 4."] * 3


def test_a_full_context_has_room_for_the_answer(scripted: ScriptedServer) -> None:
    thinks_for_ever(scripted, 50, answer="x" * 100)
    answer = scripted.chat(final_headroom=60)
    first, second = scripted.engine.requests
    header = len(second.prompt_token_ids) - len(first.prompt_token_ids) - (first.sampling.max_tokens - 60)
    assert len(second.prompt_token_ids) + second.sampling.max_tokens == MAX_MODEL_LEN
    assert answer["choices"][0]["message"]["content"] == "x" * (60 - header)
    assert answer["choices"][0]["finish_reason"] == "length"


def test_without_room_for_the_header_reasoning_goes_on(scripted: ScriptedServer) -> None:
    thinks_for_ever(scripted, 50)
    answer = scripted.chat("x" * 1600, final_headroom=5)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert len(scripted.engine.requests) == 1
    prompt = len(scripted.engine.requests[0].prompt_token_ids)
    assert answer["usage"]["completion_tokens"] == MAX_MODEL_LEN - prompt


def test_the_servers_option_takes_at_most_half_of_a_budget(model_folder: Any) -> None:
    with ScriptedServer(model_folder, final_headroom=40) as server:
        thinks_for_ever(server, 5)
        for budget, kept in ((100, 40), (50, 25)):
            assert server.chat(max_tokens=budget)["choices"][0]["message"]["content"] == "It is 4."
            assert server.engine.requests[-1].sampling.max_tokens == kept
        (choice,) = server.chat(max_tokens=50, final_headroom=0)["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


@pytest.mark.parametrize("headroom", [-1, 50, 1000])
def test_bounds(scripted: ScriptedServer, headroom: int) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 50, "final_headroom": headroom}
    response = scripted.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "final_headroom"


@pytest.mark.needs("apis")
def test_a_budget_of_thinking_is_one_of_anthropics(scripted: ScriptedServer) -> None:
    thinks_for_ever(scripted, 5)
    asked = {"model": scripted.service.names[0], "messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
    thinking = {"type": "enabled", "budget_tokens": 30}
    first, second = scripted.post("/v1/messages", {**asked, "thinking": thinking}).json()["content"]
    assert first["thinking"] == ("hm " * 800)[: 30 - len("analysis") - 2]
    assert second["text"] == "It is 4."


def test_the_embedded_model_answers_within_its_budget(nano_server: ServerProcess) -> None:
    question: Any = [{"role": "user", "content": "What is 27 + 58?"}]
    asked: Any = {"model": "oscine-nano", "messages": question, "temperature": 0, "max_tokens": 60}
    with openai.OpenAI(base_url=f"{nano_server.url}/v1", api_key="none", max_retries=0) as client:
        cut = client.chat.completions.create(**asked).choices[0]
        assert (cut.message.content, cut.finish_reason) == ("", "length")
        forced = client.chat.completions.create(**asked, extra_body={"final_headroom": 30}).choices[0]
        assert forced.finish_reason == "stop"
        assert "27 + 58 = " in (forced.message.content or "")  # a guess, as it could not think to the end
    nano_server.wait_idle()
