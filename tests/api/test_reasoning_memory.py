"""Reasoning is kept between calls, and forgotten at its bounds."""

import pytest

from oscine.api.serving import reasoning_memory
from oscine.api.serving.reasoning_memory import ReasoningMemory
from oscine.chat.messages import Conversation, Message, ToolCall

ME = "me"


def restored(memory: ReasoningMemory, *call_ids: str, reasoning: str | None = None) -> str | None:
    calls = tuple(ToolCall(call_id, "add", "{}") for call_id in call_ids)
    asked = Conversation((Message("user", "hi"), Message("assistant", reasoning=reasoning, tool_calls=calls)))
    return memory.restore(ME, asked).messages[1].reasoning


def test_any_call_of_a_turn_brings_its_reasoning_back() -> None:
    memory = ReasoningMemory()
    memory.keep(ME, ["a", "b"], "because")
    assert restored(memory, "b") == restored(memory, "a", "b") == "because"
    assert restored(memory, "c") is None
    assert restored(memory, "a", reasoning="the client's own") == "the client's own"


def test_what_is_anothers_is_not_there() -> None:
    memory = ReasoningMemory()
    memory.keep("other", ["a", "b"], "theirs")
    memory.keep(ME, ["a"], "mine")
    assert restored(memory, "a") == "mine"
    assert restored(memory, "b") is None
    assert len(memory) == 3


def test_a_conversation_that_lacks_nothing_stays_as_it_is() -> None:
    memory = ReasoningMemory()
    memory.keep(ME, ["a"], "")
    assert len(memory) == 0
    asked = Conversation((Message("user", "hi"), Message("assistant", "hello")))
    assert memory.restore(ME, asked) is asked


def test_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_memory, "MAX_CALLS", 3)
    memory = ReasoningMemory()
    for call_id in "abcd":
        memory.keep(ME, [call_id], "why")
    assert restored(memory, "a") is None
    assert restored(memory, "b") == "why"
    memory.keep(ME, ["b"], "again")  # is new now
    memory.keep(ME, ["e"], "why")
    assert restored(memory, "c") is None
    assert restored(memory, "b") == "again"


def test_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning_memory, "MAX_BYTES", 1000)
    memory = ReasoningMemory()
    for i in range(50):
        memory.keep(ME, [str(i)], "\u00e9" * 50)
        assert memory.num_bytes == 100 * len(memory) <= 1000
    memory.keep(ME, ["large"], "x" * 1001)
    assert (len(memory), memory.num_bytes) == (0, 0)


def test_age_is_bounded() -> None:
    now_s = 0.0
    memory = ReasoningMemory(lambda: now_s)
    memory.keep(ME, ["a"], "why")
    now_s = reasoning_memory.LONGEST_S
    assert restored(memory, "a") == "why"
    now_s += 1
    assert restored(memory, "a") is None
    assert memory.num_bytes == 0
