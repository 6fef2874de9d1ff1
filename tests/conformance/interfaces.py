"""One completion read through chat completions, responses, Anthropic's messages and Ollama's chat, streamed and whole.

Each reader validates with the types of the interface's own client, and returns the completion in a common form.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from ollama import ChatResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from tests.api.scripted_server import ScriptedServer, events_of
from tests.conformance.odd_streams import FUNCTIONS
from tests.extensions.apis.response_stream import check_response, check_stream, parse

_CHUNK: TypeAdapter[Any] = TypeAdapter(ChatCompletionChunk)
_COMPLETION: TypeAdapter[Any] = TypeAdapter(ChatCompletion)
_BLOCK_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
_MESSAGE: TypeAdapter[Any] = TypeAdapter(AnthropicMessage)

_PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
_FUNCTIONS = [{"name": name, "parameters": _PARAMETERS} for name in FUNCTIONS]
_ASKED = [{"role": "user", "content": "hi"}]


@dataclass(frozen=True)
class Said:
    reasoning: str
    content: str
    calls: tuple[tuple[str, str], ...]  # name and arguments
    end: str  # why it ended, as the interface says it
    tokens: int  # of the answer

    @property
    def texts(self) -> list[str]:
        return [self.reasoning, self.content, *(text for call in self.calls for text in call)]


def chat(server: ScriptedServer, *, stream: bool) -> Said:
    body: dict[str, Any] = {"messages": _ASKED, "tools": [{"type": "function", "function": f} for f in _FUNCTIONS]}
    if stream:
        response = server.post(
            "/v1/chat/completions", {**body, "stream": True, "stream_options": {"include_usage": True}}
        )
        assert response.status_code == 200, response.text
        return _chat_chunks(events_of(response))
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    answer = response.json()
    _COMPLETION.validate_json(response.content, strict=True)
    message = answer["choices"][0]["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
    return Said(
        message.get("reasoning") or "",
        message["content"] or "",
        tuple(calls),
        answer["choices"][0]["finish_reason"],
        answer["usage"]["completion_tokens"],
    )


def _chat_chunks(chunks: list[dict[str, Any]]) -> Said:
    for chunk in chunks:
        _CHUNK.validate_json(json.dumps(chunk), strict=True)
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    *growing, usage = chunks
    deltas = [choice["delta"] for chunk in growing for choice in chunk["choices"]]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])
    calls: list[tuple[str, str]] = []
    for piece in (piece for delta in deltas for piece in delta.get("tool_calls", ())):
        if "id" in piece:
            assert piece["index"] == len(calls)
            calls.append((piece["function"]["name"], piece["function"].get("arguments", "")))
        else:
            assert piece["index"] == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + piece["function"]["arguments"])
    ends = [choice["finish_reason"] for chunk in growing for choice in chunk["choices"]]
    assert ends[:-1] == [None] * (len(ends) - 1)
    return Said(
        "".join(delta.get("reasoning") or "" for delta in deltas),
        "".join(delta.get("content") or "" for delta in deltas),
        tuple(calls),
        ends[-1],
        usage["usage"]["completion_tokens"],
    )


def responses(server: ScriptedServer, *, stream: bool) -> Said:
    body = {"input": "hi", "tools": [{"type": "function", **f} for f in _FUNCTIONS], "store": False, "stream": stream}
    response = server.post("/v1/responses", body)
    assert response.status_code == 200, response.text
    answer = check_stream(parse(response.text)) if stream else check_response(response.json())
    assert answer is not None, response.text
    said: dict[str, list[Any]] = {"reasoning": [], "message": [], "function_call": []}
    for item in answer["output"]:
        said[item["type"]].append(item)
    content = said["reasoning"], said["message"]
    reasoning, text = ("".join(part["text"] for item in items for part in item["content"]) for items in content)
    calls = tuple((item["name"], item["arguments"]) for item in said["function_call"])
    return Said(reasoning, text, calls, answer["status"], answer["usage"]["output_tokens"])


def anthropic(server: ScriptedServer, *, stream: bool) -> Said:
    body = {
        "model": server.service.names[0],
        "max_tokens": 1000,
        "messages": _ASKED,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"name": name, "input_schema": _PARAMETERS} for name in FUNCTIONS],
        "stream": stream,
    }
    response = server.post("/v1/messages", {**body, "max_tokens": 1500})
    assert response.status_code == 200, response.text
    answer = _blocks(response.text) if stream else response.json()
    _MESSAGE.validate_json(json.dumps(answer), strict=True)

    def joined(kind: str, field: str) -> str:
        return "".join(block[field] for block in answer["content"] if block["type"] == kind)

    calls = [(b["name"], json.dumps(b["input"])) for b in answer["content"] if b["type"] == "tool_use"]
    reasoning, content = joined("thinking", "thinking"), joined("text", "text")
    return Said(reasoning, content, tuple(calls), answer["stop_reason"], answer["usage"]["output_tokens"])


def _blocks(text: str) -> dict[str, Any]:
    """The message that the events add up to; fails unless blocks begin, grow and stop one after the other."""
    message: dict[str, Any] = {}
    open_at: int | None = None
    for event in parse(text):
        if event["type"] == "ping":
            continue
        _BLOCK_EVENT.validate_json(json.dumps(event), strict=True)
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                assert open_at is None
                assert event["index"] == len(message["content"])
                open_at = event["index"]
                message["content"].append({**event["content_block"], "json": ""})
            case "content_block_delta":
                assert event["index"] == open_at
                _grow(message["content"][open_at], event["delta"])
            case "content_block_stop":
                assert event["index"] == open_at
                block, open_at = message["content"][open_at], None
                grown = block.pop("json")
                if block["type"] == "tool_use":
                    block["input"] = _object(grown or "{}")
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
            case other:
                assert other == "message_stop"
    assert open_at is None
    return message


def _object(text: str) -> dict[str, Any]:
    """A whole answer carries arguments that are no object as they came."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"invalid_json": text}


def _grow(block: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if name == "partial_json":
            block["json"] += value
        elif name != "type":
            block[name] += value


def ollama(server: ScriptedServer, *, stream: bool) -> Said:
    tools = [{"type": "function", "function": function} for function in _FUNCTIONS]
    body = {"model": server.service.names[0], "messages": _ASKED, "tools": tools, "stream": stream}
    response = server.post("/api/chat", body)
    assert response.status_code == 200, response.text
    records = [json.loads(line) for line in response.text.splitlines()] if stream else [response.json()]
    for record in records:
        ChatResponse.model_validate_json(json.dumps(record), strict=True)
    assert [record["done"] for record in records] == [False] * (len(records) - 1) + [True]
    messages = [record["message"] for record in records]
    calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
    return Said(
        "".join(message.get("thinking", "") for message in messages),
        "".join(message["content"] for message in messages),
        tuple((call["name"], json.dumps(call["arguments"])) for call in calls),
        records[-1]["done_reason"],
        records[-1]["eval_count"],
    )


Reader = Callable[..., Said]
INTERFACES: dict[str, Reader] = {"chat": chat, "responses": responses, "anthropic": anthropic, "ollama": ollama}
