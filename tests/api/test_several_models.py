"""One server with several models: each is found by name, becomes ready by itself, and can be added and removed."""

import asyncio
import contextlib
import http.client
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from oscine.api.apis import make_service
from oscine.api.server import Server
from oscine.engine.process.client import EngineClient, EngineError
from oscine.engine.wire.stream import EngineDied
from oscine.settings.config import Config, EngineOptions, ModelOptions, ServerOptions
from oscine.types import EngineInfo
from tests.api.scripted_engine import ScriptedEngine, in_pieces
from tests.api.scripted_server import ScriptedServer
from tests.api.test_metrics import scrape, total

WORKING = {"first": 200, "second": 200}


class BrokenEngine(ScriptedEngine):
    """Cannot be started."""

    async def start(self) -> None:
        self.state, self.error = "failed", "no such weights"

    async def wait_ready(self) -> EngineInfo:
        raise EngineDied("no such weights")


@pytest.fixture
def two(scripted: ScriptedServer) -> ScriptedServer:
    """`scripted` with another model, which says "two"; the first says "one"."""
    scripted.says("one", scripted.tokenizer.return_)
    second = add(scripted, ScriptedEngine(in_pieces([*scripted.tokenizer.encode("two")], 1, "length")), "second")
    scripted.run(second.start())
    return scripted


def add(server: ScriptedServer, engine: ScriptedEngine, *names: str) -> Any:
    return server.service.add(engine, server.model.options, names)


def complete(server: ScriptedServer, model: str | None = None) -> Any:
    named = {} if model is None else {"model": model}
    return server.post("/v1/completions", {"prompt": "a", **named})


def text(server: ScriptedServer, model: str) -> str:
    return str(complete(server, model).json()["choices"][0]["text"])


def test_a_request_reaches_the_model_that_it_names(two: ScriptedServer) -> None:
    first = two.model.names[0]
    assert (text(two, first), text(two, "second")) == ("one", "two")
    assert [model["id"] for model in two.get("/v1/models").json()["data"]] == [first, "second"]
    assert two.get("/v1/models/second").json()["id"] == "second"


def test_a_name_that_is_not_there(two: ScriptedServer) -> None:
    answer = complete(two, "third")
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert two.model.names[0] in error["message"]
    assert "second" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [65]}),
    ],
)
def test_several_models_have_to_be_named(two: ScriptedServer, path: str, body: dict[str, Any]) -> None:
    answer = two.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "model")
    assert "second" in error["message"]
    assert two.post(path, body | {"model": "second"}).status_code == 200


def test_each_model_is_ready_for_itself(scripted: ScriptedServer) -> None:
    second = add(scripted, ScriptedEngine(in_pieces([65], 1)), "second")
    first = scripted.model.names[0]
    answer = scripted.get("/v1/health/ready")
    assert (answer.status_code, answer.json()) == (
        503,
        {"status": "starting", "models": {first: "ready", "second": "starting"}},
    )
    assert complete(scripted, "second").json()["error"]["code"] == "starting"
    assert complete(scripted, first).status_code == 200
    scripted.run(second.start())
    assert scripted.get("/v1/health/ready").json()["status"] == "ready"


def test_a_model_that_cannot_start_leaves_the_others_alone(scripted: ScriptedServer) -> None:
    broken = add(scripted, BrokenEngine(in_pieces([65], 1)), "second")
    with pytest.raises(EngineError):
        scripted.run(broken.start())
    report = scripted.get("/health").json()
    assert (report["status"], report["error"]) == ("failed", "no such weights")
    assert [model["status"] for model in report["models"]] == ["ready", "failed"]
    assert scripted.get("/v1/health/live").status_code == 200
    assert complete(scripted, "second").json()["error"]["code"] == "failed"
    assert complete(scripted, scripted.model.names[0]).status_code == 200


def test_a_server_none_of_whose_models_can_start_does_not(model_folder: Path) -> None:
    async def start() -> None:
        service = make_service(Config())
        options = EngineOptions(model=ModelOptions(model=str(model_folder)))
        told: list[EngineInfo] = []
        for name in ("a", "b"):
            service.add(BrokenEngine(in_pieces([65], 1)), options, [name])
        with pytest.raises(EngineDied, match="no such weights"):
            await service.start(told.append)
        assert service.failed
        working = ScriptedEngine(in_pieces([65], 1))
        service.add(working, options, ["c"])
        await service.start(told.append)
        assert told == [working.info]
        await service.stop()

    asyncio.run(start())


def test_a_name_is_one_models_alone(two: ScriptedServer) -> None:
    with pytest.raises(ValueError, match="there is a model 'second' already"):
        add(two, ScriptedEngine(in_pieces([65], 1)), "third", "second")
    assert complete(two, "third").status_code == 404


def test_a_model_that_goes_lets_its_requests_finish(two: ScriptedServer) -> None:
    """Its name is free at once, and unknown; the answer that runs comes to its end."""
    first, second = two.service.models
    engine = second.engine
    assert isinstance(engine, ScriptedEngine)
    engine.script = lambda request: []  # the test plays

    async def scenario() -> tuple[int, int, str]:
        running = asyncio.ensure_future(two._request("POST", "/v1/completions", json.dumps(body)))
        while not engine.streams:
            await asyncio.sleep(0)
        going = asyncio.ensure_future(two.service.remove(second))
        await asyncio.sleep(0)
        late = await two._request("POST", "/v1/completions", json.dumps(body))
        assert not going.done()
        for request in engine.requests:
            for output in in_pieces([65, 66], 1, "length")(request):
                engine.streams[request.request_id].put(output)
        answer = await running
        await going
        return late.status_code, answer.status_code, answer.json()["choices"][0]["text"]

    body = {"prompt": "a", "model": "second"}
    assert two.run(scenario()) == (404, 200, "AB")
    assert engine.state == "stopped"
    assert two.service.models == [first]
    replacement = add(two, ScriptedEngine(in_pieces([67], 1, "length")), "second")
    two.run(replacement.start())
    assert text(two, "second") == "C"


