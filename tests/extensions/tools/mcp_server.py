"""An MCP server for the tests: `python mcp_server.py` on stdio, `python mcp_server.py PORT` over streamable HTTP."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp_types import ToolAnnotations

server = MCPServer("sums")


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool()
def fail(reason: str) -> str:
    raise ValueError(reason)


@server.tool(name="dotted.name")
def dotted() -> dict[str, Any]:
    return {"deep": [1, {"x": "é"}]}


@server.tool()
def shout(times: int) -> str:
    return "a" * times


@server.tool()
async def sleep(seconds: float, begun: str = "") -> str:
    """`begun`: a file that shows that the call has arrived."""
    if begun:
        Path(begun).touch()
    await asyncio.sleep(seconds)
    return "slept"


@server.tool()
def environment() -> list[str]:
    return sorted(os.environ)


@server.tool()
def header(name: str, ctx: Context) -> str:
    return ctx.request_context.request.headers.get(name, "")


@server.tool()
def die() -> str:
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run("stdio")
