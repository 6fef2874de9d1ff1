"""What Claude Code needs of the Messages API: deferred tools, searches of the web, prefixes that stay."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent, BetaUsage
from pydantic import TypeAdapter

from oscine.api.serving.tools import ServerTools
from oscine.settings.config import ToolOptions
from tests.api import scripted_engine
from tests.api.scripted_engine import in_pieces
from tests.api.scripted_server import ScriptedServer
from tests.extensions.apis.response_stream import parse

Json = dict[str, Any]
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
_BETA_EVENT: TypeAdapter[BetaRawMessageStreamEvent] = TypeAdapter(BetaRawMessageStreamEvent)
URL = {"type": "object", "properties": {"url": {"type": "string", "format": "uri"}}, "required": ["url"]}
FIND = {"name": "ToolSearch", "description": "Finds tools.", "input_schema": {"type": "object", "properties": {}}}
FETCH = {"name": "WebFetch", "description": "Fetches.", "input_schema": URL, "defer_loading": True}
EDIT = {**FETCH, "name": "NotebookEdit", "description": "Edits."}
USER = {"role": "user", "content": "Change a.txt"}
SEARCHES = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}


def post(server: ScriptedServer, messages: list[Json], path: str = "/v1/messages", **more: Any) -> Any:
    limit = {"max_tokens": 64} if path == "/v1/messages" else {}
    return server.post(path, {"model": server.service.names[0], "messages": messages, **limit, **more})


def prompt_of(server: ScriptedServer, messages: list[Json], **more: Any) -> str:
    answer = post(server, messages, **more)
    assert answer.status_code == 200, answer.text
    prompt = server.engine.requests[-1].prompt_token_ids
    counted = post(server, messages, "/v1/messages/count_tokens", **more).json()
    assert counted["input_tokens"] == len(prompt)
    return server.tokenizer.decode(prompt)


def found(call_id: str, *names: str) -> list[Json]:
    """A turn that finds tools by the client's own search."""
    use = {"type": "tool_use", "id": call_id, "name": "ToolSearch", "input": {}}
    content = [{"type": "tool_reference", "tool_name": name} for name in names]
    result = {"type": "tool_result", "tool_use_id": call_id, "content": content}
    return [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]


def test_a_deferred_tool_is_declared_where_it_is_found(scripted: ScriptedServer) -> None:
    tools = [EDIT, FIND, FETCH]
    before = prompt_of(scripted, [USER], tools=tools)
    assert "type ToolSearch = " in before
    assert not any(name in before for name in ("WebFetch", "NotebookEdit"))
    turns = [USER, *found("a", "WebFetch", "Nothing"), *found("b", "WebFetch", "NotebookEdit")]
    once = prompt_of(scripted, turns[:3], tools=tools)
    whole = prompt_of(scripted, turns, tools=tools)
    for part, more in ((before, once), (once, whole)):
        assert more.startswith(part)
    result = (
        "<|start|>functions.ToolSearch to=assistant<|channel|>commentary<|message|>[tool: WebFetch]\n[tool: Nothing]\n"
    )
    late = "<|end|><|start|>developer<|message|># Tools\n\n## functions\n\nnamespace functions {\n\n// Fetches.\n"
    assert f"{result}{late}type WebFetch = (_: {{" in once
    assert (whole.count("type WebFetch ="), whole.count("type NotebookEdit =")) == (1, 1)
    assert "functions.WebFetch" in str(scripted.engine.requests[-1].sampling.headers)
    hidden = prompt_of(scripted, turns, tools=tools, tool_choice={"type": "none"})
    assert "type WebFetch" not in hidden
    named = post(scripted, [USER], tools=tools, tool_choice={"type": "tool", "name": "WebFetch"})
    assert (named.status_code, "there is no function 'WebFetch'" in named.text) == (400, True)


def test_deferred_tools_that_nothing_finds_are_declared_at_once(scripted: ScriptedServer) -> None:
    vendors = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    for tools in ([FETCH], [FETCH, FIND, vendors]):
        assert "type WebFetch = " in prompt_of(scripted, [USER], tools=tools)