def test_metrics_tell_models_apart(two: ScriptedServer) -> None:
    first = two.model.names[0]
    text(two, first)
    for _ in range(2):
        text(two, "second")
    found = scrape(two)
    for name, count in ((first, 1), ("second", 2)):
        assert total(found, "oscine:request_success_total", model_name=name) == count
        assert total(found, "vllm:time_to_first_token_seconds_count", model_name=name) == count
        assert total(found, "oscine:engine_ready", model_name=name) == 1
    two.run(two.service.remove(two.service.models[1]))
    assert not total(scrape(two), "oscine:engine_ready", model_name="second")


def test_a_stop_drains_all_models(two: ScriptedServer) -> None:
    two.run(two.service.drain())
    assert two.get("/v1/health/ready").json()["models"] == dict.fromkeys(two.service.names, "draining")
    late = add(two, ScriptedEngine(in_pieces([65], 1)), "third")
    two.run(late.start())
    assert complete(two, "third").json()["error"]["code"] == "draining"


class Running:
    """A server in a thread of this process; its engines are real processes."""

    def __init__(self, folder: Path, names: list[str], port: int = 0, fake_step_s: float = 0.0) -> None:
        options = EngineOptions(model=ModelOptions(model=str(folder)), executor="fake", fake_step_s=fake_step_s)
        config = Config(options, ServerOptions(port=port))
        self.service = make_service(config)
        for name in names:
            self.service.add(EngineClient(config.engine), config.engine, [name])
        self.server = Server(config, self.service, reuse_port=True)
        self._ready = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        for _ in names:
            assert self._ready.acquire(timeout=30)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self.server.config.get_loop_factory()) as runner:
            self.loop = runner.get_loop()
            runner.run(self.server.run_service(lambda info: self._ready.release()))

    def begin_stop(self) -> None:
        self.loop.call_soon_threadsafe(self.server.request_stop)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        if self.running:
            self.begin_stop()
        self._thread.join()


@pytest.fixture(scope="module")
def running(model_folder: Path) -> Iterator[Running]:
    server = Running(model_folder, ["alpha", "beta"])
    yield server
    server.stop()


@pytest.mark.long
def test_two_real_engines_behind_one_client(running: Running) -> None:
    with openai.OpenAI(base_url=f"{running.server.url}/v1", api_key="x", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["alpha", "beta"]
        for name in ("alpha", "beta"):
            answer = client.completions.create(model=name, prompt="a", max_tokens=5)
            assert (answer.model, answer.usage and answer.usage.completion_tokens) == (name, 5)
        with pytest.raises(openai.NotFoundError, match="this server has alpha, beta"):
            client.completions.create(model="gamma", prompt="a")


@pytest.mark.long
def test_servers_share_a_port(model_folder: Path, running: Running) -> None:
    """Connections go to either; once one has gone, all go to the other."""
    port = running.server.listener.getsockname()[1]
    other = Running(model_folder, ["gamma"], port)
    try:
        found = {name for _ in range(64) for name in served(running.server.url)}
        assert found == {"alpha", "beta", "gamma"}
    finally:
        other.stop()
    assert {name for _ in range(16) for name in served(running.server.url)} == {"alpha", "beta"}


@pytest.mark.long
def test_a_server_that_goes_leaves_the_port_to_the_other(
    model_folder: Path, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No new connection meets one that refuses; a stream and an idle connection of the old one come to their ends.

    A connection in use is answered until the answer says that it closes. For that it is used every 8 seconds.
    """
    monkeypatch.setattr("oscine.api.server._HAND_OVER_S", 8.0)  # longer than a busy machine stands still
    url = running.server.url
    other = Running(model_folder, ["gamma"], running.server.listener.getsockname()[1], fake_step_s=0.05)
    try:
        client = client_of(url, "gamma")
        stream = client.completions.create(model="gamma", prompt="a", max_tokens=60, stream=True)
        next(stream)
        idle = client_of(url, "gamma")
        with connection_to(url, "gamma") as used:
            other.begin_stop()
            while "close" not in models_on(used)[1]:
                pass
        ends = []
        for chunk in stream:
            with urllib.request.urlopen(f"{url}/v1/health/ready", timeout=30) as response:
                assert response.status == 200
            ends.append(chunk.choices[0].finish_reason)
        assert len(ends) > 20
        assert ends[-1] == "length"
        other.stop()
        assert [model.id for model in idle.models.list()] == ["alpha", "beta"]
    finally:
        other.stop()


def client_of(url: str, model: str) -> openai.OpenAI:
    """Whose connection leads to the server that has the model."""
    while True:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0)
        if model in [model.id for model in client.models.list()]:
            return client
        client.close()


@contextlib.contextmanager
def connection_to(url: str, model: str) -> Iterator[http.client.HTTPConnection]:
    """A kept one to the server that has the model."""
    while True:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
        with contextlib.closing(connection):
            if model in models_on(connection)[0]:
                yield connection
                return


def models_on(connection: http.client.HTTPConnection) -> tuple[str, str]:
    """The list as JSON, and the answer's header "Connection"."""
    connection.request("GET", "/v1/models")
    response = connection.getresponse()
    assert response.status == 200
    return response.read().decode(), response.getheader("Connection", "")


def served(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as response:
        return [model["id"] for model in json.load(response)["data"]]
