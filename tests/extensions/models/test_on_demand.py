"""Models that a real server loads when clients name them: Ollama's and OpenAI's own clients, crashes, downloads."""

import datetime
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import psutil
import pytest

from benchmarks.serving.server import engines_below
from benchmarks.serving.switching import run_clients
from oscine.checkpoint.hub import NANO_FOLDER
from tests.cli.local_hub import LocalHub, local_hub
from tests.fake_model import write_fake_model
from tests.server import ServerProcess
from tests.tiny import SCRIPTED
from tests.waiting import DEADLINE_S, wait_until

pytestmark = pytest.mark.needs("apis")
QUESTION = [{"role": "user", "content": "hi"}]
FAKE = ("--executor", "fake", "--log-level", "warning")


def write_models(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir()
        write_fake_model(folder / name)
    return folder


@contextmanager
def serving(folder: Path, *options: str, **environment: str) -> Iterator[ServerProcess]:
    with ServerProcess("--models-dir", str(folder), *FAKE, *options, environment=environment) as server:
        yield server


@contextmanager
def client_of(server: ServerProcess, key: str | None = None) -> Iterator[ollama.Client]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    client = ollama.Client(server.url, headers=headers, timeout=DEADLINE_S)
    try:
        yield client
    finally:
        client._client.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"), "one", "two")


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[ServerProcess]:
    """One model at a time."""
    with serving(folder, "--max-loaded-models", "1") as server:
        yield server


@pytest.fixture(scope="module")
def sleepy(folder: Path) -> Iterator[ServerProcess]:
    """One model at a time; the other sleeps."""
    with serving(folder, "--max-loaded-models", "1", "--enable-sleep-mode") as server:
        yield server


def states(server: ServerProcess) -> dict[str, str]:
    cards = httpx.get(f"{server.url}/v1/models").json()["data"]
    return {card["id"]: card["state"] for card in cards}


def post(server: ServerProcess, path: str, body: Any, key: str | None = None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=DEADLINE_S)


def chat(server: ServerProcess, model: str, **given: Any) -> httpx.Response:
    body = {"model": model, "messages": QUESTION, "stream": False, "options": {"num_predict": 4}, **given}
    return post(server, "/api/chat", body)


def engines(server: ServerProcess) -> list[psutil.Process]:
    return engines_below(psutil.Process(server.pid))


def test_models_are_listed_and_take_turns(alone: ServerProcess) -> None:
    assert states(alone) == {"one": "unloaded", "two": "unloaded"}
    assert engines(alone) == []
    ready = httpx.get(f"{alone.url}/v1/health/ready")
    assert (ready.status_code, ready.json()["models"]) == (200, {"one": "unloaded", "two": "unloaded"})
    with openai.OpenAI(base_url=f"{alone.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["one", "two"]
        for name, other in (("one", "two"), ("two", "one")):
            messages: Any = QUESTION
            answer = client.chat.completions.create(model=name, messages=messages, max_completion_tokens=4)
            assert answer.model == name
            assert states(alone) == {name: "ready", other: "unloaded"}
            assert len(engines(alone)) == 1
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="three", messages=messages)
        with pytest.raises(openai.BadRequestError, match="it is required"):
            client.post("/completions", body={"prompt": "a"}, cast_to=object)


def test_ollamas_client_lists_loads_and_unloads(alone: ServerProcess) -> None:
    with client_of(alone) as client:
        assert [model.model for model in client.list().models] == ["one:latest", "two:latest"]
        assert client.chat("one", messages=QUESTION, options={"num_predict": 4}).done
        (loaded,) = client.ps().models
        assert (loaded.model, loaded.context_length) == ("one:latest", SCRIPTED.max_position_embeddings)
        assert loaded.expires_at is not None
        left = loaded.expires_at - datetime.datetime.now(datetime.UTC)
        assert datetime.timedelta(minutes=3) < left <= datetime.timedelta(minutes=5)

        client.chat("two", messages=QUESTION, options={"num_predict": 4}, keep_alive=-1)
        (loaded,) = client.ps().models
        assert loaded.model == "two:latest"
        assert loaded.expires_at is not None
        assert loaded.expires_at.year > 2200

        client.chat("two", messages=QUESTION, options={"num_predict": 4}, keep_alive=0)
        wait_until(lambda: not (client.ps().models or engines(alone)), "a model whose time is over")

        assert client.generate("one", keep_alive="10m").done_reason == "load"
        assert states(alone)["one"] == "ready"
        assert client.generate("one", keep_alive=0).done_reason == "unload"
        assert client.ps().models == []
        assert states(alone) == {"one": "unloaded", "two": "unloaded"}
        assert client.generate("one", keep_alive=0).done_reason == "unload"  # of what is not loaded
        with pytest.raises(ollama.ResponseError, match="invalid duration"):
            client.generate("one", keep_alive="soon")
        assert states(alone)["one"] == "unloaded"


def test_a_model_serves_its_requests_before_it_makes_room(folder: Path) -> None:
    with serving(folder, "--max-loaded-models", "1", "--fake-step-s", "0.005") as server, ThreadPoolExecutor(8) as pool:
        body = {"model": "one", "prompt": "a", "max_tokens": 400, "ignore_eos": True}
        long = pool.submit(post, server, "/v1/completions", body)
        server.wait_running(1)
        others = [pool.submit(chat, server, name) for name in ("two", "one", "two", "one")]
        assert long.result().json()["usage"]["completion_tokens"] == 400
        assert [one.result().status_code for one in others] == [200] * 4
        assert len(engines(server)) == 1


@pytest.mark.slow
def test_a_request_waits_no_longer_than_it_may(folder: Path) -> None:
    options = ("--max-loaded-models", "1", "--fake-step-s", "0.01", "--load-timeout-s", "1.5")
    with serving(folder, *options) as server, ThreadPoolExecutor(1) as pool:
        assert chat(server, "one").status_code == 200
        body = {"model": "one", "prompt": "a", "max_tokens": 400, "ignore_eos": True}
        long = pool.submit(post, server, "/v1/completions", body)
        server.wait_running(1)
        refused = chat(server, "two")
        assert refused.status_code == 503
        assert "not loaded after 1.5 s" in refused.json()["error"]
        assert "retry-after" in refused.headers
        assert long.result().json()["usage"]["completion_tokens"] == 400, "it was disturbed"


def test_a_crash_of_one_engine_disturbs_no_other(folder: Path) -> None:
    with serving(folder, "--fake-step-s", "0.005") as server, ThreadPoolExecutor(1) as pool:
        assert chat(server, "one").status_code == 200
        (first,) = engines(server)
        assert chat(server, "two").status_code == 200
        (second,) = {*engines(server)} - {first}
        assert states(server) == {"one": "ready", "two": "ready"}
        body = {"model": "two", "prompt": "a", "max_tokens": 300, "ignore_eos": True}
        long = pool.submit(post, server, "/v1/completions", body)
        server.wait_running(1)
        first.send_signal(signal.SIGKILL)
        wait_until(lambda: first not in engines(server), "an engine that died")
        wait_until(lambda: chat(server, "one").status_code == 200, "another one")
        assert long.result().json()["usage"]["completion_tokens"] == 300
        assert second in engines(server)
        assert first not in engines(server)


def test_an_engine_that_dies_asleep_is_loaded_by_the_next_request(sleepy: ServerProcess) -> None:
    assert chat(sleepy, "one").status_code == 200
    (first,) = engines(sleepy)
    assert chat(sleepy, "two").status_code == 200
    assert states(sleepy) == {"one": "asleep", "two": "ready"}
    assert len(engines(sleepy)) == 2
    assert chat(sleepy, "one").status_code == 200
    assert first in engines(sleepy), "it was started again, and not woken up"
    assert chat(sleepy, "two").status_code == 200
    first.send_signal(signal.SIGKILL)
    wait_until(lambda: states(sleepy)["one"] == "unloaded", "an engine that died in its sleep")
    assert len(engines(sleepy)) == 1
    assert chat(sleepy, "one").status_code == 200
    assert states(sleepy) == {"one": "ready", "two": "asleep"}
    assert post(sleepy, "/sleep?model=one", None).json() == {"is_sleeping": True}
    assert states(sleepy) == {"one": "asleep", "two": "asleep"}
    assert post(sleepy, "/wake_up?model=one", None).json() == {"is_sleeping": False}
    assert states(sleepy) == {"one": "ready", "two": "asleep"}
    assert post(sleepy, "/api/generate", {"model": "two", "keep_alive": 0}).status_code == 200
    assert states(sleepy)["two"] == "unloaded"


@pytest.mark.parametrize(("fixture", "requests"), [("sleepy", 12), pytest.param("alone", 40, marks=pytest.mark.slow)])
def test_models_alternate_under_random_times_without_a_failure(
    request: pytest.FixtureRequest, fixture: str, requests: int
) -> None:
    server: ServerProcess = request.getfixturevalue(fixture)
    outcome = run_clients(server.url, 3, requests=requests)
    assert outcome.failures == []
    assert outcome.count == 3 * requests
    assert list(states(server).values()).count("ready") <= 1


def test_pinned_models_are_there_from_the_start_and_stay(folder: Path) -> None:
    options = ("--max-loaded-models", "1", "--pinned-models", "one", "--keep-alive", "0")
    with serving(folder, *options) as server:
        wait_until(lambda: states(server)["one"] == "ready", "the pinned model")
        assert chat(server, "one", keep_alive=0).status_code == 200
        refused = chat(server, "two")
        assert refused.status_code == 503
        assert "pinned" in refused.json()["error"]
        assert states(server) == {"one": "ready", "two": "unloaded"}


def test_a_model_that_cannot_be_loaded_says_why_and_may_be_mended(tmp_path: Path) -> None:
    write_models(tmp_path, "good", "broken", "worse")
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "worse" / "config.json").write_text("{")
    tokenizer = tmp_path / "broken" / "tokenizer.json"
    text = tokenizer.read_text()
    tokenizer.unlink()
    with serving(tmp_path) as server:
        assert states(server) == {"broken": "unloaded", "good": "unloaded"}
        refused = chat(server, "broken")
        assert refused.status_code == 503
        assert "tokenizer.json: missing" in refused.json()["error"]
        assert "\n" not in refused.json()["error"]
        assert states(server) == {"broken": "failed", "good": "unloaded"}
        assert httpx.get(f"{server.url}/v1/health/live").status_code == 200
        assert chat(server, "good").status_code == 200
        tokenizer.write_text(text)
        assert chat(server, "broken").status_code == 200


