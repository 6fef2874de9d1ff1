"""The loop of built-in tools in a response: calls, results, budgets, and later turns."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from oscine.api.common.errors import APIError
from oscine.api.serving.tools import ServerTools
from oscine.chat.messages import FunctionTool, ToolNamespace
from oscine.chat.toolbox import (
    Citation,
    CodeRun,
    McpCall,
    McpListing,
    Source,
    Tool,
    Toolbox,
    ToolResult,
    WebFind,
    WebOpen,
    WebSearch,
)
from oscine.extensions.apis.responses.tools import ClientTools, allowed
from oscine.settings.config import ToolOptions
from oscine.types import GenerationRequest
from tests.api import scripted_engine
from tests.api.scripted_engine import in_pieces
from tests.api.scripted_server import ScriptedServer
from tests.extensions.apis.response_stream import check_response, check_stream, parse

SOURCE = Source("http://a.test/", "A")
QUERY = FunctionTool("search", "", {"type": "object", "properties": {"query": {"type": "string"}}})


class ScriptedTool(Tool):
    """A tool that answers as a test says, and counts how often it was entered and left."""

    def __init__(self, namespace: ToolNamespace, answer: Callable[[str, str], ToolResult]) -> None:
        self.namespace = namespace
        self._answer = answer
        self.inside = 0

    async def call(self, recipient: str, content: str) -> ToolResult:
        assert self.inside == 1
        return self._answer(recipient, content)

    async def __aenter__(self) -> Self:
        self.inside += 1
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.inside -= 1


class Browser(ScriptedTool):
    def citations(self, text: str) -> Iterator[Citation]:
        for match in re.finditer("【1】", text):
            yield Citation(match.start(), match.end(), SOURCE)

    def state(self) -> Any:
        return {"pages": 1}


class Mcp(ScriptedTool):
    listing = McpListing("notes", ({"name": "find", "input_schema": {"type": "object"}},))


def run_code(recipient: str, content: str) -> ToolResult:
    return ToolResult("4\n", CodeRun(content, "4\n"))


def browse(recipient: str, content: str) -> ToolResult:
    details = {
        "browser.search": WebSearch("q", (SOURCE,)),
        "browser.open": WebOpen("http://a.test/"),
        "browser.find": WebFind("http://a.test/", "x"),
    }[recipient]
    return ToolResult("L1: a page", details)


def ask_server(recipient: str, content: str) -> ToolResult:
    failed = "bad" in content
    error = "it broke" if failed else None
    return ToolResult("text", McpCall("notes", "find", content, None if failed else "found", error), failed)


class Tools:
    """In place of oscine.api.serving.tools.ServerTools."""

    def __init__(self) -> None:
        browser = tuple(FunctionTool(name, "", QUERY.parameters) for name in ("search", "open", "find"))
        self.tools: list[ScriptedTool] = [
            ScriptedTool(ToolNamespace("python", "Runs code."), run_code),
            Browser(ToolNamespace("browser", "Browses.", browser), browse),
            Mcp(ToolNamespace("notes", "", (FunctionTool("find", "", QUERY.parameters),)), ask_server),
        ]
        self.states: list[Any] = []

    def toolbox(self, tools: list[Any], max_calls: int | None = None, state: Any = None, owner: str = "") -> Toolbox:
        wanted = {"code_interpreter": 0, "web_search": 1, "mcp": 2}
        self.states.append(state)
        opened: list[Tool] = [self.tools[wanted[tool["type"]]] for tool in tools]
        return Toolbox(opened, 9 if max_calls is None else max_calls)

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


@pytest.fixture
def server(scripted: ScriptedServer) -> ScriptedServer:
    scripted.service.tools = Tools()  # type: ignore[assignment]
    return scripted


PYTHON = {"type": "code_interpreter", "container": {"type": "auto"}}
WEB = {"type": "web_search_preview_2025_03_11"}
MCP = {"type": "mcp", "server_label": "notes", "server_url": "http://x.test", "headers": {"Authorization": "secret"}}
ALL = [PYTHON, WEB, MCP]


def plays(server: ScriptedServer, *turns: tuple[str | int, ...], size: int = 4, finish: str = "stop") -> None:
    """Each of the engine's requests gets the next of these turns, the last one again and again."""
    t = server.tokenizer
    scripts = [
        in_pieces([i for part in turn for i in ([part] if isinstance(part, int) else t.encode(part))], size, finish)
        for turn in turns
    ]
    first = len(server.engine.requests)

    def script(request: GenerationRequest) -> Any:
        return scripts[min(len(server.engine.requests) - first, len(scripts)) - 1](request)

    server.engine.script = script


