"""One choice of a chat completion: tokens in; reasoning, content and tool calls out.

Knows what ends a choice and what it consists of; not how events or answers are encoded.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from oscine.api.serving.final_headroom import FinalHeadroom, cut
from oscine.api.serving.logprobs import ContentLogprobs
from oscine.chat.events import ContentDelta, Event, MessageEnd, ReasoningDelta, ToolCallBegin, ToolCallDelta
from oscine.chat.harmony_parser import HarmonyParser
from oscine.chat.tokenizer import Tokenizer
from oscine.types import GenerationOutput, GenerationRequest


class ChatChoice:
    """Grows with the engine's outputs. finish_reason is set when it is complete: stop, length or tool_calls."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        num_prompt_tokens: int,
        stop: Sequence[str] = (),
        functions: Collection[str] = (),
        top_logprobs: int | None = None,
        ignore_eos: bool = False,
        separator: str = "\n\n",
        remember: Callable[[Sequence[str], str], None] | None = None,
    ) -> None:
        """`top_logprobs` is the number of alternatives per content token; None: no log-probabilities.

        `functions` are the names that may be called. `separator` joins the texts of several messages.
        `remember(call_ids, reasoning)` is called with the reasoning that led to calls.
        """
        self._parser = HarmonyParser(tokenizer, stop, separator=separator, functions=functions)
        self._remember = remember
        self.headroom: FinalHeadroom | None = None  # set, it forces the final message
        self._generated: list[int] = []  # while there is a headroom
        self._forced: GenerationRequest | None = None
        self._continues = False  # behind a prompt that is longer than the client's
        self._thoughts: list[str] = []  # what is to be remembered
        self._between = "" if separator else "\n\n"  # the parser joins messages, or the memory does
        self._call_ids: list[str] = []
        self.logprobs = ContentLogprobs(tokenizer, top_logprobs)
        self._ignore_eos = ignore_eos
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._content_logprobs: list[dict[str, Any]] = []
        self._calls: list[tuple[ToolCallBegin, list[str]]] = []

    @property
    def num_reasoning_tokens(self) -> int:
        return self._parser.num_reasoning_tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the content."""
        return self._parser.stop_string

    @property
    def interrupted(self) -> bool:
        """Whether the engine's request is to end here: `continuation` is the one that goes on."""
        return self._forced is not None

    def continuation(self) -> GenerationRequest | None:
        """Called when the engine's request has ended."""
        following, self._forced = self._forced, None
        self._continues = following is not None
        return following

    def feed(self, output: GenerationOutput) -> list[Event]:
        """The news in order; tokens that do not show yet give none."""
        if self.headroom is None:
            return self._take(output)
        return self._take_within(self.headroom, output)

    def _take_within(self, headroom: FinalHeadroom, output: GenerationOutput) -> list[Event]:
        """Up to where the answer must have begun, which is decided once."""
        room = headroom.begins_after - self.num_tokens
        if len(output.token_ids) < room:
            self._generated += output.token_ids
            return self._take(output)
        self.headroom = None
        before, after = cut(output, room)
        events = self._take(before)
        if self.finish_reason is None and self._parser.thinking:
            self._forced = headroom.forced([*self._generated, *before.token_ids])
        if self._forced is not None:
            return events + self._parser.resume(self._forced.prompt_token_ids)
        return events if self.finish_reason is not None else events + self._take(after)

    def _take(self, output: GenerationOutput) -> list[Event]:
        if output.logprobs is not None:
            self.logprobs.take(output.logprobs)
        if not self._continues:
            self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.num_tokens += len(output.token_ids)
        events = self._parser.feed(output.token_ids)
        if output.finish_reason is not None or self._is_over():
            events += self._finish("length" if output.finish_reason == "length" else "stop")
        if self._remember is not None:
            self._note(events)
        return events

    def _note(self, events: Sequence[Event]) -> None:
        for event in events:
            if type(event) is ReasoningDelta:
                self._thoughts.append(event.text)
            elif type(event) is ToolCallBegin:
                self._call_ids.append(event.id)
            elif type(event) is MessageEnd and event.kind == "reasoning":
                self._thoughts.append(self._between)
        if self.finish_reason is not None and self._call_ids and self._remember is not None:
            self._remember(self._call_ids, "".join(self._thoughts).removesuffix(self._between))

    def _is_over(self) -> bool:
        """Whether the turn has ended before the engine knows: by a stop string, or as the model speaks for others."""
        parser = self._parser
        return parser.done and (not self._ignore_eos or parser.terminator == "stop")

    def _finish(self, reason: str) -> list[Event]:
        events = self._parser.finish()
        if self._is_over():
            self.num_tokens = self._parser.num_tokens
            reason = "stop"
        self.finish_reason = "tool_calls" if reason == "stop" and self._parser.num_tool_calls else reason
        return events

    def keep(self, events: Sequence[Event]) -> None:
        """Adds what was reported to the message, for an answer that is sent whole."""
        for event in events:
            match event:
                case ContentDelta():
                    self._content.append(event.text)
                    self._content_logprobs += self.logprobs.of(event) or ()
                case ReasoningDelta():
                    self._reasoning.append(event.text)
                case ToolCallBegin():
                    self._calls.append((event, []))
                case ToolCallDelta():
                    self._calls[event.index][1].append(event.arguments)
                case MessageEnd():
                    pass

    def message(self, reasoning_fields: Sequence[str]) -> dict[str, Any]:
        """The message that was kept; content is null when there are only calls."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not self._calls else None}
        message["refusal"] = None
        message |= dict.fromkeys(reasoning_fields, reasoning or None)
        if self._calls:
            message["tool_calls"] = [
                {"id": begin.id, "type": "function", "function": {"name": begin.name, "arguments": "".join(arguments)}}
                for begin, arguments in self._calls
            ]
        return message

    def message_logprobs(self) -> dict[str, Any] | None:
        return None if self.logprobs.top is None else {"content": self._content_logprobs, "refusal": None}