# ---- downloads and the right to change the models ----


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with local_hub() as server:
        files = {name: (NANO_FOLDER / name).read_bytes() for name in ("config.json", "model.safetensors")}
        files["tokenizer.json"] = (NANO_FOLDER / "tokenizer.json").read_bytes()
        server.repositories["openai/gpt-oss-20b"] = files
        yield server


def test_models_are_pulled_served_and_removed(tmp_path: Path, hub: LocalHub) -> None:
    write_models(tmp_path, "own")
    environment = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    with serving(tmp_path, **environment) as server, client_of(server) as client:
        progress = list(client.pull("gpt-oss:20b", stream=True))
        assert [progress[0].status, progress[-1].status] == ["pulling manifest", "success"]
        size = len(hub.repositories["openai/gpt-oss-20b"]["model.safetensors"])
        parts = [one for one in progress if one.digest]
        assert parts
        assert {one.total for one in parts} == {size}
        assert parts[-1].completed == size
        assert parts[-1].status == f"pulling {str(parts[-1].digest).removeprefix('sha256:')[:12]}"
        assert "gpt-oss:20b" in [model.model for model in client.list().models]
        assert client.chat("gpt-oss:20b", messages=QUESTION, options={"num_predict": 4}).done
        assert client.pull("gpt-oss:20b").status == "success"
        assert hub.ranges("model.safetensors") == [""], "it was fetched once"

        with pytest.raises(ollama.ResponseError, match="not on the hub") as unknown:
            client.pull("some/other")
        assert unknown.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="not on the hub"):
            list(client.pull("some/other", stream=True))
        with pytest.raises(ollama.ResponseError):
            client.pull("no such name")
    with serving(tmp_path, **environment) as server, client_of(server) as client:  # it is still there
        assert states(server) == {"openai/gpt-oss-20b": "unloaded", "own": "unloaded"}
        assert client.delete("gpt-oss:20b").status == "success"
        assert states(server) == {"own": "unloaded"}
        with pytest.raises(ollama.ResponseError) as gone:
            client.delete("gpt-oss:20b")
        assert gone.value.status_code == 404
        assert not [path for path in tmp_path.rglob("*") if path.suffix == ".safetensors" or path.name == "blobs"]
        client.delete("own")
        assert not (tmp_path / "own").exists()
        assert client.list().models == []
        assert client.pull("gpt-oss:20b").status == "success"
        assert client.chat("gpt-oss:20b", messages=QUESTION, options={"num_predict": 4}).done
        assert client.delete("gpt-oss:20b").status == "success"
        assert engines(server) == []


def test_changes_need_the_right_and_keep_alive_of_others_has_no_effect(tmp_path: Path) -> None:
    write_models(tmp_path, "one")
    with serving(tmp_path, "--api-key", "client", "--admin-key", "root") as server:
        for path, body in (("/api/pull", {"model": "x/y"}), ("/api/generate", {"model": "one", "keep_alive": 0})):
            refused = [post(server, path, body, key).status_code for key in (None, "client")]
            assert refused == [401, 403], path
        for key, status in ((None, 401), ("client", 403)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            answer = httpx.request("DELETE", f"{server.url}/api/delete", json={"model": "one"}, headers=headers)
            assert answer.status_code == status
        body = {"model": "one", "messages": QUESTION, "stream": False, "options": {"num_predict": 2}}
        assert post(server, "/api/chat", {**body, "keep_alive": 0}, "client").status_code == 200
        assert post(server, "/api/chat", body, "client").status_code == 200
        assert len(engines(server)) == 1
        with client_of(server, "root") as client:
            (loaded,) = client.ps().models
            assert loaded.expires_at is not None
            assert loaded.expires_at.year < 2200
            assert client.generate("one", keep_alive=0).done_reason == "unload"
        assert engines(server) == []
