"""Where prompts are made: on the event loop when they are small, beside it when they would hold up the others."""

import threading
from typing import Any

import pytest

from oscine.chat.harmony import HarmonyRenderer
from oscine.chat.messages import Conversation
from oscine.chat.tokenizer import Tokenizer
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
        {"response_format": {"type": "json_schema", "json_schema": {"name": LONG}, "enforce": False}},
    ],
    ids=["content", "call", "tools", "schema"],
)
def test_a_long_prompt_is_made_beside_the_event_loop(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, long: dict[str, Any]
) -> None:
    threads: list[threading.Thread] = []
    render = HarmonyRenderer.render

    def watched(self: HarmonyRenderer, conversation: Conversation) -> list[int]:
        threads.append(threading.current_thread())
        return render(self, conversation)

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
