"""The built-in tools of a server, the parameters of requests for them, and the toolbox of a conversation."""

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pytest

from oscine.api.serving.tools import ServerTools
from oscine.chat.messages import ToolNamespace
from oscine.chat.toolbox import CodeRun, Tool, Toolbox, ToolResult, bounded
from oscine.extensions.tools.browser import Hit
from oscine.extensions.tools.browser_page import Document
from oscine.settings.config import ToolOptions


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> ServerTools:
    tmp_path = tmp_path_factory.mktemp("tools")
    (tmp_path / "a.txt").write_text("a wren")
    (tmp_path / "servers.yaml").write_text("wiki: {url: 'http://127.0.0.1:9/mcp'}")
    options = ToolOptions(
        ("python", "browser"),
        browser_folder=str(tmp_path),
        mcp_servers=str(tmp_path / "servers.yaml"),
        max_tool_calls=5,
    )
    tools = ServerTools(options)
    asyncio.run(tools.start())
    return tools


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("code_interpreter", {"python"}),
        ("web_search", {"browser"}),
        ("web_search_2025_08_26", {"browser"}),
        ("web_search_preview", {"browser"}),
        ("function", set()),
        ("file_search", set()),
    ],
)
def test_types_of_requests(tools: ServerTools, kind: str, names: set[str]) -> None:
    toolbox = tools.toolbox([{"type": kind}, {"type": kind}])
    assert toolbox.names == names
    for recipient in ("functions.python", "pythonic"):
        assert asyncio.run(toolbox.call(recipient, "1")).text == f"Error: there is no tool {recipient}."


def test_what_is_on_offer_can_be_asked_for_as_it_is(tools: ServerTools) -> None:
    assert tools.on_offer == [
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "web_search"},
        {"type": "mcp", "server_label": "wiki"},
    ]
    assert tools.toolbox(tools.on_offer).names == {"python", "browser", "wiki"}
    assert ServerTools(ToolOptions()).on_offer == []


def test_what_is_not_enabled_is_passed_over_but_for_servers() -> None:
    tools = ServerTools(ToolOptions())
    assert tools.toolbox([{"type": "code_interpreter"}, {"type": "web_search"}]).names == set()
    with pytest.raises(ValueError, match="'mcp' is not enabled on this server; --mcp-servers enables it"):
        tools.toolbox([{"type": "mcp", "server_label": "x"}])


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({}, "Object missing required field `server_label`"),
        ({"server_label": "a b"}, "'a b' is not 1 to 64 letters"),
        ({"server_label": "python"}, "'python' has a meaning of its own"),
        ({"server_label": "functions"}, "'functions' has a meaning of its own"),
        ({"server_label": "other"}, "this server has no MCP server 'other'; it has wiki"),
        ({"server_label": "x", "server_url": "http://x"}, "require_approval must be 'never'"),
        ({"server_label": "x", "server_url": "http://x", "require_approval": "never"}, "--allow-mcp-urls enables it"),
        ({"server_label": "wiki", "require_approval": "always"}, "require_approval must be 'never'"),
        ({"server_label": "wiki", "connector_id": "c"}, "connector_id is not supported"),
        ({"server_label": "wiki", "allowed_tools": 3}, "`$.allowed_tools`"),
    ],
)
def test_mcp_tools_that_are_refused(tools: ServerTools, asked: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError) as raised:
        tools.toolbox([{"type": "mcp", **asked}])
    assert error in str(raised.value)


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "http:///x", "https://", "http://[::1/x", "http://x:y/z", "http"]
)
def test_a_url_must_be_of_http(url: str) -> None:
    asked = {"type": "mcp", "server_label": "x", "server_url": url, "require_approval": "never"}
    with pytest.raises(ValueError, match="url must begin with http"):
        ServerTools(ToolOptions(allow_mcp_urls=True)).toolbox([asked])


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"authorization": "secret\n"}, "Authorization"),
        ({"headers": {"x-key": " secret"}}, "x-key"),
        ({"headers": {"x-key": "secret\r\nx-other: y"}}, "x-key"),
        ({"headers": {"x-key": "secreté"}}, "x-key"),
        ({"headers": {"x key": "secret"}}, "x key"),
        ({"headers": {"": "secret"}}, ""),
    ],
)
def test_headers_that_cannot_be_sent_are_refused_by_name_alone(asked: dict[str, Any], name: str) -> None:
    asked |= {"type": "mcp", "server_label": "x", "server_url": "http://x", "require_approval": "never"}
    with pytest.raises(ValueError, match=f"the header {name!r} cannot be sent") as raised:
        ServerTools(ToolOptions(allow_mcp_urls=True)).toolbox([asked])
    assert "secret" not in str(raised.value)


