"""Bounds on what MCP servers send, and ordinary answers within them."""

import asyncio
import gzip
import json
import os
import select
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from benchmarks.serving.siege import mcp_servers
from benchmarks.serving.siege.mcp_servers import (
    EVENTS,
    HOSTILE,
    JSON,
    Answer,
    calling,
    listing,
    result,
    serving,
    text,
    tool,
)
from oscine.chat.toolbox import MAX_DECLARED_BYTES, McpCall, McpListing, Toolbox
from oscine.extensions.tools.mcp import AllowedTools, McpTool
from oscine.extensions.tools.mcp_session import Connection, ServerEntry
from oscine.extensions.tools.mcp_wire import MAX_MESSAGE_BYTES, Events, PipeWire, ServerError

ANY = AllowedTools()
FAILED = "Error: the MCP server failed: "


def saying(value: dict[str, Any], by: Callable[[Answer], Answer] = calling) -> Answer:
    """A server whose result this is."""

    async def answer(message: dict[str, Any]) -> AsyncIterator[bytes]:
        yield JSON + b"\r\n" + result(message, value)

    return by(answer)


def listed(used: McpTool) -> McpListing:
    assert used.listing is not None
    return used.listing


def opened(url: str, allowed: AllowedTools = ANY, timeout_s: float = 60) -> McpTool:
    return McpTool("s", Connection(ServerEntry(url=url), timeout_s), allowed, owned=True)


def asked(answer: Answer, allowed: AllowedTools = ANY, timeout_s: float = 60) -> tuple[McpTool, str]:
    """The tool, and what its first function says; the error of the listing if there is none."""

    async def run() -> tuple[McpTool, str]:
        async with serving(answer) as url, opened(url, allowed, timeout_s) as used:
            error = listed(used).error
            if error is not None:
                return used, error
            name = used.namespace.functions[0].name
            return used, (await used.call(f"s.{name}", "{}")).text

    return asyncio.run(run())


# ---- ordinary answers ----


def test_a_long_text_is_cut_for_the_model() -> None:
    csv = '"a,b",[{:1}]\n' * 38_000  # 500 KB, with structural marks in strings
    _, said = asked(saying(text(csv)))
    assert said.startswith(csv[:16_000])
    assert said.endswith(csv[-16_000:])
    assert f"[... {len(csv) - 32_768} characters left out ...]" in said


def test_images_and_resources_are_named() -> None:
    image = {"type": "image", "data": "A" * 3_200_000, "mimeType": "image/png"}
    sound = {"type": "audio", "data": "AAAA"}
    resource = {"type": "resource", "resource": {"uri": "file:///a", "text": "inside", "mimeType": "text/plain"}}
    blob = {"type": "resource", "resource": {"uri": "file:///b", "blob": "AAAA", "mimeType": "image/gif\n" * 99}}
    link = {"type": "resource_link", "name": "n", "uri": "file:///c"}
    _, said = asked(saying({"content": [image, sound, resource, blob, link], "isError": False}))
    lines = said.split("\n")
    assert [*lines[:3], lines[4]] == [
        "[image: image/png; not shown, as this model reads text only]",
        "[audio: of an unknown kind; not shown, as this model reads text only]",
        "inside",
        "[n: file:///c]",
    ]
    assert lines[3].startswith("[resource: file:///b, image/gif")
    assert len(lines[3]) < 300


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"content": [], "structuredContent": {"x": "é", "y": [1, None]}}, '{"x": "é", "y": [1, null]}'),
        ({"structuredContent": {"x": 1}}, '{"x": 1}'),
        ({"content": [{"type": "text", "text": "cut \ud83d"}]}, "cut \ufffd"),  # within an emoji
        ({"structuredContent": {"x": "cut \ud83d"}}, '{"x": "cut \ufffd"}'),
        ({"content": []}, "[no output]"),
        ({"content": [], "structuredContent": None, "isError": None}, "[no output]"),
        ({"content": [{"type": "text", "text": "a", "name": None, "uri": None, "resource": None}]}, "a"),
        ({"content": [{"type": "resource_link", "name": None, "uri": "file:///c"}]}, "[link: file:///c]"),
        ({"content": [{"type": "text", "text": "a", "later": {"x": [1]}}], "_meta": {}}, "a"),
        ({"content": 5}, FAILED + "its answer is malformed: Expected `array`, got `int` - at `$.content`"),
        ({"resultType": "input_required"}, FAILED + "its answer of type 'input_required' is not supported"),
    ],
)
def test_other_answers(value: dict[str, Any], said: str) -> None:
    assert asked(saying(value))[1] == said


