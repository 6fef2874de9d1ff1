"""The JSON of responses and their lists as msgspec structs, for /openapi.json alone; see answers."""

from typing import Any, Literal

from msgspec import Struct

Object = dict[str, Any]


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(Struct):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    completed_at: int | None
    error: dict[str, str] | None
    frequency_penalty: float
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[Object]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: Object
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: Object
    tool_choice: str | Object
    tools: list[Object]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None


class ResponseInputTokens(Struct):
    object: Literal["response.input_tokens"]
    input_tokens: int


class CompactedResponse(Struct):
    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[Object]
    usage: ResponseUsage


class DeletedResponse(Struct):
    id: str
    object: Literal["response"]
    deleted: bool


class InputItems(Struct):
    object: Literal["list"]
    data: list[Object]
    first_id: str
    last_id: str
    has_more: bool
