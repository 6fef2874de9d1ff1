"""Overload: the errors and the Retry-After of a full server."""

import json
import logging
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from oscine.api.common.errors import APIError
from oscine.api.serving.admission import Admission
from oscine.cli.local_server import local_server
from oscine.engine.wire.stream import EngineDied, EngineError, EngineOverloaded
from oscine.settings.config import Config, EngineOptions, ModelOptions, ServerOptions
from tests.api.scripted_server import ScriptedServer
from tests.api.test_rate_limits import Clock

ASKED = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}
FULL = EngineOverloaded("300 requests wait", retry_after_s=6.2)
GONE = EngineDied("no replica is ready", retry_after_s=0.3)


@pytest.mark.parametrize(
    ("path", "error", "status", "kind", "after"),
    [
        ("/v1/chat/completions", FULL, 503, "service_unavailable_error", "7"),
        ("/v1/chat/completions", GONE, 503, "service_unavailable_error", "1"),
        ("/v1/messages", FULL, 529, "overloaded_error", "7"),
        ("/v1/messages", GONE, 503, "api_error", "1"),
    ],
)
def test_the_engines_own_estimate_reaches_the_client(
    scripted: ScriptedServer, path: str, error: EngineError, status: int, kind: str, after: str
) -> None:
    scripted.engine.script = lambda request: [error]
    for stream in (False, True):
        answer = scripted.post(path, ASKED | {"model": scripted.model.names[0], "stream": stream})
        assert (answer.status_code, answer.headers["retry-after"]) == (status, after)
        assert answer.json()["error"]["type"] == kind
        assert str(error) in answer.json()["error"]["message"]


def refused(admission: Admission, sequences: int, tokens: int = 0) -> int:
    with pytest.raises(APIError) as caught:
        admission.check(sequences, tokens)
    assert caught.value.code == "overloaded"
    return int(caught.value.headers["Retry-After"])


def test_a_full_queue_tells_when_there_will_be_room() -> None:
    """Of four places one becomes free every three seconds, and 100 tokens with it."""
    clock = Clock()
    admission = Admission(4, 1000, clock)
    held = [admission.hold(1, 100) for _ in range(8)]
    for hold in held[:4]:
        hold.__enter__()
    assert refused(admission, 1) == 1  # nobody can know yet
    for leaving, coming in zip(held[:4], held[4:], strict=True):
        clock.now += 3
        leaving.__exit__(None, None, None)
        coming.__enter__()
    assert refused(admission, 1) == 3
    assert refused(admission, 4) == 12
    held[4].__exit__(None, None, None)
    assert (refused(admission, 2), refused(admission, 1, 900)) == (3, 5)  # 4 places, 400 tokens in 9 s
    for hold in held[5:]:
        hold.__exit__(None, None, None)
    clock.now += 1000  # idle
    with admission.hold(4):
        assert refused(admission, 1) == 1


def test_an_estimate_has_a_bound() -> None:
    clock = Clock()
    admission = Admission(2, 1000, clock)
    with admission.hold(1):
        for _ in range(2):
            with admission.hold(1):
                clock.now += 10_000
        assert refused(admission, 2) == 60


@pytest.mark.needs("apis")
def test_the_engine_learns_on_whose_behalf(model_folder: Path, tmp_path: Path) -> None:
    with ScriptedServer(model_folder) as server:
        server.says(server.tokenizer.return_)
        server.chat()
        assert server.engine.requests[-1].tenant == ""
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps([{"name": "team-a", "key": "secret"}]))
    with ScriptedServer(model_folder, api_keys_file=str(keys)) as server:
        server.says(server.tokenizer.return_)
        headers = {"Authorization": "Bearer secret"}
        for path in ("/v1/chat/completions", "/v1/responses"):
            body = {"input": "hi"} if path.endswith("responses") else ASKED
            answer = server.run(server._request("POST", path, json.dumps(body), headers))
            assert answer.status_code == 200
            assert server.engine.requests[-1].tenant == "team-a"


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "warned"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "0.0.0.0", "api_keys": ("key",)}, False),
        ({"host": "127.0.0.1"}, False),
        ({"host": "localhost"}, False),
    ],
)
def test_a_server_that_strangers_reach_says_so_once(
    model_folder: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], warned: bool
) -> None:
    engine = EngineOptions(model=ModelOptions(model=str(model_folder)), executor="fake")
    caplog.set_level(logging.INFO, "oscine.api.server")
    with local_server(Config(engine, ServerOptions(port=0, drain_s=0.0, **options))) as url:
        assert url.startswith("http://127.0.0.1:")
        urlopen(f"{url}/v1/health/live").close()  # it listens
    bound = "0.0.0.0" if options["host"] == "0.0.0.0" else "127.0.0.1"
    assert f"listening on {url.replace('127.0.0.1', bound)}" in [record.getMessage() for record in caplog.records]
    lines = [record.getMessage() for record in caplog.records if "may use this server" in record.getMessage()]
    assert len(lines) == warned
    assert all("--host 0.0.0.0" in line and "--api-key" in line for line in lines)
