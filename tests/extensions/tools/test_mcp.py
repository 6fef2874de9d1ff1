"""Real MCP servers: one on stdio, one over streamable HTTP."""

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oscine.api.serving.tools import ServerTools
from oscine.chat.toolbox import McpCall, Toolbox, ToolResult
from oscine.extensions.tools.mcp import AllowedTools, McpTool
from oscine.extensions.tools.mcp_session import Connection, ServerEntry
from oscine.settings.config import ToolOptions
from tests.children import children
from tests.kept_port import kept_port
from tests.waiting import until

SERVER = str(Path(__file__).parent / "mcp_server.py")
STDIO: dict[str, Any] = {"command": sys.executable, "args": [SERVER], "env": {"TOKEN": "x"}}
SUMS = {"type": "mcp", "server_label": "sums"}
ALL = ["add", "fail", "dotted_name", "shout", "sleep", "environment", "header", "die"]


@pytest.fixture
def port() -> Iterator[int]:
    with kept_port() as port:
        yield port


@pytest.fixture
def start_http(port: int) -> Iterator[Callable[[], tuple[str, subprocess.Popen[bytes]]]]:
    """Starts a server on a port that stays the same, however often."""
    started = []

    def start() -> tuple[str, subprocess.Popen[bytes]]:
        process = subprocess.Popen([sys.executable, SERVER, str(port)], stderr=subprocess.DEVNULL)
        started.append(process)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return f"http://127.0.0.1:{port}/mcp", process
            time.sleep(0.05)
        raise AssertionError("the MCP server did not start")

    yield start
    for process in started:
        process.kill()
        process.wait()


def servers_file(folder: Path, **servers: Any) -> str:
    path = folder / "servers.json"
    path.write_text(json.dumps(servers))
    return str(path)


def use(options: ToolOptions, use_it: Callable[[ServerTools], Awaitable[None]]) -> None:
    async def run() -> None:
        tools = ServerTools(options)
        await tools.start()
        try:
            await use_it(tools)
        finally:
            await tools.stop()

    asyncio.run(run())


async def call(toolbox: Toolbox, tool: str, **arguments: Any) -> ToolResult:
    return await toolbox.call(f"sums.{tool}", json.dumps(arguments))


def test_a_command(tmp_path: Path) -> None:
    async def run(tools: ServerTools) -> None:
        async with tools.toolbox([SUMS]) as toolbox:
            (namespace,) = toolbox.namespaces
            assert [function.name for function in namespace.functions] == ALL
            add = namespace.functions[0]
            assert add.description == "Adds two numbers."
            assert add.parameters is not None
            assert add.parameters["required"] == ["a", "b"]
            (listing,) = toolbox.listings
            assert (listing.server_label, listing.error) == ("sums", None)
            assert listing.tools[0]["annotations"] == {"readOnlyHint": True}
            assert listing.tools[0]["input_schema"] == add.parameters
            assert listing.tools[2]["name"] == "dotted.name"

            arguments = '{"a":1, "b":2}'
            result = await toolbox.call("sums.add", arguments)
            assert result == ToolResult("3", McpCall("sums", "add", arguments, "3"))
            failed = await call(toolbox, "fail", reason="no")
            assert isinstance(failed.details, McpCall)
            assert (failed.is_error, failed.details.output, failed.details.error) == (True, None, failed.text)
            assert (await call(toolbox, "add", a="x")).text.startswith("Error executing tool add")
            assert json.loads((await call(toolbox, "dotted_name")).text) == {"deep": [1, {"x": "é"}]}
            assert len((await call(toolbox, "shout", times=10**6)).text) < 33_000
            environment = (await call(toolbox, "environment")).text.split("\n")
            assert "TOKEN" in environment
            assert not any(name.startswith(("OSCINE", "OPENAI", "PYTEST")) for name in environment)
            assert (await toolbox.call("sums.nothing", "{}")).text == "Error: there is no tool sums.nothing"
            assert "no JSON object" in (await toolbox.call("sums.add", "[1]")).text
            assert "no JSON object" in (await toolbox.call("sums.add", "[" * 100_000)).text

    use(ToolOptions(mcp_servers=servers_file(tmp_path, sums=STDIO)), run)
    assert not children(SERVER)


@pytest.mark.long
def test_a_command_that_dies_comes_back(tmp_path: Path) -> None:
    async def run(tools: ServerTools) -> None:
        async with tools.toolbox([SUMS]) as toolbox, tools.toolbox([SUMS]) as other:
            begun = tmp_path / "begun"
            waiting = asyncio.ensure_future(call(other, "sleep", seconds=100, begun=str(begun)))
            await until(begun.exists, "the call of the other")
            assert (await call(toolbox, "die")).text == "Error: the MCP server failed: Connection closed"
            assert (await waiting).text == "Error: the MCP server failed: Connection closed"
            assert (await call(other, "add", a=1, b=2)).text == "3"
            (process,) = children(SERVER)
            process.kill()
            process.wait()
        async with tools.toolbox([SUMS]) as toolbox:  # finds the connection broken, and makes another
            assert (await call(toolbox, "add", a=2, b=3)).text == "5"

    use(ToolOptions(mcp_servers=servers_file(tmp_path, sums=STDIO)), run)