def test_an_answer_among_events() -> None:
    @calling
    async def answer(message: dict[str, Any]) -> AsyncIterator[bytes]:
        note = json.dumps({"jsonrpc": "2.0", "method": "notifications/progress", "params": {"progress": 1}}).encode()
        yield EVENTS + b": hello\r\n\r\nevent: other\r\ndata: {}\r\n\r\nid: 1\r\ndata:\r\n\r\n"
        yield b"data: " + note + b"\r"
        yield b"\n\r\ndata: " + result(message, text("found")) + b"\n\n"

    assert asked(answer)[1] == "found"


def test_an_interrupted_stream_is_continued() -> None:
    resumed = []

    @calling
    async def answer(message: dict[str, Any]) -> AsyncIterator[bytes]:
        yield EVENTS + b"id: 5\nretry: 1\ndata:\n\n"

    async def either(message: dict[str, Any]) -> AsyncIterator[bytes]:
        if message["method"]:
            async for piece in answer(message):
                yield piece
        else:  # a GET
            resumed.append(1)
            yield EVENTS + (b"" if len(resumed) < 2 else b"data: " + result({"id": 9}, text("continued")) + b"\n\n")

    assert asked(either)[1] == "continued"
    assert len(resumed) == 2


def test_five_tools_of_three_thousand_are_allowed() -> None:
    tools = [tool(f"t{i}") | {"annotations": {"readOnlyHint": i % 2 == 0}} for i in range(3000)]
    some = AllowedTools(frozenset(f"t{i}" for i in range(2990, 2995)))
    used, said = asked(saying({"tools": tools}, listing), some)
    assert said == "taken"
    assert [function.name for function in used.namespace.functions] == [f"t{i}" for i in range(2990, 2995)]
    assert [about["annotations"] for about in listed(used).tools][:2] == [
        {"readOnlyHint": True},
        {"readOnlyHint": False},
    ]
    used, _ = asked(saying({"tools": tools}, listing), AllowedTools(some.tool_names, read_only=True))
    assert [function.name for function in used.namespace.functions] == ["t2990", "t2992", "t2994"]


def test_names_that_become_equal_differ() -> None:
    names = ["a.b", "a_b", "a b", "a_b_2", "a.b", "", "x" * 70, "x" * 69 + "y"]
    used, _ = asked(saying({"tools": [tool(name) for name in names]}, listing))
    known = [function.name for function in used.namespace.functions]
    assert known == ["a_b", "a_b_2", "a_b_3", "a_b_2_2", "_", "x" * 64, "x" * 62 + "_2"]


def test_equal_names_reach_their_own_tool() -> None:
    called = []

    @calling
    async def answer(message: dict[str, Any]) -> AsyncIterator[bytes]:
        called.append(message["params"]["name"])
        yield JSON + b"\r\n" + result(message, text("ok"))

    async def either(message: dict[str, Any]) -> AsyncIterator[bytes]:
        two = saying({"tools": [tool("a.b"), tool("a_b")]}, listing)
        async for piece in (two if message["method"] == "tools/list" else answer)(message):
            yield piece

    async def run() -> None:
        async with serving(either) as url, opened(url) as used:
            for name, original in (("a_b", "a.b"), ("a_b_2", "a_b")):
                details = (await used.call(f"s.{name}", "{}")).details
                assert isinstance(details, McpCall)
                assert details.name == original

    asyncio.run(run())
    assert called == ["a.b", "a_b"]


# ---- hostile ones ----

