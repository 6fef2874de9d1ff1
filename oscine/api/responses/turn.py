"""The one sequence of a response: what the model says, what built-in tools answer, and what it says then.

Knows tokens, budgets and when a turn ends; what items look like, and how events are written, it does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from oscine.api.http.sse import Write
from oscine.api.responses.events import ResponseEvents
from oscine.api.responses.items import BuiltinItem, OutputItems, begin_builtin
from oscine.api.responses.tools import ClientTools
from oscine.api.serving.final_headroom import FinalHeadroom, cut
from oscine.api.serving.generation import engine_request
from oscine.api.serving.logprobs import ContentLogprobs
from oscine.api.serving.served_model import ReadyModel
from oscine.chat.harmony_parser import HarmonyParser
from oscine.chat.messages import BuiltinCall
from oscine.tools.toolbox import Toolbox, ToolResult
from oscine.types import GenerationOutput, GenerationRequest

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TurnGrammars:
    """What constrains a turn once it does not begin any more."""

    later: str | None = None  # all that follows a call's result
    final: str | None = None  # what follows the header of a final message
    answers: bool = True  # whether the turn may begin with a final message
    functions: frozenset[str] = frozenset()  # names of the client's functions that may be called
    builtins: bool = False  # whether built-in tools may be called


class ResponseTurn:
    """A Choice; see oscine.api.serving.generation. It goes on until the model calls no built-in tool any more."""

    def __init__(
        self,
        request: GenerationRequest,
        model: ReadyModel,
        toolbox: Toolbox,
        tools: ClientTools,
        events: ResponseEvents,
        *,
        grammars: TurnGrammars,
        top_logprobs: int | None,
        summaries: bool,
        headroom: int,
    ) -> None:
        """The request's max_tokens are for the whole turn; `headroom` of them are reserved for the answer.

        `top_logprobs`: None for no log-probabilities. `summaries`: whether reasoning items have a summary.
        """
        self._request, self._model, self._toolbox, self._events = request, model, toolbox, events
        self._grammars = grammars
        self._budget = request.sampling.max_tokens
        self._headroom = headroom if grammars.answers else 0
        self._forced: GenerationRequest | None = None  # that makes the model answer, once it must
        self._parser = HarmonyParser(
            model.tokenizer,
            namespaces=toolbox.names if grammars.builtins else (),
            separator="",
            functions=grammars.functions,
        )
        self._generated: list[int] = []  # by the engine's request at hand
        self._earlier = 0  # tokens of the engine's requests before it
        self._logprobs = ContentLogprobs(model.tokenizer, top_logprobs)
        self.output = OutputItems(
            events, tools.named, begin_builtin, self._logprobs.of, self._annotations, summaries=summaries
        )
        self.calls: dict[str, Sequence[str]] = {}  # see History.add
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        return self._parser.num_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        return self._parser.num_reasoning_tokens

    @property
    def interrupted(self) -> bool:
        """Whether a built-in tool is to answer, or the model itself."""
        return self._forced is not None or (self.finish_reason is None and self._parser.done)

    def feed(self, output: GenerationOutput) -> bytes:
        if not self._earlier:
            self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        room = self._request.sampling.max_tokens - self._headroom - len(self._generated)
        if self._headroom and len(output.token_ids) >= room:
            self._take_within(output, room)
        else:
            self._take(output)
        return self._events.take()

    def _take_within(self, output: GenerationOutput, room: int) -> None:
        """Up to where the answer must have begun, which is decided once."""
        before, after = cut(output, room)
        self._take(before)
        if self.finish_reason is None and not self._parser.done and self._parser.thinking:
            model = self._model
            headroom = FinalHeadroom(
                model.prompts, self._request, self._headroom, model.info.max_model_len, self._grammars.final
            )
            self._forced = headroom.forced(self._generated)
        self._headroom = 0
        if self.finish_reason is None and not self.interrupted:
            self._take(after)

    def _take(self, output: GenerationOutput) -> None:
        self._generated += output.token_ids
        if output.logprobs is not None:
            self._logprobs.take(output.logprobs)
        self.output.take(self._parser.feed(output.token_ids))
        if output.finish_reason is not None or self._parser.done:
            is_cut = output.finish_reason == "length" and not self._parser.done
            self.output.take(self._parser.finish(), cut=is_cut)
            if is_cut:
                self.finish_reason = "length"
            elif self.output.open is None:
                self.finish_reason = "tool_calls" if self._parser.num_tool_calls else "stop"

    async def continuation(self, write: Write | None) -> GenerationRequest | None:
        if self._forced is not None:
            forced, self._forced = self._forced, None
            return self._behind(forced)
        item = self.output.open
        if self.finish_reason is not None or item is None:
            return None
        assert isinstance(item, BuiltinItem)
        item.said()
        await self._events.flush(write)
        result = await self._toolbox.call(item.begin.recipient, item.content)
        self.output.open = None
        item.answered(result)
        call = BuiltinCall(item.begin.recipient, item.content, item.begin.channel)
        self.calls[item.item["id"]] = (call.recipient, call.content, call.channel, result.text)
        following = await self._after(call, result)
        await self._events.flush(write)
        return following

    async def _after(self, call: BuiltinCall, result: ToolResult) -> GenerationRequest | None:
        """The engine's request with a tool's result in its prompt; None if the turn ends here."""
        if self._parser.num_tool_calls:  # the client is to answer those first
            self.finish_reason = "tool_calls"
            return None
        request, prompts = self._request, self._model.prompts
        said = self._generated[: self._parser.num_tokens - self._earlier]
        prompt = await prompts.after_call([*request.prompt_token_ids, *said], call, result.text)
        grammar = self._grammars.later
        if result.details is None and self._toolbox.exhausted:  # it does not take no for an answer
            prompt, grammar = prompts.into_final(prompt), self._grammars.final
        left = min(self._budget - self.num_tokens, self._model.info.max_model_len - len(prompt))
        if left < 1:
            self.finish_reason = "length"
            return None
        sampling = replace(request.sampling, max_tokens=left, grammar=grammar)
        return self._behind(engine_request(prompt, sampling, request.priority, request.cache_salt))

    def _behind(self, request: GenerationRequest) -> GenerationRequest:
        """Turns to the request that goes on."""
        prompt = request.prompt_token_ids
        generated = self._parser.num_tokens - self._earlier
        self.output.take(self._parser.resume(prompt))
        appended = len(prompt) - len(self._request.prompt_token_ids) - generated
        self.num_prompt_tokens += max(appended, 0)  # a header that was not complete is dropped
        self._earlier, self._generated = self._parser.num_tokens, []
        self._logprobs.forget(self._earlier)
        self._request = request
        return request

    def _annotations(self, text: str) -> list[Object]:
        return [
            {
                "type": "url_citation",
                "start_index": citation.start,
                "end_index": citation.end,
                "url": citation.source.url,
                "title": citation.source.title,
            }
            for citation in self._toolbox.citations(text)
        ]
