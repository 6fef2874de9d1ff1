"""The one sequence of a response: what the model says, what built-in tools answer, and what it says then.

Knows tokens, budgets and when a turn ends; what items look like, and how events are written, it does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from oscine.api.generation import Write, engine_request
from oscine.api.logprobs import chat_logprob
from oscine.api.response_builtin_items import BuiltinItem, begin_builtin
from oscine.api.response_events import ResponseEvents
from oscine.api.response_items import OutputItems
from oscine.api.response_tools import ClientTools
from oscine.api.service import ReadyModel
from oscine.chat.events import ContentDelta
from oscine.chat.harmony_parser import HarmonyParser
from oscine.chat.messages import BuiltinCall
from oscine.tools.toolbox import Toolbox, ToolResult
from oscine.types import GenerationOutput, GenerationRequest, TokenLogprobs

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Grammars:
    """What constrains a turn once it does not begin any more."""

    later: str | None = None  # all that follows a call's result
    final: str | None = None  # what follows the header of a final message


class ResponseTurn:
    """A Choice; see oscine.api.generation. It goes on until the model calls no built-in tool any more."""

    def __init__(
        self,
        request: GenerationRequest,
        model: ReadyModel,
        toolbox: Toolbox,
        tools: ClientTools,
        events: ResponseEvents,
        *,
        grammars: Grammars,
        top_logprobs: int | None,
    ) -> None:
        """The request's max_tokens are for the whole turn. `top_logprobs`: None for no log-probabilities at all."""
        self._request, self._model, self._toolbox, self._events = request, model, toolbox, events
        self._grammars, self._top_logprobs = grammars, top_logprobs
        self._budget = request.sampling.max_tokens
        self._parser = HarmonyParser(model.tokenizer, namespaces=toolbox.names, separator="")
        self._generated: list[int] = []  # by the engine's request at hand
        self._earlier = 0  # tokens of the engine's requests before it
        self._logprobs: list[TokenLogprobs] = []  # of every token, by its index
        self.output = OutputItems(events, tools.named, begin_builtin, self._content_logprobs, self._annotations)
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
        """Whether a built-in tool is to answer."""
        return self.finish_reason is None and self._parser.done

    def feed(self, output: GenerationOutput) -> bytes:
        self._generated += output.token_ids
        self._logprobs += output.logprobs or ()
        if not self._earlier:
            self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.output.take(self._parser.feed(output.token_ids))
        if output.finish_reason is not None or self._parser.done:
            cut = output.finish_reason == "length" and not self._parser.done
            self.output.take(self._parser.finish(), cut=cut)
            if cut:
                self.finish_reason = "length"
            elif self.output.open is None:
                self.finish_reason = "tool_calls" if self._parser.num_tool_calls else "stop"
        return self._events.take()

    async def continuation(self, write: Write | None) -> GenerationRequest | None:
        item = self.output.open
        if self.finish_reason is not None or item is None:
            return None
        assert isinstance(item, BuiltinItem)
        item.said()
        await self._flush(write)
        result = await self._toolbox.call(item.begin.recipient, item.content)
        self.output.open = None
        item.answered(result)
        call = BuiltinCall(item.begin.recipient, item.content, item.begin.channel)
        self.calls[item.item["id"]] = (call.recipient, call.content, call.channel, result.text)
        following = await self._after(call, result)
        await self._flush(write)
        return following

    async def _flush(self, write: Write | None) -> None:
        events = self._events.take()
        if write is not None and events:
            await write(events)

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
        self.output.take(self._parser.resume(prompt))
        self.num_prompt_tokens += len(prompt) - len(request.prompt_token_ids) - len(said)
        self._earlier, self._generated = self._parser.num_tokens, []
        del self._logprobs[self._earlier :]
        sampling = replace(request.sampling, max_tokens=left, grammar=grammar)
        self._request = engine_request(prompt, sampling, request.priority)
        return self._request

    def _content_logprobs(self, delta: ContentDelta) -> list[Object]:
        top = self._top_logprobs
        if top is None:
            return []
        return [chat_logprob(self._model.tokenizer, self._logprobs[i], top) for i in delta.token_indices]

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
