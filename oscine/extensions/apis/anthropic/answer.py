"""An answer as Anthropic's Messages API words it: blocks of thinking, text and calls, streamed or whole."""

import hashlib
import uuid
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from oscine.api.common.errors import APIError
from oscine.api.http.sse import named_event
from oscine.api.serving.schemas import arguments_object
from oscine.api.turns.progress import ToolAnswered, Turn, TurnEvent
from oscine.chat.events import ContentDelta, MessageEnd, ReasoningDelta, ToolCallBegin, ToolCallDelta
from oscine.chat.toolbox import ToolResult, WebSearch

Json = dict[str, Any]

_TOLD_ONCE = {"cache_creation", "inference_geo", "service_tier", "speed"}  # of the usage, when a stream begins
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnthropicAnswer(Struct):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Json]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Json


def sse(event: Json) -> bytes:
    return named_event(event["type"], msgspec.json.encode(event))


class Blocks:
    """The events of content: each block begins, grows and stops before the next one begins."""

    def __init__(self, *, thinking: bool, thinking_text: bool) -> None:
        """`thinking`: whether there are blocks of thinking. `thinking_text`: whether they have the text."""
        self._thinking, self._thinking_text = thinking, thinking_text
        self._index = -1
        self._open: str | None = None  # type of the block that grows
        self._thought = hashlib.blake2b(digest_size=24)
        self.num_searches = 0

    def feed(self, events: Sequence[TurnEvent]) -> Iterator[Json]:
        for event in events:
            match event:
                case ReasoningDelta() if self._thinking:
                    yield from self._think(event.text)
                case ContentDelta():
                    yield from self._grow("text", event.text, "text_delta")
                case ToolCallBegin():
                    yield from self._begin("tool_use", {"id": event.id, "name": event.name, "input": {}})
                case ToolCallDelta():
                    yield self._delta("input_json_delta", "partial_json", event.arguments)
                case MessageEnd():
                    yield from self.stop()
                case ToolAnswered(result=ToolResult(details=WebSearch() as search, is_error=failed)):
                    yield from self._search(search, failed=failed)

    def stop(self) -> Iterator[Json]:
        """Ends what is open."""
        if self._open == "thinking":
            yield self._delta("signature_delta", "signature", b64encode(self._thought.digest()).decode())
        if self._open is not None:
            yield {"type": "content_block_stop", "index": self._index}
        self._open = None

    def _think(self, text: str) -> Iterator[Json]:
        self._thought.update(text.encode("utf-8", "surrogatepass"))
        yield from self._grow("thinking", text if self._thinking_text else "", "thinking_delta")

    def _grow(self, kind: str, text: str, delta: str) -> Iterator[Json]:
        if self._open != kind:
            yield from self._begin(kind, {kind: "", "signature": ""} if kind == "thinking" else {kind: ""})
        if text:
            yield self._delta(delta, kind, text)

    def _search(self, search: WebSearch, *, failed: bool) -> Iterator[Json]:
        """A search of the server's, and what it found. Pages that are read afterwards have no blocks."""
        self.num_searches += 1
        call_id = f"srvtoolu_{uuid.uuid4().hex}"
        yield from self._begin("server_tool_use", {"id": call_id, "name": "web_search", "input": {}})
        yield self._delta("input_json_delta", "partial_json", msgspec.json.encode({"query": search.query}).decode())
        found: Any = [
            {"type": "web_search_result", "url": of.url, "title": of.title, "encrypted_content": "", "page_age": None}
            for of in search.sources
        ]
        error = {"type": "web_search_tool_result_error", "error_code": "unavailable"}
        content = error if failed else found
        yield from self._begin("web_search_tool_result", {"tool_use_id": call_id, "content": content})
        yield from self.stop()

    def compaction(self, fields: Json, signature: str | None) -> Iterator[Json]:
        """A summary in place of the conversation; its text comes in one piece."""
        signed = {} if signature is None else {"signature": signature}
        yield from self._begin("compaction", {**dict.fromkeys(fields), **signed})
        yield {"type": "content_block_delta", "index": self._index, "delta": {"type": "compaction_delta", **fields}}
        yield from self.stop()

    def _begin(self, kind: str, fields: Json) -> Iterator[Json]:
        yield from self.stop()
        self._open = kind
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **fields}}

    def _delta(self, kind: str, field: str, text: str) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, field: text}}


