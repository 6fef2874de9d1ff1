"""The built-in tools of a server: python, browser, MCP servers."""

import asyncio
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oscine.chat.toolbox import Tool
from oscine.extensions.tools.browser import Backend, BrowserTool
from oscine.extensions.tools.browser_folder import Folder
from oscine.extensions.tools.python import Jail, PythonTool
from oscine.settings.config import ToolOptions

if TYPE_CHECKING:
    from oscine.extensions.tools.mcp import Servers

_KINDS = {
    "code_interpreter": "python",
    **dict.fromkeys(("web_search", "web_search_2025_08_26"), "browser"),
    **dict.fromkeys(("web_search_preview", "web_search_preview_2025_03_11"), "browser"),
    "mcp": "mcp",
}


class BuiltinTools:
    """A ToolSource. Raises ValueError for options that cannot be honoured."""

    def __init__(self, options: ToolOptions) -> None:
        self._options = options
        self._jail = Jail(options) if "python" in options.tools else None
        self._backend: Backend | None = None
        if options.browser_backend is not None:
            self._backend = _imported(options.browser_backend)
        self._servers = _mcp_servers(options)

    @property
    def on_offer(self) -> list[dict[str, Any]]:
        """The tools that the operator enabled, as the `tools` of a request name them."""
        return [
            *([{"type": "code_interpreter", "container": {"type": "auto"}}] if self._jail is not None else ()),
            *([{"type": "web_search"}] if "browser" in self._options.tools else ()),
            *({"type": "mcp", "server_label": label} for label in (self._servers.labels if self._servers else ())),
        ]

    async def start(self) -> None:
        """Raises ValueError, in one line, if a tool cannot work on this machine."""
        if self._jail is not None:
            await self._jail.check()
        if self._options.browser_folder is not None:
            self._backend = await asyncio.to_thread(Folder, self._options.browser_folder)

    async def stop(self) -> None:
        if self._servers is not None:
            await self._servers.close()

    def open(self, tool: Mapping[str, Any], state: Mapping[str, Any]) -> Tool | None:
        """As in ToolSource. Python and the browser are None where they are not enabled: some clients always name them.

        Raises ValueError that says what is wrong with an MCP server, or that there is none.
        """
        kind = _KINDS.get(tool["type"])
        if kind == "python" and self._jail is not None:
            return PythonTool(self._jail, self._options)
        if kind == "browser" and self._backend is not None:
            return BrowserTool(self._backend, self._options.tool_timeout_s, state.get(kind))
        if kind != "mcp":
            return None
        if self._servers is None:
            raise ValueError("'mcp' is not enabled on this server; --mcp-servers enables it")
        return self._servers.tool(tool)


def _imported(path: str) -> Backend:
    """An instance of the class at package.module:name. Raises ValueError."""
    module, _, name = path.partition(":")
    try:
        backend: Backend = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"--browser-backend {path}: {error}") from None
    return backend


def _mcp_servers(options: ToolOptions) -> "Servers | None":
    """The package is imported only where it is needed: the import takes most of a second."""
    if options.mcp_servers is None and not options.allow_mcp_urls:
        return None
    try:
        from oscine.extensions.tools.mcp import Servers
    except ImportError as error:
        raise ValueError(f"--mcp-servers and --allow-mcp-urls need pip install 'oscine[tools]': {error}") from None
    return Servers(options.mcp_servers, options.allow_mcp_urls, options.tool_timeout_s)
