"""What `oscine bench serve` reads from the wire: events with tokens, counts, errors, and HTTP in any pieces."""

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest

from oscine.extensions.bench.serve.answer import Answer, Record
from oscine.extensions.bench.serve.api import APIS
from oscine.extensions.bench.serve.connection import Connection
from tests.extensions.bench.scripted_source import DONE, chat_event, chat_stream, usage_event

TRICKY = 'He said {"content": "yes"}, then \\"text\\": "no" and "usage": {"completion_tokens": 9}.\n\n'


def event(**fields: Any) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def read(stream: bytes, api: str = "chat", *, status: int = 200, kind: str = "text/event-stream") -> Answer:
    answer = Answer(APIS[api], Record(0.0, 0.0), [0], keep=True)
    answer.head(status, kind)
    answer.feed(stream, 1.0)
    answer.finish()
    return answer


def bytes_of(pieces: Any) -> bytes:
    return b"".join(piece for piece in pieces if isinstance(piece, bytes))


def test_the_role_the_end_and_the_usage_are_no_tokens() -> None:
    answer = read(bytes_of(chat_stream(6)))
    record = answer.record
    assert len(record.events_s) == 6
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens, record.error) == (7, 6, 3, "")
    assert APIS["chat"].text(answer.kept) == "yes yes yes "


@pytest.mark.parametrize(
    ("api", "token", "end"),
    [
        ("chat", b'{"choices":[{"delta":{"content":"yes"}}]}', b'{"choices":[{"delta":{},"finish_reason":"length"}]}'),
        ("completions", b'{"choices":[{"text":"a"}]}', b'{"choices":[{"text":"b","finish_reason": "stop"}]}'),
        ("responses", b'{"type":"x.delta","delta":"a"}', b'{"type":"response.incomplete","response":{}}'),
    ],
)
def test_an_answer_lasts_until_the_event_that_ends_it(api: str, token: bytes, end: bytes) -> None:
    """Tokens that a client ignores the end for have no text."""
    answer = Answer(APIS[api], Record(0.0, 0.0), [0], keep=False)
    answer.head(200, "text/event-stream")
    answer.feed(b"data: " + token + b"\n\n", 1.0)
    assert answer.record.last_s == 1.0
    answer.feed(b"data: " + end + b"\n\n", 4.0)
    answer.feed(b"data: [DONE]\n\n", 5.0)
    answer.finish()
    assert answer.record.last_s == 4.0


def test_a_text_that_names_the_end_does_not_end_the_answer() -> None:
    answer = read(chat_event(content='"finish_reason": "stop"') + chat_event(content="yes"))
    assert math.isnan(answer.record.ended_s)


def test_the_first_event_is_the_role_and_no_comment() -> None:
    """A server sends it with the first token, which belongs to a header and has no text."""
    answer = Answer(APIS["chat"], Record(0.0, 0.0), [0], keep=False)
    answer.head(200, "text/event-stream")
    answer.feed(b": keep-alive\n\n", 1.0)
    answer.feed(chat_event(role="assistant", content="") + b": keep-alive\n\n", 2.0)
    answer.feed(chat_event(content="yes"), 5.0)
    assert (answer.record.begun_s, list(answer.record.events_s)) == (2.0, [5.0])


