"""/v1/messages and /v1/messages/count_tokens: Anthropic's API, over the same sequences as chat completions."""

from dataclasses import replace
from functools import partial
from typing import Generic

from starlette.types import Receive, Scope, Send

from oscine.api.common.work import run_in_thread
from oscine.api.http.body import json_response
from oscine.api.openai.answers import InputTokens
from oscine.api.openai.endpoint import Endpoint
from oscine.api.serving.call import Call, T
from oscine.api.serving.schemas import ChatCompletionRequest
from oscine.api.serving.service import Service
from oscine.api.turns.chat import chat_turns
from oscine.api.turns.conversation import conversation, leave_out
from oscine.api.turns.dialect import Dialect
from oscine.api.turns.generation import Generation
from oscine.api.turns.progress import Turn
from oscine.chat.messages import Conversation
from oscine.chat.toolbox import Toolbox
from oscine.extensions.apis.anthropic.answer import Blocks, MessageAnswer
from oscine.extensions.apis.anthropic.compaction import wanted_compaction
from oscine.extensions.apis.anthropic.request import (
    answer_form,
    chat_request,
    lacking_tools,
    prompt_request,
    removed_tools,
    shows_thinking,
    web_search,
)
from oscine.extensions.apis.anthropic.run import CompactedRun, Turns
from oscine.extensions.apis.anthropic.schemas import CountTokensRequest, MessagesRequest
from oscine.extensions.apis.compaction.summary import summary_turn, summary_within
from oscine.extensions.apis.responses.store import ResponseStore

_MESSAGES = Dialect(longest_name=128, separator="", limit="max_tokens")


class _Endpoint(Endpoint[T], Generic[T]):
    def __init__(self, service: Service, store: ResponseStore) -> None:
        """`store`: has the seal of compacted conversations."""
        super().__init__(service)
        self._store = store

    async def _count(self, call: Call[ChatCompletionRequest], toolbox: Toolbox) -> tuple[Conversation, int]:
        """The conversation, and the tokens of its prompt. Raises APIError."""
        said = await run_in_thread(
            lambda: conversation(call.body, self.service.date, _MESSAGES), call.size, call.caller.threads
        )
        talk = self.service.reasoning.restore(call.caller.name, replace(said, namespaces=toolbox.namespaces))
        return talk, await call.model.prompts.count(talk, call.size)


class AnthropicMessages(_Endpoint[MessagesRequest]):
    async def answer(self, call: Call[MessagesRequest], scope: Scope, receive: Receive, send: Send) -> None:
        body, stream, seal = call.body, bool(call.body.stream), self._store.seal
        toolbox = _toolbox(self.service, body)
        wanted = wanted_compaction(body, call.model.info.max_model_len)
        request = await run_in_thread(lambda: chat_request(body, seal), call.size, call.caller.threads)
        whole = call.with_body(request)
        thinking = body.thinking
        hidden = thinking is not None and thinking.display == "omitted"
        blocks = Blocks(thinking=shows_thinking(thinking), thinking_text=not hidden)
        turn = partial(self._turn, body, toolbox)
        async with toolbox:
            if wanted is not None:
                call.model.served.admission.check(1)  # before the prompt is made, which costs more
                talk, count = await self._count(whole, toolbox)
                is_first = count >= wanted.threshold
                if is_first or toolbox.names:
                    begin = summary_turn(self.service, whole, talk, "messages", wanted.ask) if is_first else turn(whole)
                    answer = MessageAnswer(await begin, call.name, blocks, stream=stream)
                    turns = Turns(partial(turn, admitted=True), partial(self._summary_within, wanted.ask))
                    fixed = 1 if body.system else 0
                    run = CompactedRun(whole, answer, wanted, seal, turns, fixed, is_first=is_first)
                    await self.respond(run.run, answer, scope, receive, send, stream=stream)
                    return
            answer = MessageAnswer(await turn(whole), call.name, blocks, stream=stream)
            await self.generate(Generation(whole, [answer]), answer, scope, receive, send, stream=stream)

    async def _summary_within(self, ask: str, call: Call[ChatCompletionRequest], prompt: list[int]) -> Turn:
        return await summary_within(self.service, call, prompt, "messages", ask)

    async def _turn(
        self, body: MessagesRequest, toolbox: Toolbox, call: Call[ChatCompletionRequest], *, admitted: bool = False
    ) -> Turn:
        form, removed = answer_form(body, call.body), removed_tools(body)
        (turn,) = await chat_turns(
            self.service,
            call,
            form=form,
            toolbox=toolbox,
            removed=removed,
            dialect=_MESSAGES,
            admitted=admitted,
        )
        return turn


class CountTokens(_Endpoint[CountTokensRequest]):
    async def answer(self, call: Call[CountTokensRequest], scope: Scope, receive: Receive, send: Send) -> None:
        toolbox, seal = _toolbox(self.service, call.body), self._store.seal
        request = await run_in_thread(lambda: prompt_request(call.body, seal), call.size, call.caller.threads)
        async with toolbox:
            _, count = await self._count(call.with_body(request), toolbox)
        await json_response(InputTokens(count))(scope, receive, send)


def _toolbox(service: Service, body: CountTokensRequest) -> Toolbox:
    """The search that the server runs, where it has a browser. Raises APIError if the server lacks all tools."""
    search, choice = web_search(body), body.tool_choice.type if body.tool_choice else None
    wanted = [] if search is None or choice == "none" else [{"type": "web_search"}]
    toolbox = service.tools.toolbox(wanted, search.max_uses if search else None)
    lacking = lacking_tools(body, searches=bool(toolbox.names))
    leave_out(lacking, len(body.tools or ()) - len(lacking), choice)
    return toolbox
