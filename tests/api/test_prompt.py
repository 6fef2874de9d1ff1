"""Small prompts are encoded on the event loop, large ones in a thread beside it."""

import threading
from pathlib import Path
from typing import Any

import pytest

from oscine.api.serving import prompt
from oscine.chat import tokenizer as tokenizer_module
from oscine.chat.harmony import HarmonyRenderer
from oscine.chat.messages import Conversation
from oscine.chat.tokenizer import Tokenizer
from oscine.settings.config import SchedulerOptions
from tests.api.scripted_engine import MAX_MODEL_LEN
from tests.api.scripted_server import ScriptedServer

LONG = "x" * 20_000
TOOL = {"type": "function", "function": {"name": "f", "description": LONG}}
CALL = {"id": "1", "function": {"name": "f", "arguments": LONG}}


@pytest.mark.parametrize(
    "long",
    [
        {"messages": [{"role": "user", "content": LONG}]},
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
        {"tools": [TOOL]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"description": LONG}}}},
    ],
    ids=["content", "call", "tools", "schema"],
)
def test_a_long_prompt_is_made_beside_the_event_loop(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, long: dict[str, Any]
) -> None:
    threads: list[threading.Thread] = []
    render = HarmonyRenderer.render

    def watched(self: HarmonyRenderer, conversation: Conversation, most: int | None = None) -> list[int]:
        threads.append(threading.current_thread())
        return render(self, conversation, most)

    monkeypatch.setattr(HarmonyRenderer, "render", watched)
    short = {"messages": [{"role": "user", "content": "hi"}]}
    for body in (short, {**short, **long}):
        scripted.post("/v1/chat/completions", body)
    on_loop, beside = threads
    assert on_loop is threading.main_thread()
    assert beside is not threading.main_thread()


def test_many_tokens_are_decoded_beside_the_event_loop(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    decode = Tokenizer.decode

    def watched(self: Tokenizer, token_ids: list[int]) -> str:
        threads.append(threading.current_thread())
        return decode(self, token_ids)

    monkeypatch.setattr(Tokenizer, "decode", watched)
    assert scripted.post("/detokenize", {"tokens": [104, 105]}).json() == {"prompt": "hi"}
    assert scripted.post("/detokenize", {"tokens": [104] * 20_000}).json() == {"prompt": "h" * 20_000}
    assert [thread is threading.main_thread() for thread in threads] == [True, False]


PATHS = ["/v1/chat/completions", "/v1/messages", "/v1/responses", "/api/chat", "/v1/completions"]


def overflow(server: ScriptedServer, path: str, *texts: str) -> str:
    messages = [{"role": "user", "content": text} for text in texts]
    body: dict[str, Any] = {"model": server.service.names[0]}
    if path == "/v1/completions":
        body["prompt"] = "".join(texts)
    else:
        body |= {"messages": messages, "input": messages}
    response = server.post(path, body | ({"max_tokens": 5} if path == "/v1/messages" else {}))
    assert response.status_code == 400
    assert "prompt is too long" in response.text
    assert server.engine.requests == []
    return response.text


@pytest.mark.parametrize("path", PATHS)
def test_a_conversation_of_up_to_two_contexts_is_counted_to_the_last_token(scripted: ScriptedServer, path: str) -> None:
    short = scripted.post("/tokenize", {"messages": [{"role": "user", "content": ""}] * 3}).json()["count"]
    text = "x" * ((2 * MAX_MODEL_LEN - short) // 3)
    count = 3 * len(text) + (0 if path == "/v1/completions" else short)
    assert f"prompt is too long: {count} " in overflow(scripted, path, *[text] * 3)


@pytest.mark.parametrize("path", PATHS)
def test_a_longer_conversation_is_counted_no_further(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    num_read: list[int] = []
    encoded = Tokenizer._encoded

    def watched(self: Tokenizer, encode: Any, text: str) -> Any:
        num_read.append(len(text))
        return encoded(self, encode, text)

    monkeypatch.setattr(Tokenizer, "_encoded", watched)
    monkeypatch.setattr(tokenizer_module, "_SLICE", 256)
    said = overflow(scripted, path, *["x" * 50 * MAX_MODEL_LEN] * 3)
    assert f"prompt is too long: {2 * MAX_MODEL_LEN} " in said
    assert "or more" in said
    assert sum(num_read) < 5 * MAX_MODEL_LEN


def test_texts_with_more_tokens_than_the_queue_takes_are_refused(model_folder: Path) -> None:
    limits = SchedulerOptions(max_queued_tokens=1000)
    with ScriptedServer(model_folder, scheduler=limits) as server:
        for path, prompt in (("/tokenize", "x" * 2000), ("/v1/completions", ["x" * 400] * 4)):
            response = server.post(path, {"prompt": prompt})
            assert response.status_code == 400
            assert "more than the 1000 tokens" in response.json()["error"]["message"]
        assert server.post("/tokenize", {"prompt": "x" * 1000}).json()["count"] == 1000


@pytest.mark.parametrize("text", ["word " * 4000, "\u00e9" * 4000, "9" * 4000, "\n" * 4000, "x" * 40_000])
def test_what_fits_is_never_said_to_exceed(tokenizer: Tokenizer, text: str) -> None:
    count = len(tokenizer.encode(text))
    assert not tokenizer.exceeds([text], count)
    assert tokenizer.exceeds([text], count // 3)


def test_characters_of_many_tokens_count_as_many(tokenizer: Tokenizer) -> None:
    assert tokenizer.exceeds(["\U0001f600" * 1000], 3000)
    assert not tokenizer.exceeds(["\U0001f600" * 1000], 4000)


def test_one_text_has_a_bound(scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ids of a million emoji would be four million objects, made in one go."""
    monkeypatch.setattr(prompt, "_MAX_TOKENS", 1000)
    refused = scripted.post("/tokenize", {"prompt": "\U0001f600" * 400})
    assert (refused.status_code, "more than the 1000 tokens" in refused.text) == (400, True)
    assert scripted.post("/tokenize", {"prompt": "\U0001f600" * 200}).json()["count"] == 800