@pytest.mark.parametrize(
    ("delta", "counts"),
    [
        ({"content": "x"}, True),
        ({"content": ""}, False),
        ({"content": None, "reasoning": "x"}, True),
        ({"reasoning_content": "x", "reasoning": "x"}, True),
        ({"reasoning_content": "", "content": None}, False),
        ({"tool_calls": [{"index": 0, "id": "call", "function": {"name": "f", "arguments": ""}}]}, True),
        ({"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]}, True),
        ({"role": "assistant"}, False),
        ({"content": TRICKY}, True),
        ({"content": "", "note": TRICKY}, False),
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["compact", "spaced"])
def test_an_event_counts_once_if_it_has_a_text(
    delta: dict[str, Any], counts: bool, separators: tuple[str, str]
) -> None:
    body = json.dumps({"choices": [{"index": 0, "delta": delta}], "usage": None}, separators=separators)
    assert len(read(f"data: {body}\n\n".encode()).record.events_s) == counts


def test_a_text_about_usage_is_not_the_usage() -> None:
    record = read(chat_event(content=TRICKY) + usage_event(1, 2) + DONE).record
    assert (record.output_tokens, record.error) == (2, "")


def test_usage_in_the_last_event_with_tokens() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 3}
    stream = event(choices=[{"text": "a"}]) + event(choices=[{"text": "b"}], usage=usage)
    record = read(stream, "completions").record
    assert (len(record.events_s), record.output_tokens, record.has_usage) == (2, 3, True)


def test_without_usage_events_are_counted() -> None:
    record = read(chat_event(content="a") * 4 + DONE).record
    assert (record.output_tokens, record.has_usage, record.error) == (4, False, "")


def test_responses() -> None:
    usage = {"input_tokens": 5, "output_tokens": 9, "input_tokens_details": {"cached_tokens": 1}}
    parts = [
        ("response.created", {"response": {"error": None, "usage": None}}),
        ("response.reasoning_text.delta", {"delta": "so"}),
        ("response.output_text.delta", {"delta": ""}),
        ("response.output_text.delta", {"delta": "Hi", "logprobs": []}),
        ("response.output_text.delta", {"delta": " you", "logprobs": []}),
        ("response.output_text.done", {"text": "Hi you"}),
        ("response.completed", {"response": {"error": None, "usage": usage, "output": [{"text": "Hi you"}]}}),
    ]
    stream = b"".join(f"event: {kind}\n".encode() + event(type=kind, **fields) for kind, fields in parts)
    answer = read(stream, "responses")
    record = answer.record
    assert (len(record.events_s), record.prompt_tokens, record.output_tokens, record.cached_tokens) == (3, 5, 9, 1)
    assert APIS["responses"].text(answer.kept) == "Hi you"


@pytest.mark.parametrize(
    ("stream", "settings", "said"),
    [
        (b'{"error": {"message": "too\\nlong"}}', {"status": 400}, "400: too long"),
        (b"<html>Bad gateway</html>", {"status": 502}, "502: <html>Bad gateway</html>"),
        (chat_event(content="a") + event(error={"message": "engine died"}), {}, "engine died"),
        (b'event: error\ndata: {"type": "error", "message": "overloaded"}\n\n', {}, "overloaded"),
        (event(type="response.failed", response={"error": {"message": "gone"}}), {"api": "responses"}, "gone"),
        (DONE, {}, "no token came"),
        (b'{"choices": []}', {"kind": "application/json"}, "not a stream"),
    ],
)
def test_failures(stream: bytes, settings: dict[str, Any], said: str) -> None:
    assert said in read(stream, **settings).record.error


def test_tokens_without_text_are_no_failure() -> None:
    """One token can be a part of a character, or end a message."""
    usage = {"prompt_tokens": 5, "completion_tokens": 1}
    end = event(choices=[{"delta": {}, "finish_reason": "length"}]) + event(choices=[], usage=usage)
    record = read(end + DONE).record
    assert (record.error, len(record.events_s), record.output_tokens) == ("", 1, 1)
    usage["completion_tokens"] = 0
    assert read(event(choices=[], usage=usage) + DONE).record.error == "no token came"


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


async def exchange(pieces: Iterator[bytes], *, then_closed: bool = False) -> tuple[Answer, Wire]:
    connection, wire = Connection(), Wire()
    connection.connection_made(wire)  # type: ignore[arg-type]
    answer = Answer(APIS["chat"], Record(0.0, 0.0), [0], keep=False)
    asking = asyncio.ensure_future(connection.ask(b"request", answer))
    await asyncio.sleep(0)
    for piece in pieces:
        connection.data_received(piece)
    if then_closed:
        connection.connection_lost(None)
    await asyncio.wait_for(asking, 10)
    answer.finish()
    return answer, wire


STREAM = bytes_of(chat_stream(6))
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = (
    HEAD
    + b"transfer-encoding: chunked\r\n\r\n"
    + b"".join(b"%X\r\n%s\r\n" % (len(part), part) for part in (STREAM[:100], STREAM[100:101], STREAM[101:]))
    + b"0\r\n\r\n"
)
SIZED = HEAD + b"Content-Length: %d\r\n\r\n" % len(STREAM) + STREAM
CLOSED = HEAD + b"\r\n" + STREAM


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100, 10_000])
@pytest.mark.parametrize("form", ["chunked", "sized", "until closed", "carriage returns"])
def test_http_in_any_pieces(form: str, size: int) -> None:
    crlf = STREAM.replace(b"\n", b"\r\n")
    message = {
        "chunked": CHUNKED,
        "sized": SIZED,
        "until closed": CLOSED,
        "carriage returns": HEAD + b"Content-Length: %d\r\n\r\n" % len(crlf) + crlf,
    }[form]
    pieces = (message[at : at + size] for at in range(0, len(message), size))
    answer, wire = asyncio.run(exchange(pieces, then_closed=form == "until closed"))
    record = answer.record
    assert (len(record.events_s), record.output_tokens, record.error) == (6, 6, "")
    assert wire.closed == (form == "until closed")


def test_a_connection_that_says_close_is_closed() -> None:
    _, wire = asyncio.run(exchange(iter([CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)])))
    assert wire.closed


def test_an_answer_that_is_cut_off_is_an_error() -> None:
    with pytest.raises(ConnectionError):
        asyncio.run(exchange(iter([CHUNKED[:-30]]), then_closed=True))


def test_what_is_not_http_is_an_error() -> None:
    with pytest.raises(ValueError, match="not HTTP"):
        asyncio.run(exchange(iter([b"SSH-2.0-OpenSSH\r\n\r\n"])))
