"""Responses that cannot be stored: the answer says so, background responses are kept, and reads do not wait."""

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from oscine.api.common.errors import APIError
from oscine.extensions.apis.responses import background as response_background
from oscine.extensions.apis.responses import store as response_store
from oscine.extensions.apis.responses.api import responses_of
from tests.api.scripted_engine import in_pieces
from tests.api.scripted_server import ScriptedServer
from tests.extensions.apis.response_stream import check_response, check_stream, parse
from tests.extensions.apis.test_response_store import ME, response, with_store
from tests.waiting import DEADLINE_S, until, wait_until

FAILURES = "oscine:response_store_failures_total"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Locks the database as a process that writes does."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


@contextmanager
def refusing(path: Path) -> Iterator[None]:
    """A lock that outlasts every write."""
    with locked(path), pytest.MonkeyPatch.context() as patch:
        patch.setattr(response_store, "WRITE_S", 0.1)
        yield


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine makes no write fail, except within `refusing`."""
    monkeypatch.setattr(response_store, "WRITE_S", DEADLINE_S)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "responses.db"


@pytest.fixture
def server(model_folder: Path, database: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    monkeypatch.setattr(response_background, "FIRST_PAUSE_S", 0.01)
    with ScriptedServer(model_folder, responses_db=str(database)) as server:
        t = server.tokenizer
        server.says(t.channel, "final", t.message, "ok", t.return_)
        yield server


def failures(server: ScriptedServer) -> float:
    value = server.service.metrics.registry.get_sample_value(FAILURES)
    assert value is not None
    return value


def wait_completed(server: ScriptedServer, path: str) -> None:
    wait_until(lambda: server.get(path).json()["status"] == "completed", "a completed response")


def test_reads_do_not_wait_for_a_write_that_waits(database: Path) -> None:
    async def work(store: response_store.ResponseStore) -> None:
        await store.put(response("a"), [("item", b"{}")])
        with locked(database):
            put = asyncio.create_task(store.put(response("b", "a"), []))
            await asyncio.sleep(0)
            assert await store.get("a", ME) == response("a")
            assert await store.items(["item"], ME) == {"item": b"{}"}
            assert await store.chain("a", ME) == [response("a")]
            assert not put.done()
        await put
        assert [r.id for r in await store.chain("b", ME)] == ["a", "b"]

    with_store(database, work)


def test_a_write_that_waits_too_long_fails_and_so_do_those_behind_it(
    database: Path,
) -> None:
    async def work(store: response_store.ResponseStore) -> None:
        with refusing(database):
            puts = [store.put(response(name), []) for name in "abcdefgh"]
            ends = await asyncio.gather(*puts, return_exceptions=True)
        codes = [(end.status, end.code) for end in ends if isinstance(end, APIError)]
        assert codes == [(503, "storage_unavailable")] * 8
        await store.put(response("i"), [])
        assert await store.get("i", ME) == response("i")

    with_store(database, work)


def test_an_answer_says_that_it_is_not_stored(server: ScriptedServer, database: Path) -> None:
    with refusing(database):
        whole = check_response(server.post("/v1/responses", {"input": "hi"}).json())
        streamed = check_stream(parse(server.post("/v1/responses", {"input": "hi", "stream": True}).text))
    assert streamed is not None
    for answer in (whole, streamed):
        assert (answer["status"], answer["store"]) == ("completed", False)
        assert answer["output"][-1]["content"][0]["text"] == "ok"
        assert server.get(f"/v1/responses/{answer['id']}").status_code == 404
    assert failures(server) == 2
    assert server.post("/v1/responses", {"input": "hi"}).json()["store"] is True
    assert failures(server) == 2


def test_nothing_begins_in_the_background_that_cannot_be_stored(server: ScriptedServer, database: Path) -> None:
    with refusing(database):
        refused = server.post("/v1/responses", {"input": "hi", "background": True})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_unavailable")
    assert server.engine.requests == []
    assert failures(server) == 1


def test_what_was_made_in_the_background_is_kept_until_it_can_be_stored(server: ScriptedServer, database: Path) -> None:
    server.engine.script = lambda request: ()
    made = server.post("/v1/responses", {"input": "hi", "background": True}).json()
    path = f"/v1/responses/{made['id']}"
    server.run(asyncio.sleep(0))
    with refusing(database):
        (stream,) = server.engine.streams.values()
        for output in in_pieces([server.tokenizer.return_], 1)(server.engine.requests[0]):
            stream.put(output)  # type: ignore[arg-type]
        wait_completed(server, path)
        server.run(until(lambda: failures(server) > 0, "a write that fails"))
        response = check_stream(parse(server.get(f"{path}?stream=true").text))
        assert response == server.get(path).json()
        refused = server.post("/v1/responses", {"input": "hi", "background": True})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_unavailable")
    background = responses_of(server.service).kept.background
    server.run(until(lambda: background.get(made["id"], "") is None, "a stored response"))
    assert server.get(path).json() == response
    server.engine.script = in_pieces([server.tokenizer.return_], 1)
    again = server.post("/v1/responses", {"input": "hi", "background": True})
    wait_completed(server, f"/v1/responses/{again.json()['id']}")


def test_what_cannot_be_stored_can_be_forgotten(server: ScriptedServer, database: Path) -> None:
    server.engine.script = lambda request: ()
    made = server.post("/v1/responses", {"input": "hi", "background": True}).json()
    path = f"/v1/responses/{made['id']}"
    with refusing(database):
        assert server.post(f"{path}/cancel", {}).json()["status"] == "cancelled"
        assert server.delete(path).status_code == 503
    assert server.delete(path).json()["deleted"] is True
    assert server.get(path).status_code == 404