def test_chat_completions_defer_functions_too(scripted: ScriptedServer) -> None:
    find, fetch = (
        {"type": "function", "defer_loading": deferred, "function": {"name": name, "parameters": URL}}
        for name, deferred in (("find", False), ("fetch", True))
    )
    call = {"id": "c", "type": "function", "function": {"name": "find", "arguments": "{}"}}
    content = [{"type": "text", "text": "One tool."}, {"type": "tool_reference", "tool_name": "fetch"}]
    turns = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": content},
    ]
    prompts = []
    for messages in (turns[:1], turns):
        scripted.chat(messages=messages, tools=[find, fetch])
        prompts.append(scripted.tokenizer.decode(scripted.engine.requests[-1].prompt_token_ids))
    assert "fetch" not in prompts[0]
    assert prompts[1].startswith(prompts[0])
    assert "One tool.[tool: fetch]\n<|end|><|start|>developer<|message|># Tools" in prompts[1]


class Backend:
    """Finds one page for every query but one."""

    async def search(self, query: str, topn: int) -> Any:
        from oscine.extensions.tools.browser import Hit

        if query == "nothing":
            raise LookupError("no results")
        return [Hit("http://a.test/", f"About {query}", "Ponds are small.")]

    async def open(self, url: str) -> Any:
        raise LookupError("no such page")