TOO_LONG = "its message is longer than 4 MiB"
UNASKED = "it sends too much that is no answer"
PAGES = "its list of tools has more than 100 pages"
TOO_MUCH = "its tools take too much room; choose some with 'allowed_tools'"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("100,000 small tools", TOO_MUCH),
        ("a schema of 20,000 properties", TOO_MUCH),
        ("endless pages", PAGES),
        ("an endless body", TOO_LONG),
        ("an endless event", TOO_LONG),
        ("endless comments", UNASKED),
        ("empty lines", UNASKED),
        ("a flood of progress", UNASKED),
        ("a flood of logs", UNASKED),
        ("a flood of requests", UNASKED),
    ],
)
@pytest.mark.long
def test_a_hostile_server_fails_alone(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if said == UNASKED:
        monkeypatch.setattr("oscine.extensions.tools.mcp_wire._MAX_UNASKED_BYTES", 1 << 16)  # to be quick
    instead = listing if said in (TOO_MUCH, PAGES) else calling
    assert said in asked(instead(HOSTILE[name]))[1]


@pytest.mark.parametrize("name", ["a slow drip", "silence"])
@pytest.mark.long
def test_the_timeout_is_of_the_whole_call(name: str) -> None:
    assert asked(calling(HOSTILE[name]), timeout_s=0.5)[1] == FAILED + "no answer within 0.5 seconds"


@pytest.mark.long
def test_a_compressed_answer_is_counted_when_it_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    read, real = [], httpx2.Response.aiter_bytes

    async def counted(response: httpx2.Response) -> AsyncIterator[bytes]:
        async for piece in real(response):
            read.append(len(piece))
            yield piece

    monkeypatch.setattr(httpx2.Response, "aiter_bytes", counted)
    assert TOO_LONG in asked(calling(HOSTILE["gzip bomb"]))[1]
    assert sum(read) <= MAX_MESSAGE_BYTES + (2 << 20)
    assert max(read) <= 1 << 20


def test_compressed_answers_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    @calling
    async def answer(message: dict[str, Any]) -> AsyncIterator[bytes]:
        yield JSON + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(result(message, text("packed")))

    assert asked(answer)[1] == "packed"


def test_errors_are_short_and_plain() -> None:
    @calling
    async def answer(message: dict[str, Any]) -> AsyncIterator[bytes]:
        error = {"code": 1, "message": "\x1b[2J\n" + "e" * 100_000}
        yield JSON + b"\r\n" + json.dumps({"jsonrpc": "2.0", "id": 1, "error": error}).encode()

    said = asked(answer)[1]
    assert len(said) < 1200
    assert said.isprintable()


def test_a_failed_answer_costs_a_shared_session_nothing() -> None:
    """The session stays, and so do the calls of others."""
    begun = []

    @calling
    async def answer(message: dict[str, Any]) -> AsyncIterator[bytes]:
        if message["params"]["arguments"]:
            yield JSON + b"\r\n" + b" " * (MAX_MESSAGE_BYTES + 1)
        else:
            yield JSON + b"\r\n" + result(message, text("fine"))

    async def watched(message: dict[str, Any]) -> AsyncIterator[bytes]:
        begun.append(message["method"])
        async for piece in answer(message):
            yield piece

    async def run() -> None:
        async with serving(watched) as url:
            connection = Connection(ServerEntry(url=url), 60)
            async with McpTool("s", connection, ANY, owned=False) as used:
                calls = [used.call("s.take", arguments) for arguments in ('{"x": 1}', "{}", '{"x": 1}', "{}")]
                said = [answer.text for answer in await asyncio.gather(*calls)]
                assert [TOO_LONG in text for text in said] == [True, False, True, False]
            await connection.close()

    asyncio.run(run())
    assert begun.count("initialize") == 1


def test_a_session_that_failed_is_opened_again() -> None:
    """Also where the failure is at the beginning, or the server has forgotten the session."""
    state = {"healthy": False, "known": True}

    async def answer(message: dict[str, Any]) -> AsyncIterator[bytes]:
        if message["method"] == "initialize":
            state["known"] = True
        if not state["healthy"]:
            yield b"HTTP/1.1 500 Internal Server Error\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        elif not state["known"]:
            yield b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        else:
            head = JSON + b"Mcp-Session-Id: 1\r\n" if message["method"] == "initialize" else JSON
            async for piece in mcp_servers.ordinary(message):
                yield piece.replace(JSON, head)

    async def run() -> None:
        async with serving(answer) as url:
            connection = Connection(ServerEntry(url=url), 60)
            listings = []
            for healthy, known in (
                (False, True),
                (True, True),
                (True, False),
                (True, True),
                (False, True),
                (True, True),
            ):
                state.update(healthy=healthy, known=known)
                async with McpTool("s", connection, ANY, owned=False) as used:
                    listings.append(listed(used).error)
            failed = "The MCP server failed: its answer has the status 500."
            assert listings == [failed, None, None, None, failed, None]
            await connection.close()

    asyncio.run(run())


def test_servers_of_a_conversation_share_the_room() -> None:
    tools = [tool(f"t{i}", 100) for i in range(40)]

    async def run() -> None:
        async with serving(saying({"tools": tools}, listing)) as url:
            made = [McpTool(f"s{i}", Connection(ServerEntry(url=url), 60), ANY, owned=True) for i in range(3)]
            async with Toolbox(made, 1) as toolbox:
                assert [listing.error is None for listing in toolbox.listings] == [True, True, False]
                assert MAX_DECLARED_BYTES / 2 < toolbox.size <= MAX_DECLARED_BYTES

    asyncio.run(run())


def test_values_that_are_not_shown_are_not_decoded() -> None:
    assert asked(calling(mcp_servers.many_blocks))[1].startswith("\n" * 16_000)


def test_events_of_any_line_ends_and_cuts() -> None:
    stream = b"data: a\r\ndata: b\r\rid: 7\n\nevent: x\ndata: no\n\ndata:c\n\n"
    for cut in range(len(stream)):
        events = Events()
        assert [*events.feed(stream[:cut]), *events.feed(stream[cut:])] == [b"a\nb", b"c"]
        assert events.last_id == "7"


def test_an_event_is_bounded_and_a_stream_is_not() -> None:
    events = Events()
    large = b"data: " + b"x" * (1 << 20) + b"\n\n"
    assert sum(len(data) for _ in range(10) for data in events.feed(large)) > 2 * MAX_MESSAGE_BYTES
    with pytest.raises(ServerError, match="longer"):
        [*events.feed(b"data: x\n" * 10), *events.feed(b"y" * MAX_MESSAGE_BYTES)]


# ---- commands ----

PIPES = """
import json, sys
def say(**message): sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\\n"); sys.stdout.flush()
for line in sys.stdin:
    message = json.loads(line)
    method, number = message.get("method"), message.get("id")
    if method == "initialize": say(id=number, result={"protocolVersion": "2025-06-18"})
    elif method == "tools/list": say(id=number, result={"tools": [{"name": "t", "inputSchema": {}}]})
    elif method == "tools/call":
        what = message["params"]["arguments"].get("what")
        if what == "long": sys.stdout.write("x" * (5 << 20) + "\\n"); sys.stdout.flush()
        if what == "log":
            sys.stdout.write("\\n\\r\\na line of a log\\n")
            say(method="notifications/message", params={})
            say(id=1, method="sampling/createMessage")
        if what == "broken": sys.stdout.write('{"id": [\\n'); sys.stdout.flush()
        while what == "flood": say(method="notifications/message", params={})
        while what == "endless": sys.stdout.write("x" * 65536)
        say(id=number, result={"content": [{"type": "text", "text": "fine"}]})
    elif method is None and "error" in message: sys.stderr.write("")
    elif number is not None: say(id=number, error={"code": -32601, "message": "no"})
"""


@pytest.mark.long
def test_a_command_is_bounded_too() -> None:
    async def run() -> None:
        connection = Connection(ServerEntry(command=sys.executable, args=["-S", "-E", "-c", PIPES]), 60)
        async with McpTool("s", connection, ANY, owned=True) as used:
            said = []
            for what in ("broken", "", "long", "log", "flood", "", "endless", "", ""):
                said.append((await used.call("s.t", json.dumps({"what": what}))).text)
            assert said[0].startswith(FAILED + "its message is malformed: ")
            assert said[1:5] == ["fine", FAILED + TOO_LONG, "fine", FAILED + UNASKED]
            assert said[5:] == ["fine", FAILED + TOO_LONG, FAILED + UNASKED, "fine"]

    asyncio.run(run())


def test_what_a_command_has_started_ends_with_it(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reading = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    script = '(echo; exec sleep 300) >"$0" & cat >/dev/null'  # the shell ends with its input, the other does not

    async def run() -> None:
        wire = await PipeWire.open("sh", ["-c", script, str(fifo)], {}, None)
        assert select.select([reading], [], [], 60)[0]
        assert os.read(reading, 9) == b"\n"
        await wire.close()

    try:
        asyncio.run(run())
        assert select.select([reading], [], [], 60)[0]
        assert os.read(reading, 9) == b""
    finally:
        os.close(reading)
