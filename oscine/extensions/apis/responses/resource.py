"""The JSON of a response object (its parameters, status and output), and the record that is stored with it."""

import time
from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict, replace

from oscine.api.common.errors import CONTEXT_OVERFLOW, APIError
from oscine.api.common.paging import shown_page
from oscine.api.turns.progress import Turn
from oscine.chat import effort
from oscine.extensions.apis.responses.schemas import (
    InputItems,
    ResponseAnswer,
    ResponseRequest,
    ResponseUsage,
    TextFormatConfig,
)
from oscine.extensions.apis.responses.tools import repeated
from oscine.extensions.apis.responses.view import Object, shown

TERMINAL: dict[str, str] = {
    "completed": "completed",
    "incomplete": "incomplete",
    "failed": "failed",
    "cancelled": "incomplete",
}  # the last event, by the status of an ended response
# Fields of a response that repeat a parameter of its request, and what they say if it was not given.
_REPEATED: dict[str, Any] = {
    **dict.fromkeys(("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id")),
    **dict.fromkeys(("prompt_cache_key", "safety_identifier", "user")),
    **dict.fromkeys(("parallel_tool_calls", "store"), True),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), 0.0),
    **dict.fromkeys(("temperature", "top_p"), 1.0),
    "background": False,
    "metadata": {},
    "tool_choice": "auto",
    "top_logprobs": 0,
    "truncation": "disabled",
}


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
    """A response that has not begun; `namespaces`: of its built-in tools."""
    reasoning, text = body.reasoning, body.text
    given = {name: value for name in _REPEATED if (value := getattr(body, name)) is not None}
    return ResponseAnswer(
        id=response_id,
        object="response",
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        completed_at=None,
        error=None,
        incomplete_details=None,
        model=model,
        output=[],
        reasoning={"effort": (reasoning and reasoning.effort) or effort.DEFAULT, "summary": body.summary},
        service_tier="default",
        text={
            "format": _text_format(text.format if text else None),
            "verbosity": (text and text.verbosity) or "medium",
        },
        tools=repeated(body.tools or (), namespaces),
        usage=None,
        conversation=None if body.conversation_id is None else {"id": body.conversation_id},
        **(_REPEATED | given),
    )


def _text_format(wanted: TextFormatConfig | None) -> Object:
    if wanted is None or wanted.type != "json_schema":
        return {"type": wanted.type if wanted else "text"}
    return asdict(wanted) | {"schema": wanted.schema or {}}


def with_output(response: ResponseAnswer, items: Sequence[Object], include: Collection[str]) -> ResponseAnswer:
    return replace(response, output=[shown(item, include) for item in items])


def item_list(found: list[Object], limit: int, include: Collection[str]) -> InputItems:
    """A page of items. `found`: one item more than `limit` if there are more."""
    page, first, last, has_more = shown_page(found, limit, itemgetter("id"))
    return InputItems("list", [shown(item, include) for item in page], first or "", last or "", has_more=has_more)


def usage(turns: Sequence[Turn]) -> ResponseUsage:
    """The input tokens are all tokens that the model read, results of tools too, each once per turn."""
    read = sum(turn.num_prompt_tokens + turn.num_appended_tokens for turn in turns)
    made, cached = sum(turn.num_tokens for turn in turns), sum(turn.num_cached_tokens for turn in turns)
    thought = {"reasoning_tokens": sum(turn.num_reasoning_tokens for turn in turns)}
    return ResponseUsage(read, {"cached_tokens": cached, "cache_write_tokens": 0}, made, thought, read + made)


def failure(error: APIError) -> dict[str, str]:
    """An error within a response, which knows few codes."""
    code = CONTEXT_OVERFLOW if error.code == CONTEXT_OVERFLOW else "server_error"
    return {"code": "rate_limit_exceeded" if error.status == 429 else code, "message": error.message}


def interrupted(body: bytes) -> bytes:
    """The stored response of a server that died, marked as failed."""
    kept = msgspec.json.decode(body, type=KeptResponse)
    error = {"code": "server_error", "message": "The server stopped while this response was being made."}
    kept.response.status, kept.response.error = "failed", error
    return msgspec.json.encode(kept)