class MessageAnswer:
    """One answer, as a stream of events or as one object. It is the only choice of itself."""

    def __init__(self, turn: Turn, model: str, blocks: Blocks, *, stream: bool) -> None:
        self.turn = turn
        self.paused: Literal["compaction", "pause_turn"] | None = None  # why the answer ends for the client to go on
        self._turns = [turn]
        self._summaries: list[Turn] = []  # those of the turns that wrote a summary
        self._blocks, self._stream = blocks, stream
        self._message = AnthropicAnswer(f"msg_{uuid.uuid4().hex}", "message", "assistant", model, [], None, None, {})
        self._begun = False

    def encode(self, events: Sequence[TurnEvent]) -> bytes:
        return self._send(self._blocks.feed(events))

    def begin_compaction(self) -> bytes:
        """The turn is that of a summary, whose tokens are not counted as the answer's. Called for each of its news."""
        if self.turn not in self._summaries:
            self._summaries.append(self.turn)
        return self._send(())

    def go_on(self, turn: Turn) -> None:
        """The next turn of the answer, or of a summary."""
        self.turn = turn
        self._turns.append(turn)

    def compact(self, fields: Json, signature: str | None) -> bytes:
        return self._send(self._blocks.compaction(fields, signature))

    def _send(self, events: Iterable[Json]) -> bytes:
        if not self._stream:
            self._keep(events)
            return b""
        begin = b"" if self._begun else self._begin()
        return begin + b"".join(map(sse, events))

    def _begin(self) -> bytes:
        self._begun = True
        self._message.usage = self._usage()
        return sse({"type": "message_start", "message": self._message}) + sse({"type": "ping"})

    def _keep(self, events: Iterable[Json]) -> None:
        content = self._message.content
        for event in events:
            if event["type"] == "content_block_start":
                content.append(event["content_block"])
            elif event.get("delta", {}).get("type") == "compaction_delta":
                content[-1] |= event["delta"] | {"type": "compaction"}
            elif event["type"] == "content_block_delta":
                ((field, text),) = ((key, value) for key, value in event["delta"].items() if key != "type")
                content[-1][field] = content[-1].get(field, "") + text

    def _usage(self) -> Json:
        """A compaction is an iteration of its own, and not among the tokens of the answer."""
        searches = self._blocks.num_searches
        answers = [turn for turn in self._turns if turn not in self._summaries]
        counts = _counts(answers, searched=searches > 0)
        before = [{"type": "compaction", **_counts([summary])} for summary in self._summaries]
        usage = {
            **counts,
            "output_tokens_details": {"thinking_tokens": sum(turn.num_reasoning_tokens for turn in answers)},
            "inference_geo": None,
            "service_tier": "standard",
            "speed": "standard",
        }
        if searches:  # each of which is an iteration of its own, and all are counted together
            found = {"server_tool_use": {"web_search_requests": searches, "web_fetch_requests": 0}}
            return {**usage, **found, **({"iterations": before} if before else {})}
        answered = [{"type": "message", **counts}] if answers else []
        return {**usage, "iterations": [*before, *answered]}

    def _ending(self) -> Json:
        if self.paused is not None:
            return {"stop_reason": self.paused, "stop_sequence": None}
        stopped_by = self.turn.stop_string
        reason = _STOP_REASONS[self.turn.finish_reason or "stop"]
        return {"stop_reason": "stop_sequence" if stopped_by else reason, "stop_sequence": stopped_by}

    def last_event(self) -> bytes:
        stopped = b"".join(map(sse, self._blocks.stop()))
        usage = {name: value for name, value in self._usage().items() if name not in _TOLD_ONCE}
        delta = sse({"type": "message_delta", "delta": self._ending(), "usage": usage})
        return stopped + delta + sse({"type": "message_stop"})

    def failure(self, error: APIError) -> bytes:
        return named_event("error", error.anthropic_body())

    def body(self) -> bytes:
        self._keep([*self._blocks.stop()])
        content = [_whole(block) for block in self._message.content]
        return msgspec.json.encode(replace(self._message, content=content, usage=self._usage(), **self._ending()))


def _counts(turns: Sequence[Turn], *, searched: bool = False) -> Json:
    """Prompt tokens that the prefix cache had are not among the input tokens."""
    read = sum(turn.num_prompt_tokens + (turn.num_appended_tokens if searched else 0) for turn in turns)
    cached, made = sum(turn.num_cached_tokens for turn in turns), sum(turn.num_tokens for turn in turns)
    return {
        "input_tokens": read - cached,
        "cache_creation_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "cache_read_input_tokens": cached,
        "output_tokens": made,
    }


def _whole(block: Json) -> Json:
    """A call's input as the object that its pieces of JSON make."""
    if block["type"] in ("tool_use", "server_tool_use"):
        block["input"] = arguments_object(block.pop("partial_json", ""))
    return block