def test_a_call_that_hangs_is_given_up() -> None:
    async def run() -> None:
        connection = Connection(ServerEntry(**STDIO), 60)
        tool = McpTool("sums", connection, AllowedTools(), owned=True)
        async with tool:
            connection.timeout_s = 0.3
            hung = await tool.call("sums.sleep", '{"seconds": 100}')
            assert hung.text == "Error: the MCP server failed: no answer within 0.3 seconds"
            connection.timeout_s = 60
            assert (await tool.call("sums.add", '{"a": 2, "b": 2}')).text == "4"

    asyncio.run(run())


def test_commands_that_are_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def run(tools: ServerTools) -> None:
        for label, error in (("absent", "No such file"), ("silent", "no answer within 2 seconds"), ("chatty", "")):
            async with tools.toolbox([SUMS | {"server_label": label}]) as toolbox:
                (listing,) = toolbox.listings
                assert listing.error is not None
                assert listing.error.startswith("The MCP server failed: ")
                assert error in listing.error
                assert toolbox.namespaces == ()
                assert (await toolbox.call(f"{label}.x", "{}")).is_error

    path = servers_file(
        tmp_path,
        absent={"command": "/no/such/command"},
        silent={"command": "sleep", "args": ["100"]},
        chatty={"command": "echo", "args": ["hello"]},
    )
    with caplog.at_level("INFO", "oscine.extensions.tools.mcp_session"):
        use(ToolOptions(mcp_servers=path, tool_timeout_s=2), run)
    assert "failed: /no/such/command: " in caplog.text


def test_an_address(start_http: Callable[[], tuple[str, subprocess.Popen[bytes]]]) -> None:
    url, process = start_http()

    async def run(tools: ServerTools) -> None:
        asked = SUMS | {"server_url": url, "require_approval": "never", "headers": {"x-key": "secret"}}
        asked |= {"authorization": "token"}
        async with tools.toolbox([asked]) as toolbox:
            assert (await call(toolbox, "add", a=1, b=2)).text == "3"
            assert (await call(toolbox, "header", name="x-key")).text == "secret"
            assert (await call(toolbox, "header", name="authorization")).text == "Bearer token"
        async with tools.toolbox([asked | {"allowed_tools": ["add", "shout"]}]) as toolbox:
            assert [function.name for function in toolbox.namespaces[0].functions] == ["add", "shout"]
            assert (await call(toolbox, "die")).text == "Error: there is no tool sums.die"
        async with tools.toolbox([asked | {"allowed_tools": {"read_only": True}}]) as toolbox:
            assert [tool["name"] for tool in toolbox.listings[0].tools] == ["add"]
            process.kill()
            process.wait()
            assert (await call(toolbox, "add", a=1, b=2)).text.startswith("Error: the MCP server failed: ")
            start_http()
            assert (await call(toolbox, "add", a=1, b=2)).text == "3"
        gone = asked | {"server_url": "http://127.0.0.1:9/mcp"}
        async with tools.toolbox([gone]) as toolbox:
            assert toolbox.listings[0].error is not None

    use(ToolOptions(allow_mcp_urls=True, tool_timeout_s=30), run)


def test_a_client_that_leaves_while_a_server_is_asked_leaves_nothing_behind() -> None:
    async def run() -> None:
        asked, left = asyncio.Event(), asyncio.Event()

        async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            asked.set()
            while await reader.read(65_536):
                pass
            writer.close()
            left.set()

        async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp?key=secret"
            tools = ServerTools(ToolOptions(allow_mcp_urls=True, tool_timeout_s=60))
            toolbox = tools.toolbox([SUMS | {"server_url": url, "require_approval": "never"}])
            entering = asyncio.ensure_future(toolbox.__aenter__())
            await asked.wait()
            entering.cancel()
            await asyncio.wait((entering,))
            async with asyncio.timeout(30):
                await left.wait()

    asyncio.run(run())


def test_the_log_shows_no_query_of_an_address(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            writer.close()

        async with await asyncio.start_server(nothing, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp?key=secret"
            async with McpTool("sums", Connection(ServerEntry(url=url), 30), AllowedTools(), owned=True) as tool:
                assert tool.listing.error == "The MCP server failed: Not Found."

    with caplog.at_level("INFO"):
        asyncio.run(run())
    assert "failed: 127.0.0.1: Not Found" in caplog.text
    assert "secret" not in caplog.text
