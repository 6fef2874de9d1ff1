"""The built-in tools of a server: which requests may use, and a toolbox of them for each conversation.

Knows the types of tools that requests name; not the items that responses have for them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from oscine.config import ToolOptions
from oscine.tools.python import Jail, PythonTool
from oscine.tools.toolbox import Tool, Toolbox

_KINDS = {
    "code_interpreter": "python",
    "web_search": "browser",
    "web_search_preview": "browser",
    "mcp": "mcp",
}


class BuiltinTools:
    """Shared by all conversations of a server. Raises ValueError for options that cannot be honoured."""

    def __init__(self, options: ToolOptions) -> None:
        self._options = options
        self._jail = Jail(options) if "python" in options.tools else None

    async def start(self) -> None:
        """Raises ValueError, in one line, if a tool cannot work on this machine."""
        if self._jail is not None:
            await self._jail.check()

    async def stop(self) -> None:
        pass

    def toolbox(
        self, tools: Sequence[Mapping[str, Any]], max_calls: int | None = None, state: Mapping[str, Any] | None = None
    ) -> Toolbox:
        """What a request's `tools` ask for of those that the server answers itself; others are passed over.

        `max_calls` may lower the server's own limit. `state` is what the conversation's last toolbox ended with.
        Raises ValueError that names a tool which is not enabled, or what is wrong with it.
        """
        opened: dict[str, Tool] = {}
        for tool in tools:
            if (kind := _KINDS.get(tool["type"])) is None:
                continue
            new = self._open(kind, tool)
            if new.namespace.name in opened and kind == "mcp":
                raise ValueError(f"the MCP server_label {new.namespace.name!r} is used twice")
            opened[new.namespace.name] = new
        limit = self._options.max_tool_calls
        return Toolbox([*opened.values()], limit if max_calls is None else min(limit, max_calls))

    def _open(self, kind: str, tool: Mapping[str, Any]) -> Tool:
        if kind == "python" and self._jail is not None:
            return PythonTool(self._jail, self._options)
        raise ValueError(f"{tool['type']!r} is not enabled on this server; --tools {kind} enables it")
