"""The JSON of a response object (its parameters, status and output), and the record that is stored with it."""

import time
from collections.abc import Collection, Sequence

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from oscine.api.http.errors import APIError
from oscine.api.responses.schemas import ResponseAnswer, ResponseRequest, ResponseUsage, TextFormatConfig
from oscine.api.responses.tools import repeated
from oscine.api.responses.view import Object, shown
from oscine.api.serving.turn import Turn
from oscine.chat import effort

TERMINAL: dict[str, str] = {
    "completed": "completed",
    "incomplete": "incomplete",
    "failed": "failed",
    "cancelled": "incomplete",
}
ENDED = frozenset(TERMINAL)


class KeptResponse(Struct):
    """A response as it is stored, with data for the server alone."""

    response: ResponseAnswer  # with all that an `include` may ask for
    calls: dict[str, list[str]]  # of built-in tools; see History.add
    tools: Object  # state of the toolbox, for the next response


class KeptItem(Struct):
    """An item as it is stored for references to it."""

    item: Object
    call: list[str] | None = None  # of a built-in tool


def new_response(response_id: str, body: ResponseRequest, model: str, namespaces: Collection[str]) -> ResponseAnswer:
    """A response that has not begun; `namespaces` are those of its built-in tools."""
    reasoning, text = body.reasoning, body.text
    return ResponseAnswer(
        id=response_id,
        object="response",
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        completed_at=None,
        error=None,
        frequency_penalty=body.frequency_penalty or 0.0,
        incomplete_details=None,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=model,
        output=[],
        parallel_tool_calls=body.parallel_tool_calls is not False,
        presence_penalty=body.presence_penalty or 0.0,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": (reasoning and reasoning.effort) or effort.DEFAULT, "summary": body.summary},
        safety_identifier=body.safety_identifier,
        service_tier="default",
        store=body.store is not False,
        temperature=1.0 if body.temperature is None else body.temperature,
        text={
            "format": _text_format(text.format if text else None),
            "verbosity": (text and text.verbosity) or "medium",
        },
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=repeated(body.tools or (), namespaces),
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        truncation=body.truncation or "disabled",
        usage=None,
        user=body.user,
    )


def _text_format(wanted: TextFormatConfig | None) -> Object:
    if wanted is None or wanted.type != "json_schema":
        return {"type": wanted.type if wanted else "text"}
    return {
        "type": "json_schema",
        "name": wanted.name,
        "description": wanted.description,
        "schema": wanted.schema or {},
        "strict": wanted.strict,
    }


def with_output(response: ResponseAnswer, items: Sequence[Object], include: Collection[str]) -> ResponseAnswer:
    return replace(response, output=[shown(item, include) for item in items])


def usage(turn: Turn) -> ResponseUsage:
    """The input tokens are all tokens that the model read, results of tools too, each once."""
    read, made = turn.num_prompt_tokens + turn.num_appended_tokens, turn.num_tokens
    cached = {"cached_tokens": turn.num_cached_tokens, "cache_write_tokens": 0}
    return ResponseUsage(read, cached, made, {"reasoning_tokens": turn.num_reasoning_tokens}, read + made)


def failure(error: APIError) -> dict[str, str]:
    """An error within a response, which knows few codes."""
    return {"code": "rate_limit_exceeded" if error.status == 429 else "server_error", "message": error.message}


def interrupted(body: bytes) -> bytes:
    """The stored response of a server that died, marked as failed."""
    kept = msgspec.json.decode(body, type=KeptResponse)
    error = {"code": "server_error", "message": "The server stopped while this response was being made."}
    kept.response.status, kept.response.error = "failed", error
    return msgspec.json.encode(kept)