def call(server: ScriptedServer, to: str, content: str, channel: str = "analysis") -> tuple[str | int, ...]:
    t = server.tokenizer
    thought = (t.channel, "analysis", t.message, "Hm.", t.end, t.start, "assistant")
    return (*thought, t.channel, f"{channel} to={to} code", t.message, content, t.call)


def answer(server: ScriptedServer, text: str) -> tuple[str | int, ...]:
    t = server.tokenizer
    return (t.channel, "final", t.message, text, t.return_)


def stream(server: ScriptedServer, **parameters: Any) -> tuple[dict[str, Any], list[str]]:
    events = parse(server.post("/v1/responses", {"input": "hi", "stream": True, **parameters}).text)
    response = check_stream(events)
    assert response is not None
    assert not any(tool.inside for tool in server.service.tools.tools)  # type: ignore[attr-defined]
    return response, [event["type"] for event in events if not event["type"].endswith(".delta")]


def kinds(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


@pytest.mark.parametrize("size", [1, 4, 20])
def test_code_runs_and_its_result_is_used(server: ScriptedServer, size: int) -> None:
    plays(server, call(server, "python", "print(2 + 2)"), answer(server, "4"), size=size)
    response, events = stream(server, tools=[PYTHON], include=["code_interpreter_call.outputs"])
    assert kinds(response) == ["reasoning", "code_interpreter_call", "message"]
    code = response["output"][1]
    assert (code["code"], code["status"]) == ("print(2 + 2)", "completed")
    assert code["outputs"] == [{"type": "logs", "logs": "4\n"}]
    of_call = [kind for kind in events if "code_interpreter" in kind]
    assert of_call == [
        "response.code_interpreter_call.in_progress",
        "response.code_interpreter_call_code.done",
        "response.code_interpreter_call.interpreting",
        "response.code_interpreter_call.completed",
    ]
    first, second = server.engine.requests
    behind = server.tokenizer.decode(second.prompt_token_ids[len(first.prompt_token_ids) :])
    assert behind.endswith(
        "analysis to=python code<|message|>print(2 + 2)<|call|>"
        "<|start|>python to=assistant<|channel|>analysis<|message|>4\n<|end|><|start|>assistant"
    )
    assert second.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids
    usage = response["usage"]
    assert usage["input_tokens"] + usage["output_tokens"] == len(second.prompt_token_ids) + len("final4") + 3
    assert usage["output_tokens_details"]["reasoning_tokens"] == 3
    assert "outputs" not in str(stream(server, tools=[PYTHON])[0]["output"]).replace("'outputs': None", "")


def test_the_web_is_searched_and_cited(server: ScriptedServer) -> None:
    say = [call(server, f"browser.{name}", '{"query": "q"}') for name in ("search", "open", "find")]
    plays(server, *say, answer(server, "So 【1】."))
    response, events = stream(server, tools=[WEB], include=["web_search_call.action.sources"])
    actions = [item["action"] for item in response["output"] if item["type"] == "web_search_call"]
    assert actions == [
        {"type": "search", "query": "q", "queries": ["q"], "sources": [{"type": "url", "url": SOURCE.url}]},
        {"type": "open_page", "url": SOURCE.url},
        {"type": "find_in_page", "url": SOURCE.url, "pattern": "x"},
    ]
    (part,) = response["output"][-1]["content"]
    cited = {"type": "url_citation", "start_index": 3, "end_index": 6, "url": SOURCE.url, "title": "A"}
    assert part["annotations"] == [cited]
    assert events.count("response.output_text.annotation.added") == 1
    shown = server.get(f"/v1/responses/{response['id']}").json()
    assert "sources" not in shown["output"][1]["action"]


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 4, 200])
def test_citations_come_with_the_text_that_completes_them(server: ScriptedServer, size: int) -> None:
    text = "é" * 400 + " so 【1】【1】 and 【" + "x" * 300 + "1】 and 【1】.】"
    plays(server, call(server, "browser.search", "{}"), answer(server, text), size=size)
    events = parse(server.post("/v1/responses", {"input": "hi", "stream": True, "tools": [WEB]}).text)
    response = check_stream(events)
    assert response is not None
    said, cited = "", []
    for event in events:
        if event["type"] == "response.output_text.delta":
            assert said.count("【1】") == len(cited)
            said += event["delta"]
        elif event["type"] == "response.output_text.annotation.added":
            cited.append(event["annotation"])
    assert [said[a["start_index"] : a["end_index"]] for a in cited] == ["【1】"] * 3
    assert [a["start_index"] for a in cited] == [match.start() for match in re.finditer("【1】", text)]
    assert response["output"][-1]["content"][0]["annotations"] == cited


