"""The JSON of Anthropic's Messages API, as msgspec structs. Values are judged in anthropic_request.

As in schemas: a parameter that changes nothing here (`metadata`, `cache_control`, `service_tier`...) has no field.
"""

from typing import Any, Literal

from msgspec import Struct

from oscine.chat.effort import Effort


class Block(Struct):
    """A part of a message; which fields it has depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None  # of a result: a text or blocks
    is_error: bool | None = None


class AnthropicMessage(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(Struct):
    name: str
    type: str | None = None  # absent or "custom": a function of the client's
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AnthropicToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Struct):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct):
    effort: Effort | None = None
    format: OutputFormat | None = None


class CountTokensRequest(Struct, kw_only=True):
    """What there is to read. None is "not given" throughout."""

    model: str
    messages: list[AnthropicMessage]
    system: str | list[Block] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    thread: Any = None  # refused in the way that makes clients go on without it


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    cache_salt: str | None = None  # as vLLM extends the API
    # Refused: they would change the answer.
    mcp_servers: list[Any] | None = None
    container: Any = None
