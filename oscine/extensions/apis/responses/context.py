"""Endpoints about the size of a conversation: one counts its tokens, one compacts it to a summary.

Messages of the user are kept as they are.
"""

import time
from typing import Annotated, Any, TypeVar

from msgspec import Struct
from starlette.types import Receive, Scope, Send

from oscine.api.common.connection import run_while_connected
from oscine.api.common.errors import invalid, unsupported
from oscine.api.common.ids import Id
from oscine.api.http.body import json_response
from oscine.api.serving.call import Call
from oscine.api.serving.parameters import ShortText, about, ignored
from oscine.api.turns.generation import Generation
from oscine.chat.effort import Effort
from oscine.extensions.apis.compaction.seal import Compacted
from oscine.extensions.apis.compaction.summary import Summary, kept
from oscine.extensions.apis.responses.endpoint import ResponseEndpoint
from oscine.extensions.apis.responses.items import new_item
from oscine.extensions.apis.responses.plan import ResponsePlan, make_plan
from oscine.extensions.apis.responses.resource import usage
from oscine.extensions.apis.responses.schemas import (
    CompactedResponse,
    Conversation,
    ReasoningConfig,
    ResponseInputTokens,
    ResponseRequest,
    TextConfig,
    Tools,
    Truncation,
)
from oscine.extensions.apis.responses.view import Object


class _Prompt(Struct, kw_only=True):
    input: Annotated[str | list[Object] | None, about("A text, or items of the conversation so far.")] = None
    instructions: Annotated[str | None, about("A developer message before the conversation.")] = None
    previous_response_id: Annotated[Id | None, about("A stored response whose conversation comes first.")] = None
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
    conversation: Annotated[
        Any, about("Not supported: its items are sent as `input`, or its last response is named.", type="null")
    ] = None
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
        if call.body.conversation is not None:
            why = "send its items as 'input', or name its last response in 'previous_response_id'"
            raise unsupported("conversation", why)
        call.model.served.admission.check(1)
        given = _for_response(call, input=call.body.input or [], store=False)
        plan = await make_plan(self.service, self.kept.store, given)
        if not plan.said:
            raise invalid("input", "there is nothing to compact")
        effort: Effort | None = None if call.body.reasoning else "low"
        summary = Summary(await plan.summary(self.service, effort))
        generation = Generation(plan.call, [summary], "responses")
        with generation.admit():
            stayed = await run_while_connected(receive, generation.run(None))
        if stayed:
            await json_response(self._compacted(plan, summary))(scope, receive, send)

    def _compacted(self, plan: ResponsePlan, summary: Summary) -> CompactedResponse:
        """Raises APIError if the summary is empty."""
        sealed = self.kept.store.seal.close(Compacted(summary.text))
        messages = [
            new_item("message", status="completed", role=of.role, content=[{"type": "input_text", "text": of.content}])
            for of in kept(plan.said, plan.call.model.info.max_model_len)
        ]
        output = [*messages, new_item("compaction", encrypted_content=sealed)]
        return CompactedResponse(plan.id, "response.compaction", int(time.time()), output, usage([summary.turn]))


def _for_response(call: Call[Prompted], **changes: Any) -> Call[ResponseRequest]:
    body = {name: getattr(call.body, name) for name in call.body.__struct_fields__}
    return call.with_body(ResponseRequest(**{**body, **changes}))
