"""Endpoints about the size of a conversation: one counts its tokens, one compacts it to a summary.

The model itself writes the summary, because no rule can tell what matters of its work. User messages are kept as they
are.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from msgspec import Struct
from starlette.types import Receive, Scope, Send

from oscine.api.common.connection import run_while_connected
from oscine.api.common.errors import APIError, invalid
from oscine.api.http.body import json_response
from oscine.api.serving.call import Call
from oscine.api.serving.parameters import Refused, ShortText, about, ignored
from oscine.chat.messages import Message
from oscine.chat.toolbox import bounded
from oscine.extensions.apis.responses.endpoint import ResponseEndpoint
from oscine.extensions.apis.responses.input import COMPACTED
from oscine.extensions.apis.responses.items import new_item
from oscine.extensions.apis.responses.plan import ResponsePlan, make_plan
from oscine.extensions.apis.responses.run import ResponseRun
from oscine.extensions.apis.responses.schemas import (
    CompactedResponse,
    Conversation,
    ReasoningConfig,
    ResponseAnswer,
    ResponseInputTokens,
    ResponseRequest,
    TextConfig,
    Tools,
    Truncation,
)
from oscine.extensions.apis.responses.view import Object, sealed

_MAX_TOKENS = 4096  # per summary, with the reasoning before it
_ASK = (
    "Write a summary of this conversation for yourself. From now on you see it in place of all that you said and did, "
    "and of what tools answered. Say what was asked and decided, what has been done and found out, with the names, "
    "paths and figures that are needed again, and what is to be done next. Do not answer the conversation, and call "
    "no tools."
)


class _Prompt(Struct, kw_only=True):
    input: Annotated[str | list[Object] | None, about("A text, or items of the conversation so far.")] = None
    instructions: Annotated[str | None, about("A developer message before the conversation.")] = None
    previous_response_id: Annotated[str | None, about("A stored response whose conversation comes first.")] = None
    reasoning: Annotated[ReasoningConfig | None, about("Effort of the reasoning.")] = None


class InputTokensRequest(_Prompt, kw_only=True):
    """The parameters of a response on which its prompt depends."""

    model: Annotated[str | None, about("The name of a model. A server with one model needs none.")] = None
    tools: Annotated[Tools | None, about("The client's functions, and built-in tools.")] = None
    tool_choice: Annotated[str | Object | None, about("With `none` the model is told of no tools.")] = None
    parallel_tool_calls: Annotated[bool | None, ignored("the prompt is the same")] = None
    text: Annotated[TextConfig | None, about("The form of the answer.")] = None
    truncation: Annotated[Truncation | None, ignored("the prompt is the same")] = None
    conversation: Annotated[Conversation, about("A conversation that comes first.")] = None


class CompactRequest(_Prompt, kw_only=True):
    model: Annotated[str, about("The name of a model.")]
    cache_salt: Annotated[ShortText | None, about("Cached prefixes are shared by requests with the same salt.")] = None
    conversation: Refused = None
    prompt_cache_key: Annotated[str | None, ignored("prefixes are cached by their tokens; see `cache_salt`")] = None


Prompted = TypeVar("Prompted", InputTokensRequest, CompactRequest)


class InputTokens(ResponseEndpoint[InputTokensRequest]):
    """Counts the tokens of the prompt that a response would have."""

    async def answer(self, call: Call[InputTokensRequest], scope: Scope, receive: Receive, send: Send) -> None:
        plan = await make_plan(self.service, self.kept.store, _for_response(call, input=call.body.input or []))
        async with plan.toolbox:
            count = await plan.num_prompt_tokens(self.service.date, self.service.reasoning)
        await json_response(ResponseInputTokens("response.input_tokens", count))(scope, receive, send)


class Compact(ResponseEndpoint[CompactRequest]):
    """Answers with items that replace the conversation."""

    async def answer(self, call: Call[CompactRequest], scope: Scope, receive: Receive, send: Send) -> None:
        call.model.served.admission.check(1)
        plan = await self._plan(call)
        run = ResponseRun(self.service, self.kept, plan)
        if await run_while_connected(receive, run.run(None)):
            await json_response(_compacted(plan, run.snapshot()))(scope, receive, send)

    async def _plan(self, call: Call[CompactRequest]) -> ResponsePlan:
        """The plan of the response that writes the summary."""
        given = call.body.input or []
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        thinking = call.body.reasoning or ReasoningConfig(effort="low")
        whole = _for_response(call, input=[*items, {"role": "user", "content": _ASK}], reasoning=thinking, store=False)
        plan = await make_plan(self.service, self.kept.store, whole)
        if not _said(plan):
            raise invalid("input", "there is nothing to compact")
        prompt = await plan.prompt(self.service.date, self.service.reasoning)
        room = min(_MAX_TOKENS, call.model.info.max_model_len - len(prompt))
        plan.body.max_output_tokens = max(room, 1)
        return replace(plan, headroom=room // 2)


def _for_response(call: Call[Prompted], **changes: Any) -> Call[ResponseRequest]:
    body = {name: getattr(call.body, name) for name in call.body.__struct_fields__}
    return call.with_body(ResponseRequest(**{**body, **changes}))


def _said(plan: ResponsePlan) -> tuple[Message, ...]:
    """The messages of the conversation, without its instructions and without the request for a summary."""
    return plan.messages[1 if plan.body.instructions else 0 : -1]


def _compacted(plan: ResponsePlan, made: ResponseAnswer) -> CompactedResponse:
    """The answer, from the response that wrote the summary. Raises APIError if the summary is empty."""
    summary = "".join(part["text"] for item in made.output if item["type"] == "message" for part in item["content"])
    if not summary.strip():
        raise APIError("The model wrote no summary.", status=500, type="server_error", code="compaction_failed")
    kept = _kept(_said(plan), plan.call.model.info.max_model_len // 2)
    messages = [
        new_item("message", status="completed", role=of.role, content=[{"type": "input_text", "text": of.content}])
        for of in kept
    ]
    output = [*messages, new_item("compaction", encrypted_content=sealed(summary))]
    assert made.usage is not None
    return CompactedResponse(made.id, "response.compaction", made.created_at, output, made.usage)


def _kept(said: Sequence[Message], most_bytes: int) -> list[Message]:
    """All system and developer messages, and the newest user messages up to `most_bytes` in all."""
    kept, left = [], most_bytes
    for message in reversed(said):
        if message.role in ("system", "developer"):
            kept += [message] if message.content else []
        elif message.role == "user" and left > 0 and not message.content.startswith(COMPACTED):
            size = len(message.content.encode("utf-8", "surrogatepass"))
            kept.append(message if size <= left else replace(message, content=bounded(message.content, left // 4)))
            left -= size
    return kept[::-1]