@pytest.fixture
def searching(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    """A token is a byte here, and the browser has a lot to say."""
    monkeypatch.setattr(scripted_engine, "MAX_MODEL_LEN", 8192)
    with ScriptedServer(model_folder) as server:
        backend = f"{__name__}:Backend"
        server.service.tools = ServerTools(ToolOptions(tools=("browser",), browser_backend=backend))
        yield server


def says_search(server: ScriptedServer, query: str) -> None:
    t = server.tokenizer
    search = [t.channel, *t.encode("analysis to=browser.search code"), t.message]
    ids = [*search, *t.encode(json.dumps({"query": query})), t.call]
    answer = [t.channel, *t.encode("final"), t.message, *t.encode("Small lakes."), t.return_]

    def script(request: Any) -> Any:
        again = "Ponds" in server.tokenizer.decode(request.prompt_token_ids) or (
            query == "nothing" and len(server.engine.requests) % 2 == 0
        )
        return in_pieces(answer if again else ids, 4)(request)

    server.engine.script = script


def test_a_search_of_the_web_is_run_by_the_browser(searching: ScriptedServer) -> None:
    said: Json = {"tools": [SEARCHES], "tool_choice": {"type": "tool", "name": "web_search"}}
    says_search(searching, "ponds")
    whole = post(searching, [USER], **said)
    assert whole.status_code == 200, whole.text
    assert "x-tools-left-out" not in whole.headers
    message = Message.model_validate(whole.json(), strict=True)
    use, result, text = message.content
    assert (use.type, use.name, use.input) == ("server_tool_use", "web_search", {"query": "ponds"})
    assert (result.type, result.tool_use_id, text.type, text.text) == (
        "web_search_tool_result", use.id, "text", "Small lakes.",
    )  # fmt: skip
    assert isinstance(result.content, list)
    assert [(page.url, page.title) for page in result.content] == [("http://a.test/", "About ponds")]
    assert (message.stop_reason, message.usage.server_tool_use.web_search_requests) == ("end_turn", 1)
    assert "## browser" in searching.tokenizer.decode(searching.engine.requests[0].prompt_token_ids)
    events = parse(post(searching, [USER], **said, stream=True).text)
    for event in events[2:]:
        EVENT.validate_python(event)
    begun = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert begun == ["server_tool_use", "web_search_tool_result", "text"]
    assert events[-2]["usage"]["server_tool_use"] == {"web_search_requests": 1, "web_fetch_requests": 0}
    history = [USER, {"role": "assistant", "content": whole.json()["content"]}, USER]
    assert post(searching, history).status_code == 200


def test_what_searches_find_is_compacted_in_the_middle_of_the_answer(searching: ScriptedServer) -> None:
    name = searching.service.names[0]
    asked: Json = {"model": name, "messages": [USER], "tools": [SEARCHES]}
    size = searching.post("/v1/messages/count_tokens", asked).json()["input_tokens"]
    admission = searching.model.admission
    places = admission.max_sequences

    def made(summary: str, **more: Any) -> BetaMessage:
        says_search(searching, "ponds")
        searched, t, left = searching.engine.script, searching.tokenizer, [summary, "So small."]

        def script(request: Any) -> Any:
            prompt = t.decode(request.prompt_token_ids)
            if not ("About ponds" in prompt or "Found ponds." in prompt):
                return searched(request)
            return in_pieces([t.channel, *t.encode("final"), t.message, *t.encode(left.pop(0)), t.return_], 4)(request)

        def filled(request: Any) -> Any:
            admission.max_sequences = 0  # the server is full once the answer has begun
            return script(request)

        searching.engine.script = filled
        edit = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": size + 1}, **more}
        body: Json = {**asked, "max_tokens": 300, "context_management": {"edits": [edit]}}
        events = parse(searching.post("/v1/messages", {**body, "stream": True}).text)
        for event in events[2:]:
            _BETA_EVENT.validate_json(json.dumps(event), strict=True)
        admission.max_sequences = places
        begun = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
        left[:] = [summary, "So small."]
        message = BetaMessage.model_validate_json(searching.post("/v1/messages", body).text, strict=True)
        assert [block.type for block in message.content] == begun
        admission.max_sequences = places
        assert events[-2]["delta"]["stop_reason"] == message.stop_reason
        return message

    message = made("Found ponds.")
    assert [block.type for block in message.content] == [
        *("server_tool_use", "web_search_tool_result", "compaction", "text")
    ]
    assert (message.content[2].content, message.content[3].text) == ("Found ponds.", "So small.")  # type: ignore[union-attr]
    called, summed, answered = searching.engine.requests[-3:]
    assert summed.prompt_token_ids[: len(called.prompt_token_ids)] == called.prompt_token_ids
    assert "About ponds" not in searching.tokenizer.decode(answered.prompt_token_ids)
    assert answered.sampling.max_tokens < called.sampling.max_tokens
    usage = message.usage
    assert [of.type for of in usage.iterations or ()] == ["compaction"]
    read = len(called.prompt_token_ids) + len(answered.prompt_token_ids)
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == read
    history = [USER, {"role": "assistant", "content": message.to_dict()["content"]}, USER]
    searching.says("ok")
    assert post(searching, history).status_code == 200
    behind = searching.tokenizer.decode(searching.engine.requests[-1].prompt_token_ids)
    assert "a.test" not in behind
    assert behind.index("Found ponds.") < behind.index("So small.")
    paused = made("Found ponds.", pause_after_compaction=True)
    assert (paused.stop_reason, paused.content[-1].type) == ("compaction", "compaction")
    failed = made("")
    assert (failed.stop_reason, failed.content[-1].type) == ("pause_turn", "compaction")
    assert failed.content[-1].content is None  # type: ignore[union-attr]


def test_a_search_that_fails_says_so(searching: ScriptedServer) -> None:
    says_search(searching, "nothing")
    answer = post(searching, [USER], tools=[SEARCHES])
    message = Message.model_validate(answer.json(), strict=True)
    assert message.content[1].content.error_code == "unavailable"


def test_a_search_without_a_browser_is_refused_by_name(scripted: ScriptedServer) -> None:
    for choice, param in ((None, "tools[0].type"), ({"type": "tool", "name": "web_search"}, "tool_choice")):
        refused = post(scripted, [USER], tools=[SEARCHES], tool_choice=choice)
        assert (refused.status_code, param in refused.text) == (400, True)
        assert "no tool of type 'web_search_20250305'" in refused.text
    beside = post(scripted, [USER], tools=[SEARCHES, FIND])
    assert (beside.status_code, beside.headers["x-tools-left-out"]) == (200, "web_search_20250305")


def test_domains_of_a_search_are_refused(searching: ScriptedServer) -> None:
    refused = post(searching, [USER], tools=[{**SEARCHES, "allowed_domains": ["a.test"]}])
    assert (refused.status_code, "tools[0].allowed_domains" in refused.text) == (400, True)


def test_what_differs_between_conversations_is_not_in_the_prompt(scripted: ScriptedServer) -> None:
    """The head of Claude Code's system prompt, ids of calls, metadata, places of caches."""

    def prompt(i: int) -> str:
        use = {"type": "tool_use", "id": f"toolu_{i}", "name": "ToolSearch", "input": {}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{i}", "content": "None.", "cache_control": None}
        marked = {"cache_control": {"type": "ephemeral"}} if i else {}
        turns = [USER, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=1.0.{i}; cch={i};"},
            {"type": "text", "text": "You write code.", **marked},
        ]
        thinking = {"type": "adaptive", "display": "updates"}
        who = {} if i else {"thinking": thinking}  # count_tokens knows no metadata
        return prompt_of(scripted, turns, system=system, tools=[FIND], **who)

    assert prompt(0) == prompt(1)
    assert "# Instructions\n\nYou write code.\n\n# Tools" in prompt(0)


def test_usage_has_the_details_of_anthropics_client(scripted: ScriptedServer) -> None:
    t = scripted.tokenizer
    scripted.says(
        t.channel,
        "analysis",
        t.message,
        "Hm.",
        t.end,
        t.start,
        "assistant",
        t.channel,
        "final",
        t.message,
        "A",
        t.return_,
    )
    given = post(scripted, [USER]).json()["usage"]
    usage = anthropic.types.Usage.model_validate(given, strict=True)
    assert usage.output_tokens_details is not None
    assert usage.cache_creation is not None
    assert usage.output_tokens_details.thinking_tokens == len(t.encode("Hm."))
    assert (usage.service_tier, usage.server_tool_use, usage.speed) == ("standard", None, "standard")
    assert (usage.cache_creation.ephemeral_5m_input_tokens, usage.cache_creation.ephemeral_1h_input_tokens) == (0, 0)
    (only,) = BetaUsage.model_validate(given, strict=True).iterations or ()
    assert only.type == "message"
    counts = (only.input_tokens, only.cache_read_input_tokens, only.output_tokens)
    assert counts == (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens)


def test_a_system_message_changes_the_tools(scripted: ScriptedServer) -> None:
    """As Claude Code does when a server of tools connects later."""

    def change(kind: str, **tool: Any) -> Json:
        return {"type": f"tool_{kind}", "tool": tool}

    inline = change("addition", type="tool_definition", definition={**FETCH, "name": "Late", "description": "Late."})
    system = {
        "role": "system",
        "content": [
            {"type": "text", "text": "Tools came."},
            change("addition", type="tool_reference", name="WebFetch"),
            change("removal", type="tool_reference", name="ToolSearch"),
            inline,
        ],
    }
    answer = {"role": "assistant", "content": "Yes."}
    before = prompt_of(scripted, [USER], tools=[FIND, FETCH])
    after = prompt_of(scripted, [USER, system], tools=[FIND, FETCH])
    assert after.startswith(before.removesuffix("<|start|>assistant"))
    added = after.removeprefix(before.removesuffix("<|start|>assistant"))
    said = "# Instructions\n\nTools came.\nThe tool ToolSearch is no longer available.\n\n# Tools"
    assert added.startswith(f"<|start|>developer<|message|>{said}")
    assert all(f"type {name} = (_: {{" in added for name in ("WebFetch", "Late"))
    headers = str(scripted.engine.requests[-1].sampling.headers)
    assert [f"functions.{name}" in headers for name in ("WebFetch", "Late", "ToolSearch")] == [True, True, False]
    shown = prompt_of(scripted, [USER, {**system, "clear_at": "next_user_message"}], tools=[FIND, FETCH])
    assert shown == after
    cleared = [USER, {**system, "clear_at": "next_user_message"}, answer, USER]
    later = prompt_of(scripted, cleared, tools=[FIND, FETCH])
    assert ("Tools came." in later, "type Late = " in later) == (False, True)
