"""What a chat completion is answered with: chunks of a stream, or one object.

What is the same in all chunks of a choice is encoded once, so that a token costs the encoding of its own text.
"""

from collections.abc import Sequence

import msgspec
from msgspec import UNSET

from oscine.api.openai.answers import (
    AnswerMessage,
    ChatCompletion,
    ChatCompletionChoice,
    ChatLogprobs,
)
from oscine.api.openai.calls import CallDeltas, answer_call
from oscine.api.openai.stream import OpenAIAnswer
from oscine.api.serving.logprobs import ContentLogprobs, TokenLogprob
from oscine.api.serving.schemas import ChatCompletionRequest
from oscine.api.turns.conversation import custom_tools
from oscine.api.turns.generation import Choice
from oscine.api.turns.progress import Turn, TurnEvent
from oscine.chat.events import ContentDelta, ReasoningDelta, ToolCallBegin, ToolCallDelta

encode = msgspec.json.encode

_REASONING_FIELDS = {
    "reasoning": ("reasoning",),
    "reasoning_content": ("reasoning_content",),
    "both": ("reasoning", "reasoning_content"),
}


class ChatAnswer(OpenAIAnswer):
    """The answer to one request. `reasoning_fields` may be empty: then reasoning is not shown."""

    def __init__(
        self,
        turns: Sequence[Turn],
        logprobs: Sequence[ContentLogprobs],
        model: str,
        reasoning_fields: Sequence[str],
        body: ChatCompletionRequest,
    ) -> None:
        super().__init__(("chatcmpl", "chat.completion.chunk"), model, body, turns)
        self.reasoning_fields = reasoning_fields
        # Token ids of the prompt if the answer carries token ids.
        self.prompt = turns[0].request.prompt_token_ids if body.return_token_ids else None
        self.custom = custom_tools(body.tools)
        pairs = enumerate(zip(turns, logprobs, strict=True))
        self.whole = [] if body.stream else [WholeChoice(self, i, *pair) for i, pair in pairs]
        self.choices: Sequence[Choice] = self.whole or [StreamedChoice(self, i, *pair) for i, pair in pairs]

    def body(self) -> bytes:
        choices = [choice.answer() for choice in self.whole]
        prompt = UNSET if self.prompt is None else self.prompt
        return encode(
            ChatCompletion(self.id, "chat.completion", self.created, self.model, choices, self.usage(), prompt)
        )


def reasoning_fields(body: ChatCompletionRequest, setting: str) -> Sequence[str]:
    """The fields that show the reasoning: those of the server's setting, unless the request wants none."""
    excluded = body.include_reasoning is False or (body.reasoning is not None and body.reasoning.exclude)
    return () if excluded else _REASONING_FIELDS[setting]


class StreamedChoice:
    """Encodes the events of one choice as chunks. The first chunk has the role, the last one finish_reason."""

    def __init__(self, answer: ChatAnswer, index: int, turn: Turn, logprobs: ContentLogprobs) -> None:
        start = answer.start + b',"choices":[{"index":%d,"delta":' % index
        self.turn = turn
        self._start, self._end = start, answer.end
        self._close = b',"logprobs":null,"finish_reason":null}]' + answer.end
        self._role = start + b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        self._role += (b"" if answer.prompt is None else b',"prompt_token_ids":' + encode(answer.prompt)) + answer.end
        self._content = start + b'{"content":'
        self._reasoning = tuple(encode(field) + b":" for field in answer.reasoning_fields)
        self._logprobs = logprobs
        self._calls = CallDeltas(answer.custom)
        self._begun = False
        self._num_sent: int | None = None if answer.prompt is None else 0  # token ids

    def encode(self, events: Sequence[TurnEvent]) -> bytes:
        chunks = b"".join(map(self._encode, events))
        if not self._begun:
            self._begun = True
            chunks = self._role + chunks
        if self._num_sent is not None:
            chunks += self._token_ids(self._num_sent)
        reason = self.turn.finish_reason
        if reason is not None:
            chunks += self._start + b'{},"logprobs":null,"finish_reason":' + encode(reason) + b"}]" + self._end
        return chunks

    def _token_ids(self, first: int) -> bytes:
        """A chunk of their own, because tokens of markers and headers belong to no delta."""
        new = self.turn.generated[first:]
        self._num_sent = first + len(new)
        if not new:
            return b""
        end = b'{},"logprobs":null,"finish_reason":null,"token_ids":' + encode(new) + b"}]" + self._end
        return self._start + end

    def _encode(self, event: TurnEvent) -> bytes:
        if type(event) is ContentDelta:
            return self._content + encode(event.text) + b"}" + self._after_content(event)
        if type(event) is ReasoningDelta:
            if not self._reasoning:
                return b""
            text = encode(event.text)
            return self._start + b"{" + b",".join(field + text for field in self._reasoning) + b"}" + self._close
        call = self._calls.delta(event)
        return b"" if call is None else self._start + encode({"tool_calls": [call]}) + self._close

    def _after_content(self, delta: ContentDelta) -> bytes:
        if self._logprobs.top is None:
            return self._close
        body = ChatLogprobs(self._logprobs.of(delta), None)
        return b',"logprobs":' + encode(body) + b',"finish_reason":null}]' + self._end


class WholeChoice:
    """Keeps the events of one choice for an answer that is sent whole."""

    def __init__(self, answer: ChatAnswer, index: int, turn: Turn, logprobs: ContentLogprobs) -> None:
        self.turn = turn
        # Not the answer itself: a cycle would be left to the collector.
        self._reasoning_fields, self._shows_ids = answer.reasoning_fields, answer.prompt is not None
        self._custom = answer.custom
        self._index, self._logprobs = index, logprobs
        self._reasoning: list[str] = []
        self._content: list[str] = []
        self._content_logprobs: list[TokenLogprob] = []
        self._calls: list[tuple[ToolCallBegin, list[str]]] = []

    def encode(self, events: Sequence[TurnEvent]) -> bytes:
        for event in events:
            match event:
                case ContentDelta():
                    self._content.append(event.text)
                    self._content_logprobs += self._logprobs.of(event)
                case ReasoningDelta():
                    self._reasoning.append(event.text)
                case ToolCallBegin():
                    self._calls.append((event, []))
                case ToolCallDelta():
                    self._calls[event.index][1].append(event.arguments)
        return b""

    def answer(self) -> ChatCompletionChoice:
        reason = self.turn.finish_reason
        assert reason is not None
        logprobs = None if self._logprobs.top is None else ChatLogprobs(self._content_logprobs, None)
        token_ids = self.turn.generated if self._shows_ids else UNSET
        return ChatCompletionChoice(self._index, self._message(), logprobs, reason, token_ids)

    def _message(self) -> AnswerMessage:
        """Its content is null when there are only calls."""
        content = "".join(self._content)
        message = AnswerMessage("assistant", content if content or not self._calls else None, None)
        for field in self._reasoning_fields:
            setattr(message, field, "".join(self._reasoning) or None)
        if self._calls:
            message.tool_calls = [answer_call(begin, "".join(text), self._custom) for begin, text in self._calls]
        return message
