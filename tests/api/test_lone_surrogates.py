"""Texts that were cut in the middle of a character, as JSON of JavaScript has them."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscine.api.serving.schemas import arguments_object
from oscine.api.turns.custom_tools import read_input
from oscine.system.json_text import decode_json, replace_lone_surrogates
from tests.api.scripted_server import ScriptedServer
from tests.extensions.apis.socket_server import SocketServer

HALF = "Done \ud83d"
MENDED = "Done \ufffd"


@given(st.lists(st.sampled_from(["a", "\\", '"', "u", "\ud83d", "\ude00", "\ud83d\ude00", "\udbff", "é", "d83d"])))
def test_each_is_replaced_and_nothing_else(parts: list[str]) -> None:
    """As Python's decoder joins and leaves them."""
    text = "".join(parts)
    body = json.dumps({"input": text, text: 1}).encode()
    expected = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")
    mended = "".join("\ufffd" if "\ud800" <= c <= "\udfff" else c for c in expected)
    assert decode_json(body, dict[str, Any]) == {"input": mended, mended: 1}
    assert len(replace_lone_surrogates(body)) == len(body)


@pytest.mark.parametrize("body", [b'{"a": "\\ud83d"', b'"\\u12"', b'{"a": \\ud83d}', b"\\ud83d", b"[1"])
def test_what_is_no_json_stays_none(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_json(body, object)


def test_a_body_of_very_many_is_refused_soon() -> None:
    few, many = (b'["' + b"\\ud83d" * count + b'"]' for count in (1000, 100_001))
    assert decode_json(few, list[str]) == ["\ufffd" * 1000]
    with pytest.raises(msgspec.DecodeError):
        decode_json(many, list[str])


@pytest.mark.parametrize("count", [63, 64, 65, 512, 4097])
def test_backslashes_before_one(count: int) -> None:
    text = "\\" * count + "\ud83d"
    assert decode_json(json.dumps(text).encode(), str) == "\\" * count + "\ufffd"
    literal = b'"' + b"\\" * (2 * count) + b'ud83d"'
    assert decode_json(literal, str) == "\\" * count + "ud83d"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": HALF}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": HALF}]}),
        ("/v1/messages", {"model": "any", "max_tokens": 5, "messages": [{"role": "user", "content": HALF}]}),
        ("/v1/completions", {"prompt": HALF}),
    ],
)
def test_one_does_not_end_a_job(scripted: ScriptedServer, path: str, body: dict[str, Any]) -> None:
    answer = scripted.post(path, {**body, "model": scripted.service.names[0]})
    assert answer.status_code == 200, answer.text
    assert MENDED in scripted.tokenizer.decode(scripted.engine.requests[-1].prompt_token_ids)


def test_a_lone_surrogate_in_the_arguments_of_a_call() -> None:
    """The arguments of its calls are JSON in JSON."""
    written = json.dumps({"input": HALF})
    assert arguments_object(written) == {"input": MENDED}
    assert read_input(written) == MENDED


def test_one_over_a_websocket(model_folder: Path) -> None:
    with SocketServer(model_folder) as server, server.connect() as client:
        server.saying("Yes.", "Yes.")
        first = client.respond(input=HALF, stream_id="a", store=False)
        assert MENDED in server.prompt()
        client.respond(input=f"{HALF} more", previous_response_id=first["id"], store=False)
        assert server.prompt().count("Done \ufffd") == 2