def test_servers_of_tools_are_listed_once_and_called(server: ScriptedServer) -> None:
    plays(server, call(server, "notes.find", '{"query": "a"}'), call(server, "notes.find", "bad"), answer(server, "."))
    response, events = stream(server, tools=[MCP])
    expected = ["mcp_list_tools", "reasoning", "mcp_call", "reasoning", "mcp_call", "message"]
    assert kinds(response) == expected
    listing, _, good, _, bad, _ = response["output"]
    assert [tool["name"] for tool in listing["tools"]] == ["find"]
    assert (good["server_label"], good["name"], good["output"], good["error"]) == ("notes", "find", "found", None)
    assert (bad["status"], bad["output"]) == ("failed", None)
    assert "it broke" in str(bad["error"])
    assert [kind for kind in events if kind.startswith("response.mcp_call.")].count("response.mcp_call.failed") == 1
    assert response["tools"] == [{key: value for key, value in MCP.items() if key != "headers"}]
    assert "secret" not in server.get(f"/v1/responses/{response['id']}").text
    plays(server, answer(server, "."))
    again, _ = stream(server, tools=[MCP], previous_response_id=response["id"])
    assert kinds(again) == ["message"]


def test_calls_and_results_are_part_of_the_conversation(server: ScriptedServer) -> None:
    t = server.tokenizer
    function = {"type": "function", "name": "add", "parameters": None}
    to_client = (t.channel, "commentary to=functions.add ", t.constrain, "json", t.message, "{}", t.call)
    plays(server, call(server, "browser.search", '{"query": "q"}'), to_client)
    response, _ = stream(server, tools=[WEB, function])
    assert kinds(response) == ["reasoning", "web_search_call", "function_call"]
    result = {"type": "function_call_output", "call_id": response["output"][-1]["call_id"], "output": "1"}
    plays(server, answer(server, "Done."))
    stream(server, input=[result], tools=[WEB, function], previous_response_id=response["id"])
    prompt = t.decode(server.engine.requests[-1].prompt_token_ids)
    assert (
        '<|start|>assistant<|channel|>analysis to=browser.search code<|message|>{"query": "q"}<|call|>'
        "<|start|>browser.search to=assistant<|channel|>analysis<|message|>L1: a page<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.add"
    ) in prompt
    assert server.service.tools.states[-1] == {"browser": {"pages": 1}}  # type: ignore[attr-defined]
    stream(server, input=[{"type": "item_reference", "id": response["output"][1]["id"]}], tools=[WEB])
    assert "L1: a page" in t.decode(server.engine.requests[-1].prompt_token_ids)


