"""The real OpenAI client against a real server with the fake executor."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise

import openai
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessageParam

from oscine.executor.fake import TEXT
from tests.api.scripted_engine import MAX_MODEL_LEN
from tests.api.scripted_server import ScriptedServer
from tests.server import ServerProcess

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me something."}]
THOUGHT = "The user wants to hear something, so I say something."


@pytest.fixture(scope="module")
def client(fake_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{fake_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_models(client: openai.OpenAI, model: str) -> None:
    assert client.models.retrieve(model).id == model
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-9")
    assert caught.value.code == "model_not_found"


def content(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def test_chat_streamed_is_chat(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=MESSAGES)
    message = whole.choices[0].message
    assert message.content is not None
    assert message.content == TEXT * (len(message.content) // len(TEXT))
    assert message.model_extra == {"reasoning": THOUGHT}
    assert whole.choices[0].finish_reason == "stop"
    stream = client.chat.completions.create(
        model=model, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [*stream]
    assert content(chunks) == message.content
    assert chunks[-2].choices[0].finish_reason == "stop"
    usage = chunks[-1].usage
    assert usage is not None
    assert whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    details = usage.completion_tokens_details
    assert details is not None
    assert details.reasoning_tokens == len(THOUGHT)  # a vocabulary of bytes


def test_the_clients_own_accumulator_accepts_the_stream(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=MESSAGES) as stream:
        final = stream.get_final_completion()
    assert (
        final.choices[0].message.content
        == client.chat.completions.create(model=model, messages=MESSAGES).choices[0].message.content
    )


def test_max_tokens_counts_all_tokens(client: openai.OpenAI, model: str) -> None:
    for limit in ({"max_tokens": 5}, {"max_completion_tokens": 5}):
        answer = client.chat.completions.create(model=model, messages=MESSAGES, **limit)  # type: ignore[call-overload]
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens == 5


def test_stop_string(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(model=model, messages=MESSAGES, stop="brown")
    assert answer.choices[0].message.content == TEXT.partition("brown")[0]
    assert answer.choices[0].finish_reason == "stop"


def test_second_turn_hits_the_prefix_cache(client: openai.OpenAI, model: str) -> None:
    turns: list[ChatCompletionMessageParam] = [{"role": "user", "content": "A question of its own. " * 20}]
    client.chat.completions.create(model=model, messages=turns, max_tokens=4)
    turns += [{"role": "assistant", "content": "Well."}, {"role": "user", "content": "And?"}]
    usage = client.chat.completions.create(model=model, messages=turns, max_tokens=4).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert 0 < (usage.prompt_tokens_details.cached_tokens or 0) < usage.prompt_tokens


def test_many_at_once(fake_server: ServerProcess, model: str) -> None:
    async def read(stream: AsyncIterator[ChatCompletionChunk]) -> str:
        return content([chunk async for chunk in stream])

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{fake_server.url}/v1", api_key="none", max_retries=0) as client:
            streams = [
                await client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=100 + i, stream=True)
                for i in range(40)
            ]
            return await asyncio.gather(*map(read, streams))

    answers = asyncio.run(ask_all())
    assert all(len(longer) == len(shorter) + 1 for shorter, longer in pairwise(answers))
    assert all((TEXT * 2).startswith(answer) for answer in answers)


def test_errors_are_the_clients_own(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=MESSAGES, temperature=9)
    assert caught.value.param == "temperature"
    assert caught.value.request_id
    with pytest.raises(openai.BadRequestError) as overflow:
        client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=10**6)
    assert overflow.value.code == "context_length_exceeded"


def test_request_ids(client: openai.OpenAI, model: str) -> None:
    raw = client.chat.completions.with_raw_response
    ids = [raw.create(model=model, messages=MESSAGES, max_tokens=1).headers["x-request-id"] for _ in range(2)]
    assert ids[0] != ids[1]
    own = {"X-Request-Id": "mine-17"}
    assert (
        raw.create(model=model, messages=MESSAGES, max_tokens=1, extra_headers=own).headers["x-request-id"] == "mine-17"
    )
    bad = {"X-Request-Id": "x" * 200}
    assert len(raw.create(model=model, messages=MESSAGES, max_tokens=1, extra_headers=bad).headers["x-request-id"]) < 64


def test_text_completions(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(
        model=model, prompt=["One", "Two"], n=2, echo=True, logprobs=1, max_tokens=20, stop="wants"
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:3] for choice in answer.choices] == ["One", "One", "Two", "Two"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 80)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert "".join(logprobs.tokens[:3]) == "One"
    assert logprobs.token_logprobs[0] is None  # type: ignore[comparison-overlap]
    assert logprobs.text_offset == [sum(map(len, logprobs.tokens[:i])) for i in range(len(logprobs.tokens))]
    ids = client.completions.create(model=model, prompt=[79, 110, 101], max_tokens=20)
    text = client.completions.create(model=model, prompt="One", max_tokens=20)
    assert ids.choices[0].text == text.choices[0].text
    streamed = client.completions.create(model=model, prompt="One", max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text.choices[0].text


def test_echo_alone_scores_a_prompt(client: openai.OpenAI, model: str) -> None:
    answer = client.completions.create(model=model, prompt="One", max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == "One"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.token_logprobs == [None, 0.0, 0.0]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


def test_tokenize_and_detokenize(client: openai.OpenAI) -> None:
    root = client.with_options(base_url=str(client.base_url).removesuffix("v1/"))
    told = root.post("/tokenize", cast_to=dict, body={"prompt": "h\u00e9<|end|>"})
    assert told["tokens"] == [*"h\u00e9<|end|>".encode()]
    assert told["count"] == len(told["tokens"])
    assert root.post("/detokenize", cast_to=dict, body={"tokens": told["tokens"]}) == {"prompt": "h\u00e9<|end|>"}
    chat = root.post("/tokenize", cast_to=dict, body={"messages": MESSAGES})
    usage = client.chat.completions.create(model=client.models.list().data[0].id, messages=MESSAGES, max_tokens=1).usage
    assert usage is not None
    assert chat["count"] == usage.prompt_tokens


def test_tokenize_says_what_a_chat_completion_would_be_prompted_with(scripted: ScriptedServer) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    shown = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}, "enforce": False}
    asked = {"messages": MESSAGES, "tools": [tool], "reasoning": {"effort": "high"}, "response_format": shown}
    for body in (asked, {**asked, "tool_choice": "none"}):
        told = scripted.post("/tokenize", {**body, "return_token_strs": True}).json()
        scripted.post("/v1/chat/completions", body)
        prompt = scripted.engine.requests[-1].prompt_token_ids
        assert told["tokens"] == prompt
        assert told["max_model_len"] == MAX_MODEL_LEN
        assert "".join(told["token_strs"]) == scripted.tokenizer.decode(prompt)
    closed = scripted.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json()["tokens"]
    assert scripted.tokenizer.decode(closed).endswith("Tell me something.<|end|>")
    refused = scripted.post("/tokenize", {"messages": MESSAGES, "continue_final_message": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "continue_final_message")
    assert scripted.post("/tokenize", {"messages": MESSAGES, "prompt": "hi"}).status_code == 400
