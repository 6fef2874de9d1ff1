"""The tools that a server answers itself: where they come from, and a toolbox of them for each conversation.

Packages outside add tools by entry points of the group `oscine.tools`: classes of ToolSource.
"""

import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

from oscine.chat.toolbox import Tool, Toolbox
from oscine.settings.config import ToolOptions
from oscine.settings.option import OptionError
from oscine.system.extensions import added, is_there, lacking, load

logger = logging.getLogger(__name__)

GROUP = "oscine.tools"
BUILTIN = "oscine.extensions.tools.builtin:BuiltinTools"


class ToolSource(Protocol):
    """Tools of one kind, shared by all conversations of a server."""

    def __init__(self, options: ToolOptions) -> None:
        """Raises ValueError for options that cannot be honoured."""

    @property
    def on_offer(self) -> list[dict[str, Any]]:
        """The tools that the operator enabled, as the `tools` of a request name them."""

    async def start(self) -> None:
        """Raises ValueError, in one line, if a tool cannot work on this machine."""

    async def stop(self) -> None: ...

    def open(self, tool: Mapping[str, Any], state: Mapping[str, Any]) -> Tool | None:
        """The tool that an entry of a request's `tools` names, which has a `type`. None: it is not one of these, or not
        enabled. `state`: of all tools at the end of the conversation's last toolbox, by namespace.

        Raises ValueError that says what is wrong with it.
        """


class OwnedTools(Protocol):
    """Tools of an API, over what it keeps for each API key."""

    def open(self, tool: Mapping[str, Any], state: Mapping[str, Any], owner: str) -> Tool | None:
        """As ToolSource.open; `owner`: name of the key. Raises APIError."""


class ServerTools:
    """All tools of a server. Raises ValueError for options that cannot be honoured."""

    def __init__(self, options: ToolOptions) -> None:
        self._limit = options.max_tool_calls
        self._sources: list[ToolSource] = []
        self._owned: list[OwnedTools] = []
        if is_there(BUILTIN):
            self._sources.append(load(BUILTIN)(options))
        elif options.tools or options.mcp_servers is not None or options.allow_mcp_urls:
            named = "tools" if options.tools else "mcp-servers" if options.mcp_servers else "allow-mcp-urls"
            raise OptionError(named, lacking(BUILTIN))
        self._sources += added(GROUP, "the tools", logger.warning, lambda entry: entry.load()(options))

    def add(self, tools: OwnedTools) -> None:
        self._owned.append(tools)

    @property
    def on_offer(self) -> list[dict[str, Any]]:
        return [tool for source in self._sources for tool in source.on_offer]

    async def start(self) -> None:
        """Raises ValueError, in one line, if a tool cannot work on this machine."""
        for source in self._sources:
            await source.start()

    async def stop(self) -> None:
        for source in self._sources:
            await source.stop()

    def toolbox(
        self,
        tools: Sequence[Mapping[str, Any]],
        max_calls: int | None = None,
        state: Mapping[str, Any] | None = None,
        owner: str = "",
    ) -> Toolbox:
        """The tools of this server that a request's `tools` name; other tools are skipped, and those not enabled.

        `max_calls` may lower the server's own limit. `state` is the final state of the conversation's last toolbox,
        and `owner` the name of the API key. Raises ValueError or APIError that says what is wrong with one of them.
        """
        opened: dict[str, Tool] = {}
        for tool in tools:
            new = self._open(tool, state or {}, owner)
            if new is None:
                continue
            if new.namespace.name in opened and tool["type"] == "mcp":
                raise ValueError(f"the MCP server_label {new.namespace.name!r} is used twice")
            opened[new.namespace.name] = new
        return Toolbox([*opened.values()], self._limit if max_calls is None else min(self._limit, max_calls))

    def _open(self, tool: Mapping[str, Any], state: Mapping[str, Any], owner: str) -> Tool | None:
        found = chain(
            (source.open(tool, state) for source in self._sources),
            (tools.open(tool, state, owner) for tools in self._owned),
        )
        return next((tool for tool in found if tool is not None), None)