def test_the_budget_is_that_of_the_whole_turn(server: ScriptedServer) -> None:
    said = call(server, "python", "1")
    plays(server, said, answer(server, "4"))
    length = sum(1 if isinstance(part, int) else len(part) for part in said)
    response, _ = stream(server, tools=[PYTHON], max_output_tokens=length + 5)
    assert [request.sampling.max_tokens for request in server.engine.requests] == [length + 5, 5]
    plays(server, said)
    response, _ = stream(server, tools=[PYTHON], max_output_tokens=length)
    assert response["status"] == "incomplete"
    assert kinds(response) == ["reasoning", "code_interpreter_call"]
    assert len(server.engine.requests) == 3


def test_a_call_that_is_cut_is_not_made(server: ScriptedServer) -> None:
    for to, tool, done in (
        ("python", PYTHON, "response.code_interpreter_call_code.done"),
        ("notes.find", MCP, "response.mcp_call_arguments.done"),
    ):
        plays(server, call(server, to, "print(1")[:-1], finish="length")
        response, events = stream(server, tools=[tool])
        assert response["status"] == "incomplete"
        item = response["output"][-1]
        assert item["code" if to == "python" else "arguments"] == "print(1"
        assert item["status"] == "incomplete"
        assert events.count(done) == 1
        assert "response.code_interpreter_call.interpreting" not in events
    assert len(server.engine.requests) == 2


def test_a_model_that_calls_on_and_on_is_made_to_answer(server: ScriptedServer) -> None:
    t = server.tokenizer
    plays(server, call(server, "python", "1"), call(server, "python", "2"), ("So be it.", t.return_))
    response, _ = stream(server, tools=[PYTHON], max_tool_calls=1)
    codes = [item["status"] for item in response["output"] if item["type"] == "code_interpreter_call"]
    assert codes == ["completed", "failed"]
    assert response["output"][-1]["content"][0]["text"] == "So be it."
    assert t.decode(server.engine.requests[-1].prompt_token_ids).endswith(
        "<|start|>assistant<|channel|>final<|message|>"
    )


def test_a_required_call_is_required_once(server: ScriptedServer) -> None:
    plays(server, call(server, "python", "1"), answer(server, "."))
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    for choice in ("required", {"type": "code_interpreter"}):
        first = len(server.engine.requests)
        plays(server, call(server, "python", "1"), answer(server, "."))
        response, _ = stream(server, tools=ALL, tool_choice=choice, text={"format": schema})
        assert response["status"] == "completed"
        begin, later = (request.sampling.grammar for request in server.engine.requests[first:])
        assert begin is not None
        assert later is not None
        assert "final" not in begin.partition("start:")[2].partition("\\n")[0]
        assert "final" in later.partition("start:")[2].partition("\\n")[0]
        assert ("browser.search" in begin) is (choice == "required")


def test_a_choice_names_one_tool_and_none_that_begins_as_it_does() -> None:
    recipients = ("python", "pythons.find", "notes.find", "notes.find_all")

    def chosen(**choice: str) -> tuple[str, ...]:
        return allowed(choice, ClientTools(()), recipients, parallel=True).recipients

    assert chosen(type="code_interpreter") == ("python",)
    assert chosen(type="mcp", server_label="notes", name="find") == ("notes.find",)
    assert chosen(type="mcp", server_label="notes") == ("notes.find", "notes.find_all")
    for other in ({"type": "mcp", "server_label": "note"}, {"type": "mcp"}, {"type": "web_search"}):
        with pytest.raises(APIError, match="'tool_choice'"):
            chosen(**other)