def test_a_label_is_used_once(tools: ServerTools) -> None:
    wiki = {"type": "mcp", "server_label": "wiki"}
    with pytest.raises(ValueError, match="'wiki' is used twice"):
        tools.toolbox([wiki, wiki])


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (None, "No such file"),
        ("[1]", "must be a mapping of labels to servers"),
        ("a: [", "while parsing"),
        ("x y: {command: a}", "'x y' is not 1 to 64 letters"),
        ("browser: {command: a}", "'browser' has a meaning of its own"),
        ("a: {}", "a: needs either command or url"),
        ("a: {command: b, url: 'http://c'}", "a: needs either command or url"),
        ("a: {url: 'ftp://c'}", "a: url must begin with http"),
        ("a: {url: 'http://c', headers: {b: 'c '}}", "a: the header 'b' cannot be sent"),
        ("a: {command: b, arguments: []}", "a: Object contains unknown field `arguments`"),
        ("a: {command: b, args: x}", "a: Expected `array`, got `str` - at `$.args`"),
        ("a: [", "servers.yaml is not YAML: line 1: expected"),
        ("a: 3", "a: Expected `object`, got `int`"),
    ],
)
def test_files_of_servers_that_are_refused(tmp_path: Path, content: str | None, error: str) -> None:
    path = tmp_path / "servers.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError) as raised:
        ServerTools(ToolOptions(mcp_servers=str(path)))
    assert str(raised.value).startswith(f"--mcp-servers {path}")
    assert error in str(raised.value)


def test_other_programs_files_of_servers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "servers.json"
    path.write_text('{"mcpServers": {"wiki": {"command": "a", "args": ["b"], "env": {"C": "d"}}}}')
    assert ServerTools(ToolOptions(mcp_servers=str(path))).toolbox([{"type": "mcp", "server_label": "wiki"}]).names == {
        "wiki"
    }


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"tools": ("python", "shell")}, "--tools must be python or browser, not 'shell'"),
        ({"tools": ("browser",)}, "--tools browser needs --browser-folder or --browser-backend"),
        ({"browser_folder": "."}, "need --tools browser"),
        ({"tools": ("browser",), "browser_folder": ".", "browser_backend": "a:b"}, "exclude each other"),
        ({"max_tool_calls": 0}, "--max-tool-calls must be at least 1"),
        ({"tool_timeout_s": 0}, "--tool-timeout-s must be positive"),
        ({"python_timeout_s": 0}, "--python-timeout-s must be positive"),
        ({"python_memory_bytes": 1}, "--python-memory-bytes must be at least 67108864"),
        ({"python_runs": 0}, "--python-runs must be at least 1"),
        ({"python_isolation": "some"}, "--python-isolation must be namespaces or none"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ToolOptions(**options)


def test_another_backend_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        async def search(self, query: str, topn: int) -> Sequence[Hit]:
            return [Hit("https://birds.example/wren", "Wrens", f"{query}!")][:topn]

        async def open(self, url: str) -> Document:
            return Document(url, "Wrens", "small")

    module = ModuleType("a_backend")
    module.Backend = Backend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_backend", module)

    async def search(path: str) -> str:
        tools = ServerTools(ToolOptions(("browser",), browser_backend=path))
        async with tools.toolbox([{"type": "web_search"}]) as toolbox:
            return (await toolbox.call("browser.search", '{"query": "hm"}')).text

    assert "【0†Wrens†birds.example】\nL1: hm!" in asyncio.run(search("a_backend:Backend"))
    for path in ("a_backend:Other", "no_such_module:Backend", "a_backend", ":"):
        with pytest.raises(ValueError, match="--browser-backend"):
            asyncio.run(search(path))


def test_state_goes_on_in_the_next_toolbox(tools: ServerTools) -> None:
    asked = [{"type": "web_search"}, {"type": "code_interpreter"}]

    async def run() -> None:
        async with tools.toolbox(asked) as toolbox:
            await toolbox.call("browser.search", '{"query": "wren"}')
            state = toolbox.state()
        async with tools.toolbox(asked, state=state) as toolbox:
            assert (await toolbox.call("browser.open", '{"id": 0}')).text.startswith("[1] a.txt (file:///a.txt)")
            (citation,) = toolbox.citations("so【1†L0】")
            assert citation.source.url == "file:///a.txt"

    asyncio.run(run())


class Broken(Tool):
    def __init__(self) -> None:
        self.namespace = ToolNamespace("python", "Breaks.")
        self.entered = 0

    async def __aenter__(self) -> Self:
        self.entered += 1
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.entered -= 1

    async def call(self, recipient: str, content: str) -> ToolResult:
        if content:
            raise RuntimeError("a bug")
        return ToolResult("fine", CodeRun(content, "fine"))


def test_a_tool_that_breaks_is_told_to_the_model(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        tool = Broken()
        async with Toolbox([tool], 9) as toolbox:
            assert tool.entered == 1
            assert await toolbox.call("python", "x") == ToolResult("Error: the tool failed.", None, is_error=True)
            assert (await toolbox.call("python", "")).text == "fine"
            assert (await toolbox.call("ruby", "")).text == "Error: there is no tool ruby."
        assert tool.entered == 0

    asyncio.run(run())
    assert "the tool python failed" in caplog.text


def test_calls_are_bounded(tools: ServerTools) -> None:
    async def run() -> None:
        async with Toolbox([Broken()], 2) as toolbox:
            await toolbox.call("python", "")
            assert not toolbox.exhausted
            await toolbox.call("python", "")
            assert toolbox.exhausted
            refused = await toolbox.call("python", "")
            assert (refused.is_error, refused.details) == (True, None)
            assert refused.text.startswith("Error: no more calls")

    asyncio.run(run())


def test_long_texts_keep_both_ends() -> None:
    assert bounded("abc", 3) == "abc"
    assert bounded("a" * 5 + "b" * 5, 4) == "aa\n[... 6 characters left out ...]\nbb"
