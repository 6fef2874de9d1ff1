"""The client side of the chat: messages go to a server's chat completions, and the answer streams into the terminal."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx

from oscine.cli.error import CommandError
from oscine.extensions.terminal.output import Terminal


class Conversation:
    """Every request has `settings`; None values are left to the server.

    `max_tokens` bounds an answer if the settings do not. In a context with less room, the context bounds it.
    """

    def __init__(
        self, client: httpx.Client, settings: dict[str, Any], max_tokens: int, terminal: Terminal, notes: Terminal
    ) -> None:
        self.settings = settings
        self._client, self._max_tokens = client, max_tokens
        self._terminal, self._notes = terminal, notes
        self.instructions = ""  # what the system message says; empty: there is none
        self._messages: list[dict[str, Any]] = []

    def reset(self) -> None:
        self._messages.clear()

    def ask(self, prompt: str) -> None:
        """Streams the answer. Raises CommandError when the server cannot be asked or fails; ctrl-C passes through.

        The text up to then stays part of the conversation.
        """
        question = {"role": "user", "content": prompt}
        answer = None
        try:
            model = self.settings["model"] or self._first_model()
            answer = StreamedAnswer(self._terminal)
            system = [{"role": "system", "content": self.instructions}] if self.instructions else []
            self._stream({"model": model, "messages": [*system, *self._messages, question]}, answer)
        except httpx.HTTPError as error:
            raise CommandError(f"no answer from {self._client.base_url}: {error}") from None
        finally:
            self._terminal.end()
            if answer is not None and answer.content:
                self._messages += [question, {"role": "assistant", "content": answer.content}]
        self._notes.note(answer.summary())

    def _stream(self, body: dict[str, Any], answer: "StreamedAnswer") -> None:
        given = {name: value for name, value in self.settings.items() if value is not None}
        body = given | body | {"stream": True, "stream_options": {"include_usage": True}}
        try:
            self._post({"max_tokens": self._max_tokens} | body, answer)
        except _ContextError:
            if "max_tokens" in body:
                raise
            self._post(body, answer)

    def _post(self, body: dict[str, Any], answer: "StreamedAnswer") -> None:
        with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            _check(response)
            for chunk in _chunks(response):
                answer.add(chunk)

    def _first_model(self) -> str:
        response = self._client.get("/v1/models")
        _check(response)
        return str(response.json()["data"][0]["id"])


class _ContextError(CommandError):
    """The prompt and the tokens asked for exceed the context."""


def _check(response: httpx.Response) -> None:
    if response.is_success:
        return
    text = response.read().decode(errors="replace")
    code = None
    try:
        error = json.loads(text)["error"]
        text, code = error["message"], error.get("code")
    except (ValueError, LookupError, TypeError, AttributeError):
        text = text[:200]
    kind = _ContextError if code == "context_length_exceeded" else CommandError
    raise kind(f"the server answered {response.status_code}: {text}")


def _chunks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue  # a comment, a blank line, or the end
        chunk: dict[str, Any] = json.loads(data)
        if "error" in chunk:
            raise CommandError(chunk["error"]["message"])
        yield chunk


class StreamedAnswer:
    """One answer as it comes in, and how fast it came."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal
        self._asked_s = time.perf_counter()
        self._first_s: float | None = None
        self._last_s = self._asked_s
        self._tokens = 0
        self._finish_reason: str | None = None
        self.content = ""

    def add(self, chunk: dict[str, Any]) -> None:
        if chunk.get("usage"):
            self._tokens = chunk["usage"]["completion_tokens"]
        for choice in chunk["choices"]:
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
            delta = choice["delta"]
            reasoning = delta.get("reasoning") or delta.get("reasoning_content") or ""
            content = delta.get("content") or ""
            if reasoning or content:
                self._last_s = time.perf_counter()
                self._first_s = self._first_s or self._last_s
            self._terminal.reasoning(reasoning)
            self._terminal.answer(content)
            self.content += content

    def summary(self) -> str:
        if self._first_s is None:
            return "nothing was generated"
        parts = [f"first token after {self._first_s - self._asked_s:.2f} s"]
        if self._tokens > 1:
            # Of the whole answer: what a server of a small model sent in one go would have no time between its tokens.
            rate = self._tokens / (self._last_s - self._asked_s)
            parts = [f"{self._tokens} tokens", f"{rate:.0f} tokens/s", *parts]
        if self._finish_reason == "length":
            parts.append("cut off by the token limit (--max-tokens)")
        return ", ".join(parts)
