"""Any tokens of a model, in any division, give an answer without markers, and the same one streamed and whole."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings

from oscine.chat.harmony import HarmonyRenderer
from oscine.chat.messages import Message
from tests.api.scripted_engine import in_pieces
from tests.api.scripted_server import ScriptedServer
from tests.conformance.interfaces import INTERFACES, Said
from tests.conformance.odd_streams import INTERVALS, MARKERS, Parts, ids_of, odd_completions, true_completions

pytestmark = pytest.mark.parametrize("interface", INTERFACES)
bounded = settings(max_examples=30, derandomize=True)


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(model_folder) as server:
        yield server


def read_all(server: ScriptedServer, interface: str, ids: list[int]) -> Said:
    """The whole answer, once every interval has said the same in pieces."""
    server.engine.script = in_pieces(ids, 1)
    whole = INTERFACES[interface](server, stream=False)
    for interval in INTERVALS:
        server.engine.script = in_pieces(ids, interval)
        assert INTERFACES[interface](server, stream=True) == whole, f"streamed {interval} tokens at a time"
        assert INTERFACES[interface](server, stream=False) == whole
    return whole


@pytest.mark.long
@bounded
@given(parts=odd_completions)
@example(parts=["<|call|>"])
@example(parts=["<|start|>", "<|channel|>", "final"])
@example(parts=["<|channel|>", "commentary", " to=functions.add", "<|message|>", '{"a": ', "<|end|>"])
def test_no_tokens_are_too_odd(server: ScriptedServer, interface: str, parts: Parts) -> None:
    said = read_all(server, interface, ids_of(server.tokenizer, parts))
    assert not [marker for marker in MARKERS for text in said.texts if marker in text]


@pytest.mark.long
@bounded
@given(message=true_completions())
def test_what_the_model_means_arrives(server: ScriptedServer, interface: str, message: Message) -> None:
    said = read_all(server, interface, HarmonyRenderer(server.tokenizer).render_completion(message))
    assert said.content == message.content
    assert said.reasoning == (message.reasoning or "")
    calls = [(name, json.loads(arguments)) for name, arguments in said.calls]
    assert calls == [(call.name, json.loads(call.arguments)) for call in message.tool_calls]
    if interface != "anthropic":  # which sends arguments as an object
        assert [arguments for _, arguments in said.calls] == [call.arguments for call in message.tool_calls]
