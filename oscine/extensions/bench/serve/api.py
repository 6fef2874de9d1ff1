"""The APIs that are measured: request bodies, and how to read the events of a stream.

An event carries tokens if it has a text that is not empty. This is found without decoding JSON: within a JSON string
every quote is escaped, so the pattern of a key and its value matches nothing there.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from oscine.extensions.bench.serve.load import Prompt, Turn


class Usage(NamedTuple):
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Api:
    name: str
    path: str
    token: re.Pattern[bytes]  # found in an event that carries tokens
    messages: str  # the key of the conversation
    limit: str  # the key of the most tokens
    constant: dict[str, Any]  # parameters of every request

    def body(self, model: str, turn: Turn, history: list[str], extra: dict[str, Any]) -> bytes:
        """`history`: earlier messages of the session, the user's texts and the answers in turn."""
        said = {} if turn.prompt is None else {self.messages: self._said(turn.prompt, history)}
        body = {"model": model, **said, self.limit: turn.max_tokens, **self.constant, **extra, **turn.parameters}
        return json.dumps(body, ensure_ascii=False).encode()

    def _said(self, prompt: Prompt, history: list[str]) -> Any:
        if self.messages == "prompt":
            return "".join([*history, prompt]) if isinstance(prompt, str) else prompt
        roles = ("user", "assistant")
        return [{"role": roles[index % 2], "content": text} for index, text in enumerate([*history, prompt])]

    def text(self, events: list[bytes]) -> str:
        """The answer that these events carry, without its reasoning."""
        return "".join(map(_text, map(decode, events)))


def _tokens(*keys: str) -> re.Pattern[bytes]:
    return re.compile(rb'"(?:%s)" ?: ?"[^"]' % "|".join(keys).encode())


_USAGE = {"stream": True, "stream_options": {"include_usage": True}}

APIS = {
    api.name: api
    for api in (
        Api(
            "chat",
            "/v1/chat/completions",
            _tokens("content", "reasoning", "reasoning_content", "arguments", "name", "refusal"),
            "messages",
            "max_tokens",
            _USAGE,
        ),
        Api("completions", "/v1/completions", _tokens("text"), "prompt", "max_tokens", _USAGE),
        Api(
            "responses",
            "/v1/responses",
            _tokens("delta"),
            "input",
            "max_output_tokens",
            {"stream": True, "store": False},
        ),
    )
}


def decode(event: bytes) -> dict[str, Any]:
    """The JSON of an event; empty if it has none."""
    data = b"\n".join(line[5:] for line in event.split(b"\n") if line.startswith(b"data:"))
    try:
        decoded = json.loads(data)
    except ValueError:
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _text(event: dict[str, Any]) -> str:
    if event.get("type") == "response.output_text.delta":
        return str(event["delta"])
    choice: dict[str, Any] = next(iter(event.get("choices") or []), {})
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


def usage_of(event: dict[str, Any]) -> Usage | None:
    usage = event.get("usage") or (event.get("response") or {}).get("usage")
    if not isinstance(usage, dict):
        return None
    prompt, output = (usage.get(f"{a}_tokens", usage.get(f"{b}_tokens", 0)) for a, b in _SPELLINGS)
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return Usage(prompt or 0, output or 0, details.get("cached_tokens") or 0)


_SPELLINGS = (("prompt", "input"), ("completion", "output"))


def error_of(event: dict[str, Any]) -> str | None:
    """The error message in an event or in the body of an answer."""
    error = event.get("error") or (event.get("response") or {}).get("error")
    if event.get("type") == "error":
        error = error or event
    if isinstance(error, dict):
        return str(error.get("message") or error)
    return str(error) if error else None
