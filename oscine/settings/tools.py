"""Options of the tools that the server itself answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from oscine.settings.option import BYTES, OptionError, Options, option


@dataclass(frozen=True)
class FileSearchOptions(Options, group="tools"):
    max_vector_stores: int = option(100, "most vector stores of one API key; further ones get 413", "N", at_least=1)
    max_vector_store_chunks: int = option(
        100_000, "most chunks in all vector stores of one API key; further files get 413, or fail", "N", at_least=1
    )
    max_vector_store_file_bytes: int = option(
        64 << 20, "largest file that a vector store takes; a larger one gets 413", BYTES, above=0
    )
    embeddings_url: str | None = option(
        None,
        "OpenAI-compatible server for embeddings, such as http://127.0.0.1:8001/v1; its key is OSCINE_EMBEDDINGS_KEY",
        "URL",
        shown="none; search is by words alone",
        rule=("an address like http://127.0.0.1:8001/v1", lambda url: url.startswith(("http://", "https://"))),
    )
    embeddings_model: str | None = option(None, "model that --embeddings-url embeds with", "NAME", shown="none")
    embeddings_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.embeddings_url is None) is not (self.embeddings_model is None):
            raise OptionError("embeddings-url", "and --embeddings-model need each other", "embeddings-model")


@dataclass(frozen=True)
class ToolOptions(Options, group="tools"):
    """Tools that the server itself answers; none unless the operator names them."""

    tools: tuple[str, ...] = option(
        (),
        "built-in tools that requests may use: python, browser",
        "NAME,...",
        shown="none",
        choices=("python", "browser"),
        split=lambda names: names.split(","),
    )
    max_tool_calls: int = option(32, "most calls of built-in tools in one response", "N", at_least=1)
    tool_timeout_s: float = option(60.0, "seconds that an MCP server or the browser gets to answer", "SECONDS", above=0)
    python_isolation: Literal["namespaces", "none"] = option(
        "namespaces", "sandbox that isolates Python code from the machine; with none, only its resources are limited"
    )
    python_timeout_s: float = option(30.0, "seconds that Python code may run", "SECONDS", above=0)
    python_memory_bytes: int = option(
        512 << 20, "memory for each of the up to 8 processes of a run of Python code", BYTES, at_least=64 << 20
    )
    python_runs: int = option(4, "most runs of Python code at once; further ones wait", "N", at_least=1)
    browser_folder: str | None = option(
        None, "folder of the text, Markdown and HTML files that the browser searches and opens", "DIR"
    )
    browser_backend: str | None = option(None, "Python object that is searched instead of a folder", "MODULE:NAME")
    mcp_servers: str | None = option(
        None, "YAML or JSON file of MCP servers: label -> command, args, env, or url, headers", "FILE"
    )
    allow_mcp_urls: bool = option(False, "let requests name MCP servers by URL")
    file_search: FileSearchOptions = field(default_factory=FileSearchOptions)

    @classmethod
    def of(cls, values: Mapping[str, Any], **fields: Any) -> Self:
        return super().of(values, **{"file_search": FileSearchOptions.of(values), **fields})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.browser_folder is not None and self.browser_backend is not None:
            raise OptionError("browser-folder", "and --browser-backend exclude each other", "browser-backend")
        source = self.browser_folder or self.browser_backend
        if "browser" in self.tools and source is None:
            raise OptionError("tools", "browser needs --browser-folder or --browser-backend")
        if "browser" not in self.tools and source is not None:
            raise OptionError("browser-folder", "and --browser-backend need --tools browser", "browser-backend")
