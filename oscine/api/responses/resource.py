"""The JSON of a response object (its parameters, status and output), and the record that is stored with it."""

import time
from collections.abc import Collection, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from oscine.api.http.errors import APIError
from oscine.api.responses.schemas import ResponseRequest, TextFormatConfig
from oscine.api.responses.tools import repeated
from oscine.api.responses.view import shown
from oscine.chat import effort

Object = dict[str, Any]

TERMINAL = {"completed": "completed", "incomplete": "incomplete", "failed": "failed", "cancelled": "incomplete"}
ENDED = frozenset(TERMINAL)


class KeptResponse(Struct):
    """A response as it is stored, with data for the server alone."""

    response: Object  # with all parts that `include` may ask for
    calls: dict[str, list[str]]  # of built-in tools; see History.add
    tools: Object  # state of the toolbox, for the next response


class KeptItem(Struct):
    """An item as it is stored for references to it."""

    item: Object
    call: list[str] | None = None  # of a built-in tool


def new_response(response_id: str, body: ResponseRequest, model: str, namespaces: Collection[str]) -> Object:
    """A response that has not begun; `namespaces` are those of its built-in tools."""
    reasoning, text = body.reasoning, body.text
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "queued" if body.background else "in_progress",
        "background": bool(body.background),
        "completed_at": None,
        "error": None,
        "frequency_penalty": body.frequency_penalty or 0.0,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": body.presence_penalty or 0.0,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": (reasoning and reasoning.effort) or effort.DEFAULT, "summary": body.summary},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {
            "format": _text_format(text.format if text else None),
            "verbosity": (text and text.verbosity) or "medium",
        },
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": repeated(body.tools or (), namespaces),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


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


def with_output(response: Object, items: Sequence[Object], include: Collection[str]) -> Object:
    return {**response, "output": [shown(item, include) for item in items]}


def usage(*, prompt: int, cached: int, completion: int, reasoning: int) -> Object:
    """`prompt`: all tokens that the model read, results of tools included, each once."""
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + completion,
    }


def failure(error: APIError) -> Object:
    """An error within a response. The API has few codes for it."""
    return {"code": "rate_limit_exceeded" if error.status == 429 else "server_error", "message": error.message}


def interrupted(body: bytes) -> bytes:
    """The stored response of a server that died, marked as failed."""
    kept = msgspec.json.decode(body, type=KeptResponse)
    error = {"code": "server_error", "message": "The server stopped while this response was being made."}
    kept.response |= {"status": "failed", "error": error}
    return msgspec.json.encode(kept)
