"""Checks all that an application answers to agents with the types of openai and anthropic, while they work."""

import json
from typing import Any

from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tests.conformance.exact_types import check_type
from tests.extensions.apis.response_stream import check_response, check_stream, parse

_ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
Json = dict[str, Any]


class CheckedApp:
    """An ASGI application around another one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.wrong: list[str] = []  # violations
        self.num_asked = 0  # for answers, by HTTP and over WebSockets
        self.num_refused = 0  # of these, with an error in place of an answer
        self.num_answers = 0  # that were whole, and were checked
        self.num_events = 0

    @property
    def num_unfinished(self) -> int:
        """Answers that a client did not wait for."""
        return self.num_asked - self.num_refused - self.num_answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._app(scope, self._asked_by_socket(receive), self._of_socket(send))
        elif scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in CHECKS:
            self.num_asked += 1
            await self._app(scope, receive, self._of_answer(scope["path"], send))
        else:
            await self._app(scope, receive, send)

    def _asked_by_socket(self, receive: Receive) -> Receive:
        async def counting() -> Message:
            message = await receive()
            if message["type"] == "websocket.receive" and json.loads(message["text"])["type"] == "response.create":
                self.num_asked += 1
            return message

        return counting

    def _of_socket(self, send: Send) -> Send:
        lanes: dict[str | None, list[Json]] = {}

        async def checking(message: Message) -> None:
            await send(message)
            if message["type"] == "websocket.send":
                event = json.loads(message.get("text") or message["bytes"])
                lane = event.pop("stream_id", None)
                events = lanes.setdefault(lane, [])
                events.append(event)
                if event["type"] in _ENDS:
                    del lanes[lane]
                    if events[0]["type"] == "error":
                        self.num_refused += 1
                    else:
                        self._check(check_stream, events)

        return checking

    def _of_answer(self, path: str, send: Send) -> Send:
        head: Message = {}
        pieces: list[bytes] = []

        async def checking(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.start":
                head.update(message)
            elif message["type"] == "http.response.body":
                pieces.append(message.get("body", b""))
                if message.get("more_body"):
                    return
                if head["status"] == 200:
                    text = b"".join(pieces).decode()
                    streamed = dict(head["headers"])[b"content-type"].startswith(b"text/event-stream")
                    self._check(CHECKS[path][streamed], text)
                else:
                    self.num_refused += 1

        return checking

    def _check(self, check: Any, given: Any) -> None:
        self.num_answers += 1
        self.num_events += given.count("data: ") if isinstance(given, str) else len(given)
        try:
            check(given)
        except AssertionError as error:
            self.wrong.append(f"{error!r} in {given!r}"[:2000])


def _chat_events(text: str) -> None:
    *events, done, end = text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    for event in events:
        check_type(ChatCompletionChunk, event.removeprefix("data: "))


def _message_events(text: str) -> None:
    events = [event for event in parse(text) if event["type"] != "ping"]
    for event in events:
        check_type(BetaRawMessageStreamEvent, json.dumps(event))
    assert [event["type"] for event in (events[0], events[-1])] == ["message_start", "message_stop"]


CHECKS = {  # of an answer that is whole, and of one that is streamed
    "/v1/responses": (lambda text: check_response(json.loads(text)), lambda text: check_stream(parse(text))),
    "/v1/messages": (lambda text: check_type(BetaMessage, text), _message_events),
    "/v1/chat/completions": (lambda text: check_type(ChatCompletion, text), _chat_events),
}
