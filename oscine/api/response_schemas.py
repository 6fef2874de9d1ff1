"""The JSON of a request for a response, as msgspec structs with strict types.

Items of the input and tools are plain objects here: clients send types that no server knows, and what they sent is kept
as it came. response_input and response_tools read them.
"""

from typing import Any, Literal

from msgspec import Struct

from oscine.api.schemas import SamplingFields, Verbosity
from oscine.chat.effort import Effort


class ReasoningConfig(Struct):
    effort: Effort | None = None
    summary: str | None = None


class TextFormatConfig(Struct):
    type: str = "text"
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct):
    format: TextFormatConfig | None = None
    verbosity: Verbosity | None = None


class ResponseRequest(SamplingFields, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    previous_response_id: str | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None
    # These change nothing and are repeated in the response.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Refused: they would change the answer.
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