def test_a_tool_that_is_not_enabled_is_passed_over_but_not_chosen(scripted: ScriptedServer) -> None:
    """Clients such as Codex name them without knowing."""
    plays(scripted, answer(scripted, "ok"))
    add = {"type": "function", "name": "add", "parameters": None, "strict": None}
    response = scripted.post("/v1/responses", {"input": "hi", "tools": [PYTHON, add, WEB]}).json()
    assert [tool["type"] for tool in response["tools"]] == ["function"]
    prompt = scripted.tokenizer.decode(scripted.engine.requests[-1].prompt_token_ids)
    assert "namespace browser" not in prompt
    assert "## python" not in prompt
    some = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    for choice in ({"type": "code_interpreter"}, {"type": "web_search"}, some):
        refused = scripted.post("/v1/responses", {"input": "hi", "tools": [PYTHON, add, WEB], "tool_choice": choice})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
    refused = scripted.post("/v1/responses", {"input": "hi", "tools": [MCP]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


def test_a_tool_that_is_not_offered_is_not_called(server: ScriptedServer) -> None:
    for offered in ({}, {"tools": [PYTHON], "tool_choice": "none"}):
        plays(server, call(server, "python", "1"))
        response, _ = stream(server, **offered)
        assert kinds(response) == ["reasoning", "reasoning"]


def test_whole_is_streamed(server: ScriptedServer) -> None:
    turns = (call(server, "python", "1"), call(server, "browser.search", "{}"), answer(server, "【1】"))
    plays(server, *turns)
    streamed, _ = stream(server, tools=ALL)
    plays(server, *turns)
    whole = check_response(server.post("/v1/responses", {"input": "hi", "tools": ALL}).json())
    assert kinds(whole) == kinds(streamed)
    assert whole["usage"] == streamed["usage"]


def test_room_for_the_answer(model_folder: Any) -> None:
    with ScriptedServer(model_folder, final_headroom=8) as server:
        t = server.tokenizer
        thought = (t.channel, "analysis", t.message, "x" * 100)
        plays(server, thought, ("Yes.", t.return_), size=7)
        events = parse(server.post("/v1/responses", {"input": "hi", "stream": True, "max_output_tokens": 40}).text)
        response = check_stream(events)
        assert response is not None
        assert response["status"] == "completed"
        assert kinds(response) == ["reasoning", "message"]
        assert response["usage"]["output_tokens"] == 32 + 5
        assert server.engine.requests[1].sampling.max_tokens == 8


@pytest.fixture
def roomy(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    """A token is a byte here, and the browser has a lot to say."""
    monkeypatch.setattr(scripted_engine, "MAX_MODEL_LEN", 8192)
    with ScriptedServer(model_folder) as server:
        yield server


def test_the_servers_own_tools(roomy: ScriptedServer, tmp_path: Path) -> None:
    (tmp_path / "lisbon.md").write_text("# Lisbon\n\nIt is sunny in Lisbon.\n")
    options = ToolOptions(tools=("python", "browser"), python_isolation="none", browser_folder=str(tmp_path))
    roomy.service.tools = ServerTools(options)
    roomy.run(roomy.service.tools.start())
    plays(
        roomy,
        call(roomy, "python", "print(6 * 7)"),
        call(roomy, "browser.search", '{"query": "sunny Lisbon"}'),
        call(roomy, "browser.open", '{"id": 0}'),
        answer(roomy, "42, and sunny."),
    )
    asked = {"input": "hi", "stream": True, "tools": [PYTHON, WEB], "include": ["code_interpreter_call.outputs"]}
    response = check_stream(parse(roomy.post("/v1/responses", asked).text))
    assert response is not None
    calls = [item for item in response["output"] if item["type"] not in ("reasoning", "message")]
    assert [item["status"] for item in calls] == ["completed"] * 3
    assert calls[0]["outputs"] == [{"type": "logs", "logs": "42"}]
    assert calls[1]["action"]["query"] == "sunny Lisbon"
    assert "lisbon.md" in calls[2]["action"]["url"]
    prompt = roomy.tokenizer.decode(roomy.engine.requests[-1].prompt_token_ids)
    assert "It is sunny in Lisbon." in prompt


def test_results_of_tools_that_fill_the_context_are_compacted(server: ScriptedServer) -> None:
    """In the middle of the response, which goes on from the summary and from what is left of its limits."""
    size = server.post("/v1/responses/input_tokens", {"input": "hi", "tools": [PYTHON, MCP]}).json()["input_tokens"]
    body: dict[str, Any] = {
        **{"input": "hi", "tools": [PYTHON, MCP], "max_output_tokens": 400, "tool_choice": "required"},
        "context_management": [{"type": "compaction", "compact_threshold": size + 1}],
    }
    plays(server, call(server, "python", "2 + 2"), answer(server, "It was four."), answer(server, "So 4."))
    response = check_stream(parse(server.post("/v1/responses", {**body, "stream": True}).text))
    assert response is not None
    listing, *kinds = [item["type"] for item in response["output"]]
    assert listing == "mcp_list_tools"
    assert kinds == ["reasoning", "code_interpreter_call", "compaction", "message"]
    called, summed, answered = server.engine.requests[-3:]
    texts = [server.tokenizer.decode(request.prompt_token_ids) for request in (called, summed, answered)]
    assert summed.prompt_token_ids[: len(called.prompt_token_ids)] == called.prompt_token_ids, "it is cached"
    assert "python to=assistant<|channel|>analysis<|message|>4\n<|end|><|start|>user<|message|>Write a s" in texts[1]
    assert "2 + 2" not in texts[2]
    assert "It was four.<|end|><|start|>assistant" in texts[2]
    parts = call(server, "python", "2 + 2")
    said = sum(len(server.tokenizer.encode(part)) if isinstance(part, str) else 1 for part in parts)
    assert answered.sampling.max_tokens == 400 - said
    assert called.sampling.grammar is not None
    assert answered.sampling.grammar is None, "one call was required"
    read = sum(len(request.prompt_token_ids) for request in (called, summed, answered))
    assert response["usage"]["input_tokens"] == read
    plays(server, call(server, "python", "2 + 2"), answer(server, "It was four."), answer(server, "So 4."))
    whole = check_response(server.post("/v1/responses", body).json())
    assert [item["type"] for item in whole["output"]] == [listing, *kinds]
    plays(server, answer(server, "ok"))
    server.post("/v1/responses", {"input": "And now?", "previous_response_id": response["id"]})
    behind = server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
    assert "2 + 2" not in behind
    assert behind.index("It was four.") < behind.index("So 4.") < behind.index("And now?")


def test_a_response_keeps_its_place_while_it_is_compacted(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it has begun, a full server refuses none of its turns."""
    size = server.post("/v1/responses/input_tokens", {"input": "hi", "tools": [PYTHON]}).json()["input_tokens"]
    context = [{"type": "compaction", "compact_threshold": size + 1}]
    plays(server, call(server, "python", "2 + 2"), answer(server, "It was four."), answer(server, "So 4."))
    script, admission = server.engine.script, server.model.admission

    def filled(request: GenerationRequest) -> Any:
        monkeypatch.setattr(admission, "max_sequences", 0)
        assert admission.sequences == 1
        return script(request)

    server.engine.script = filled
    body = {"input": "hi", "tools": [PYTHON], "context_management": context}
    response = check_response(server.post("/v1/responses", body).json())
    assert [item["type"] for item in response["output"]][-2:] == ["compaction", "message"]
    assert admission.sequences == 0


def test_a_result_that_no_summary_can_be_written_of_ends_the_response(server: ScriptedServer) -> None:
    tools: Any = server.service.tools
    tools.tools[0] = ScriptedTool(
        ToolNamespace("python", "Runs code."), lambda to, code: ToolResult("4" * 9000, CodeRun(code, ""))
    )
    plays(server, call(server, "python", "4"), answer(server, "never"))
    context = [{"type": "compaction"}]
    body = {"input": "hi", "tools": [PYTHON], "context_management": context, "stream": True}
    response = check_stream(parse(server.post("/v1/responses", body).text))
    assert response is not None
    assert response["status"] == "incomplete"
    assert [item["type"] for item in response["output"]] == ["reasoning", "code_interpreter_call"]
