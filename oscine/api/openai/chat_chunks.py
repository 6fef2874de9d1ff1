"""The events of a streamed chat completion, as bytes.

Knows the JSON of a chunk. What is the same in all chunks of a choice is encoded once, so that a token costs the
encoding of its own text.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from oscine.api.openai.chat_choice import ChatChoice
from oscine.api.openai.usage import Usage
from oscine.chat.events import ContentDelta, Event, MessageEnd, ReasoningDelta, ToolCallBegin, ToolCallDelta

encode = msgspec.json.encode


class ChunkHead:
    """What all chunks of one answer share: id, created, model, and whether usage is announced."""

    def __init__(self, answer_id: str, created: int, model: str, *, include_usage: bool) -> None:
        fields = {"id": answer_id, "object": "chat.completion.chunk", "created": created, "model": model}
        self.start = b"data: " + encode(fields)[:-1]
        self.end = b',"usage":null}\n\n' if include_usage else b"}\n\n"

    def usage(self, usage: Usage) -> bytes:
        return self.start + b',"choices":[],"usage":' + encode(usage) + b"}\n\n"


class ChatChunks:
    """Encodes the events of one choice. `reasoning_fields` may be empty: then reasoning is not shown."""

    def __init__(
        self,
        head: ChunkHead,
        index: int,
        choice: ChatChoice,
        reasoning_fields: Sequence[str],
        prompt: list[int] | None = None,
    ) -> None:
        """`prompt`: token ids that the first chunk carries; None: it carries none."""
        start = head.start + b',"choices":[{"index":%d,"delta":' % index
        self._start = start
        self._end = head.end
        self._close = b',"logprobs":null,"finish_reason":null}]' + head.end
        self._role = start + b'{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]'
        self._role += (b"" if prompt is None else b',"prompt_token_ids":' + encode(prompt)) + head.end
        self._content = start + b'{"content":'
        self._reasoning = tuple(encode(field) + b":" for field in reasoning_fields)
        self._logprobs = choice.logprobs
        self._begun = False

    def encode(self, events: Sequence[Event], finish_reason: str | None, token_ids: Sequence[int] = ()) -> bytes:
        """All chunks for new events of a choice. The first chunk has the role, the last one finish_reason.

        `token_ids` have a chunk of their own, because tokens of markers and headers belong to no delta.
        """
        chunks = b"".join(map(self._encode, events))
        if not self._begun:
            self._begun = True
            chunks = self._role + chunks
        if token_ids:
            end = b'{},"logprobs":null,"finish_reason":null,"token_ids":' + encode(token_ids) + b"}]" + self._end
            chunks += self._start + end
        if finish_reason is not None:
            chunks += self._start + b'{},"logprobs":null,"finish_reason":' + encode(finish_reason) + b"}]" + self._end
        return chunks

    def _encode(self, event: Event) -> bytes:
        if type(event) is ContentDelta:
            return self._content + encode(event.text) + b"}" + self._after_content(event)
        if type(event) is ReasoningDelta:
            text = encode(event.text)
            if not self._reasoning:
                return b""
            return self._start + b"{" + b",".join(field + text for field in self._reasoning) + b"}" + self._close
        if type(event) is MessageEnd:
            return b""
        return self._start + encode({"tool_calls": [_call(event)]}) + self._close

    def _after_content(self, delta: ContentDelta) -> bytes:
        logprobs = self._logprobs.of(delta)
        if logprobs is None:
            return self._close
        body = {"content": logprobs, "refusal": None}
        return b',"logprobs":' + encode(body) + b',"finish_reason":null}]' + self._end


def _call(event: Event) -> dict[str, Any]:
    if type(event) is ToolCallBegin:
        function = {"name": event.name, "arguments": ""}
        return {"index": event.index, "id": event.id, "type": "function", "function": function}
    assert type(event) is ToolCallDelta
    return {"index": event.index, "function": {"arguments": event.arguments}}
