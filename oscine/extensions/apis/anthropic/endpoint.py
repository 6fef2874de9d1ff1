"""/v1/messages and /v1/messages/count_tokens: Anthropic's API, over the same sequences as chat completions."""

from dataclasses import replace

from starlette.types import Receive, Scope, Send

from oscine.api.common.work import run_in_thread
from oscine.api.http.body import json_response
from oscine.api.openai.answers import InputTokens
from oscine.api.openai.endpoint import Endpoint
from oscine.api.serving.call import Call
from oscine.api.serving.service import Service
from oscine.api.turns.chat import chat_turns
from oscine.api.turns.conversation import conversation, leave_out
from oscine.api.turns.dialect import Dialect
from oscine.api.turns.generation import Generation
from oscine.chat.toolbox import Toolbox
from oscine.extensions.apis.anthropic.answer import Blocks, MessageAnswer
from oscine.extensions.apis.anthropic.request import (
    answer_form,
    chat_request,
    lacking_tools,
    prompt_request,
    removed_tools,
    shows_thinking,
    web_search,
)
from oscine.extensions.apis.anthropic.schemas import CountTokensRequest, MessagesRequest

_MESSAGES = Dialect(longest_name=128, separator="", limit="max_tokens")


class AnthropicMessages(Endpoint[MessagesRequest]):
    async def answer(self, call: Call[MessagesRequest], scope: Scope, receive: Receive, send: Send) -> None:
        body, stream = call.body, bool(call.body.stream)
        toolbox = _toolbox(self.service, body)
        request = await run_in_thread(lambda: chat_request(body), call.size, call.caller.threads)
        whole = call.with_body(request)
        async with toolbox:
            form = answer_form(body, request)
            removed = removed_tools(body)
            (turn,) = await chat_turns(
                self.service, whole, form=form, toolbox=toolbox, removed=removed, dialect=_MESSAGES
            )
            thinking = body.thinking
            hidden = thinking is not None and thinking.display == "omitted"
            blocks = Blocks(thinking=shows_thinking(thinking), thinking_text=not hidden)
            answer = MessageAnswer(turn, call.name, blocks, stream=stream)
            await self.generate(Generation(whole, [answer]), answer, scope, receive, send, stream=stream)


class CountTokens(Endpoint[CountTokensRequest]):
    async def answer(self, call: Call[CountTokensRequest], scope: Scope, receive: Receive, send: Send) -> None:
        toolbox = _toolbox(self.service, call.body)
        said = await run_in_thread(
            lambda: conversation(prompt_request(call.body), self.service.date, _MESSAGES), call.size
        )
        async with toolbox:
            talk = self.service.reasoning.restore(call.caller.name, replace(said, namespaces=toolbox.namespaces))
            count = await call.model.prompts.count(talk, call.size)
        await json_response(InputTokens(count))(scope, receive, send)


def _toolbox(service: Service, body: CountTokensRequest) -> Toolbox:
    """The search that the server runs, where it has a browser. Raises APIError if the server lacks all tools."""
    search, choice = web_search(body), body.tool_choice.type if body.tool_choice else None
    wanted = [] if search is None or choice == "none" else [{"type": "web_search"}]
    toolbox = service.tools.toolbox(wanted, search.max_uses if search else None)
    lacking = lacking_tools(body, searches=bool(toolbox.names))
    leave_out(lacking, len(body.tools or ()) - len(lacking), choice)
    return toolbox
