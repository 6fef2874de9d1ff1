"""Tokenizers that panic: at load the start fails with one line, on a text the request does."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.scripted_server import ScriptedServer
from tests.fake_model import write_fake_model

ENDLESS = "a" * 40 + "b"  # more ways to match than its library tries
FAILS = {"messages": [{"role": "user", "content": ENDLESS}]}


@pytest.fixture
def panicking(tmp_path: Path) -> Iterator[ScriptedServer]:
    path = write_fake_model(tmp_path) / "tokenizer.json"
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    values = json.loads(path.read_text())
    values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, values["pre_tokenizer"]]}
    path.write_text(json.dumps(values))
    with ScriptedServer(tmp_path) as server:
        yield server


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", FAILS),
        ("/v1/responses", {"input": ENDLESS, "stream": True}),
        ("/v1/messages", FAILS | {"max_tokens": 10}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": ENDLESS + " and" * 20_000}]}),
        ("/api/chat", FAILS),
        ("/v1/completions", {"prompt": ENDLESS}),
    ],
)
def test_a_text_on_which_the_tokenizer_fails_is_400_and_one_line(
    panicking: ScriptedServer, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    with caplog.at_level(logging.WARNING):
        answer = panicking.post(path, body | {"model": panicking.model.names[0]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    message = error if path.startswith("/api") else error["message"]
    assert message == "The model's tokenizer fails on a text of this request."
    (record,) = caplog.records
    assert "tokenizer.json fails on a text: Onig: Regex search error" in record.getMessage()
    assert record.exc_info is None
    panicking.says("Hello", panicking.tokenizer.return_)
    assert panicking.chat("aab")["object"] == "chat.completion"


def test_a_tokenizer_that_panics_when_it_is_loaded_ends_the_start(tmp_path: Path) -> None:
    path = write_fake_model(tmp_path) / "tokenizer.json"
    server = ScriptedServer(tmp_path)
    broken = {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}}
    path.write_text(json.dumps(json.loads(path.read_text()) | broken))
    try:
        with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer file: Precompiled: ") as raised:
            server.run(server.model.start())
        assert "\n" not in str(raised.value)
        assert server.model.state == "failed"
    finally:
        server.__exit__(None, None, None)
