"""Requests of the Python API over a scripted engine: what the embedded model does not say by itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oscine.api.common.errors import APIError, unavailable
from oscine.api.serving.tools import ServerTools
from oscine.llm.errors import RequestError
from oscine.llm.events import ArgumentsDelta, BuiltinRun, CallBegun, CallRun, StreamEvent, ThinkingDelta
from oscine.llm.functions import Tools
from oscine.llm.requests import Runner
from oscine.llm.results import ChatResult
from oscine.settings.config import ToolOptions
from oscine.types import GenerationOutput
from tests.api.scripted_engine import in_pieces
from tests.api.scripted_server import ScriptedServer

QUESTION: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def scripted(model_folder: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(model_folder) as server:
        yield server


def plays(server: ScriptedServer, *turns: tuple[str | int, ...]) -> None:
    """The engine's requests get these turns, one after another."""
    encode = server.tokenizer.encode
    left = [[i for part in turn for i in ([part] if isinstance(part, int) else encode(part))] for turn in turns]
    server.engine.script = lambda request: in_pieces(left.pop(0), 4)(request)


def chat(server: ScriptedServer, tools: list[Any], **parameters: Any) -> tuple[ChatResult, list[StreamEvent]]:
    events: list[StreamEvent] = []
    found = Tools(tools)
    fields = QUESTION | parameters | ({"tools": found.client} if found.client else {})
    run = Runner(server.service).chat(fields, found, parameters.pop("max_tool_calls", None), None, events.append)
    return server.run(run), events


@pytest.mark.needs("tools")
def test_code_runs_and_the_model_goes_on(scripted: ScriptedServer) -> None:
    scripted.service.tools = ServerTools(ToolOptions(tools=("python",), python_isolation="none"))
    t = scripted.tokenizer
    call = (t.channel, "analysis to=python code", t.message, "print(6 * 7)", t.call)
    plays(scripted, call, (t.channel, "final", t.message, "It is 42.", t.return_))
    result, events = chat(scripted, [{"type": "code_interpreter"}])
    assert result.content == "It is 42."
    (run,) = (event for event in events if isinstance(event, BuiltinRun))
    assert (run.type, run.recipient) == ("response.code_interpreter_call.completed", "python")
    assert (run.content, run.output.strip()) == ("print(6 * 7)", "42")
    assert len(result.messages) == 1


def test_functions_are_called_until_the_model_answers(scripted: ScriptedServer) -> None:
    def double(number: int) -> int:
        return 2 * number

    t = scripted.tokenizer
    call = (t.channel, "commentary to=functions.double ", t.constrain, "json", t.message, '{"number": 4}', t.call)
    thought = (t.channel, "analysis", t.message, "Hm.", t.end, t.start, "assistant")
    plays(scripted, (*thought, *call), call, (t.channel, "final", t.message, "8.", t.return_))
    result, events = chat(scripted, [double])
    assert [message["role"] for message in result.messages] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert [message["content"] for message in result.messages if message["role"] == "tool"] == ["8", "8"]
    assert result.messages[0]["reasoning"] == "Hm."
    assert [event.call.arguments for event in events if isinstance(event, CallRun)] == ['{"number": 4}'] * 2
    begun = [event.id for event in events if isinstance(event, CallBegun)]
    assert len(set(begun)) == 2
    pieces = [event for event in events if isinstance(event, ArgumentsDelta)]
    assert "".join(event.delta for event in pieces if event.id == begun[1]) == '{"number": 4}'
    assert "".join(event.delta for event in events if isinstance(event, ThinkingDelta)) == "Hm."
    assert len(scripted.engine.requests) == 3


def test_a_failure_of_the_engine_is_an_error_of_the_request(scripted: ScriptedServer) -> None:
    scripted.engine.script = lambda request: [GenerationOutput(request.request_id, finish_reason="error", error="oh")]
    with pytest.raises(APIError, match="oh"):
        chat(scripted, [])


def test_what_the_server_would_refuse_for_now_waits(scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    t = scripted.tokenizer
    plays(scripted, (t.channel, "final", t.message, "8.", t.return_))
    refusals = [unavailable("full", code="overloaded")] * 2
    check = scripted.model.admission.check

    def busy(sequences: int, tokens: int = 0) -> None:
        check(sequences, tokens)
        if refusals and not scripted.model.admission._line.locked():  # the check of the turns, not of the line
            raise refusals.pop()

    monkeypatch.setattr(scripted.model.admission, "check", busy)
    assert chat(scripted, [])[0].content == "8."
    assert not refusals


def test_tools_that_are_not_enabled_are_named(scripted: ScriptedServer) -> None:
    with pytest.raises(RequestError, match="code_interpreter"):
        chat(scripted, [{"type": "code_interpreter"}])


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([len, 3], r"'tools\[1\]': 3 is neither"),
        (["search"], r"'tools\[0\]': 'search' is neither"),
        ([{}], r"'tools\[0\]': {} is neither"),
        ([{"type": 3}], r"'tools\[0\]': {'type': 3} is neither"),
        (5, "'tools': a list is wanted, not 5"),
        ("search", "'tools': a list is wanted, not 'search'"),
    ],
)
def test_what_is_no_tool_is_named(given: Any, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        Tools(given)
