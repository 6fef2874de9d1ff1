"""The store of responses: bounds of size and age, chains, restarts, and processes that die."""

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from oscine.extensions.apis.responses.store import MEMORY, ResponseStore, StoredResponse
from tests.extensions.apis.response_stream import check_response, check_stream, parse
from tests.server import ServerProcess
from tests.waiting import wait_until

ME = "me"  # the owner of all responses here
DAY_S = 86400.0
NOW_S = 2e9  # in the future: nothing here is too old


def response(name: str, previous: str | None = None, size: int = 10, owner: str = ME, **fields: Any) -> StoredResponse:
    return StoredResponse(
        name, owner, previous, **{"created_s": NOW_S, "running": False, **fields}, body=b"x" * size, input=b"[]"
    )


def with_store(
    path: str | Path, work: Callable[[ResponseStore], Awaitable[None]], max_bytes: int = 1000, max_age_s: float = DAY_S
) -> None:
    async def main() -> None:
        store = ResponseStore(str(path), max_bytes, max_age_s)
        await store.open(lambda body: b"interrupted " + body)
        try:
            await work(store)
        finally:
            await store.close()

    asyncio.run(main())


@pytest.fixture(params=["memory", "file"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return MEMORY if request.param == "memory" else str(tmp_path / "deep" / "responses.db")


def test_what_is_put_is_found_replaced_and_deleted(path: str) -> None:
    async def work(store: ResponseStore) -> None:
        await store.put(response("a", events=b"e"), [("item", b"{}")])
        assert await store.get("a", ME) == response("a", events=b"e")
        assert await store.items(["item", "other"], ME) == {"item": b"{}"}
        await store.put(response("a", size=20), [])
        assert await store.get("a", ME) == response("a", size=20)
        assert await store.items(["item"], ME) == {}
        assert await store.delete("a", ME)
        assert not await store.delete("a", ME)
        assert await store.get("a", ME) is None

    with_store(path, work)


def test_conversations_are_bounded_with_responses_and_survive(path: str) -> None:
    async def begin(store: ResponseStore) -> None:
        for name in ("old", "new"):
            await store.write_conversation(lambda tables, db, name=name: tables.create(db, name, ME, {"a": "b"}))  # type: ignore[misc]
        assert await store.write_conversation(lambda tables, db: tables.append(db, "old", ME, [("i", b"x" * 100)]))
        assert not await store.write_conversation(lambda tables, db: tables.append(db, "old", "another", [("j", b"y")]))
        assert await store.read_conversation(lambda tables, db: tables.items(db, "old")) == [b"x" * 100]
        if path == MEMORY:
            await full(store)

    async def full(store: ResponseStore) -> None:
        await store.write_conversation(lambda tables, db: tables.append(db, "new", ME, [("i", b"z" * 100)]))
        await store.put(response("a", size=400), [])
        assert await store.read_conversation(lambda tables, db: tables.get(db, "old", ME)) is None
        assert await store.read_conversation(lambda tables, db: tables.items(db, "old")) == []
        found = await store.read_conversation(lambda tables, db: tables.get(db, "new", ME))
        assert found is not None
        assert (found.size, found.metadata) == (356, {"a": "b"})
        assert await store.write_conversation(lambda tables, db: tables.remove(db, "new", ME, "i"))
        assert await store.get("a", ME) is not None

    with_store(path, begin)
    if path != MEMORY:
        with_store(path, full)


def test_a_chain_is_read_from_its_begin(path: str) -> None:
    async def work(store: ResponseStore) -> None:
        for name, previous in [("a", None), ("b", "a"), ("other", "a"), ("c", "b")]:
            await store.put(response(name, previous), [])
        assert [r.id for r in await store.chain("c", ME)] == ["a", "b", "c"]
        assert await store.chain("none", ME) == []
        await store.delete("a", ME)
        assert [(r.id, r.previous) for r in await store.chain("c", ME)] == [("b", "a"), ("c", "b")]

    with_store(path, work)


def test_what_is_anothers_is_not_there(path: str) -> None:
    async def work(store: ResponseStore) -> None:
        await store.put(response("a"), [("item", b"mine")])
        await store.put(response("b", "a", owner="other"), [("item", b"theirs")])
        assert await store.get("a", "other") is None
        assert await store.chain("a", "other") == []
        assert [r.id for r in await store.chain("b", "other")] == ["b"]
        assert await store.items(["item"], "other") == {"item": b"theirs"}
        assert await store.items(["item"], "third") == {}
        assert not await store.delete("a", "other")
        assert await store.get("a", ME) == response("a")

    with_store(path, work)


def test_a_database_of_an_earlier_version_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"

    async def write(store: ResponseStore) -> None:
        await store.put(response("a", owner=""), [("item", b"{}")])

    async def read(store: ResponseStore) -> None:
        assert await store.get("a", "") == response("a", owner="")
        assert await store.get("a", ME) is None

    with_store(path, write)
    with closing(sqlite3.connect(path)) as db:
        db.execute("ALTER TABLE responses DROP COLUMN owner")
    with_store(path, read)


def test_those_used_longest_ago_make_room(path: str) -> None:
    async def work(store: ResponseStore) -> None:
        for name in "abcd":
            await store.put(response(name, size=248), [])
        await store.chain("a", ME)
        await store.put(response("e", size=400), [("item", b"{}")])
        kept = [name for name in "abcde" if await store.get(name, ME)]
        assert kept == ["a", "d", "e"]
        await store.put(response("larger than all", size=1001), [])
        assert await store.get("larger than all", ME) is None
        await store.put(response("small", running=True), [])
        await store.put(response("f", size=995), [])
        assert [name for name in ("small", "f") if await store.get(name, ME)] == ["small"]  # running ones stay

    with_store(path, work)


def test_the_file_shrinks_with_what_it_keeps(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"

    async def work(store: ResponseStore) -> None:
        await store.put(response("a", size=4 << 20), [])
        await store.delete("a", ME)

    with_store(path, work, max_bytes=8 << 20)
    assert path.stat().st_size < 1 << 20


def test_what_is_too_old_is_not_found_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"

    async def write(store: ResponseStore) -> None:
        await store.put(response("new"), [])
        await store.put(response("old", created_s=1.0), [("item", b"{}")])
        assert await store.get("old", ME) is None
        assert await store.chain("old", ME) == []
        assert await store.items(["item"], ME) == {}

    with_store(path, write)
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT id FROM responses").fetchall() == [("new",)]
        assert db.execute("SELECT count(*) FROM items").fetchone() == (0,)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_bounds_hold_for_what_an_earlier_server_kept(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"

    async def write(store: ResponseStore) -> None:
        for name in "abc":
            await store.put(response(name, size=300), [])

    async def read(store: ResponseStore) -> None:
        assert [name for name in "abc" if await store.get(name, ME)] == ["c"]

    with_store(path, write)
    with_store(path, read, max_bytes=500)


HOLDER = """
import asyncio, sys, time
from oscine.extensions.apis.responses.store import ResponseStore, StoredResponse
async def main():
    store = ResponseStore(sys.argv[1], 1000, 1e9)
    await store.open(bytes)
    await store.put(StoredResponse("a", "me", None, 2e9, True, b"body", b"[]"), [])
    print("put", flush=True)
    time.sleep(60)
asyncio.run(main())
"""


def test_what_ran_in_a_server_that_died_is_interrupted_and_in_one_that_lives_is_not(tmp_path: Path) -> None:
    path = tmp_path / "responses.db"

    async def while_it_lives(store: ResponseStore) -> None:
        found = await store.get("a", ME)
        assert found is not None
        assert (found.running, found.body) == (True, b"body")

    async def once_it_is_dead(store: ResponseStore) -> None:
        found = await store.get("a", ME)
        assert found is not None
        assert (found.running, found.body) == (False, b"interrupted body")

    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"put\n"
        with_store(path, while_it_lives)
        holder.kill()
    with_store(path, once_it_is_dead)


@pytest.mark.parametrize("content", [b"no database" * 100, None])
def test_a_file_that_is_no_database_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "responses.db"
    path.mkdir() if content is None else path.write_bytes(content)

    async def work(store: ResponseStore) -> None: ...

    mode = path.stat().st_mode
    with pytest.raises(ValueError, match=f"--responses-db {path} cannot be used"):
        with_store(path, work)
    assert path.stat().st_mode == mode


def server(folder: Path, database: Path) -> ServerProcess:
    options = ("--executor", "fake", "--fake-step-s", "0.002", "--drain-s", "0", "--log-level", "warning")
    return ServerProcess(str(folder), *options, "--responses-db", str(database))


def kill_everything(server: ServerProcess) -> None:
    for process in [*(p.pid for p in server.processes()), server.pid]:
        os.kill(process, signal.SIGKILL)


def test_responses_survive_the_death_of_every_process(model_folder: Path, tmp_path: Path) -> None:
    database = tmp_path / "responses.db"
    with server(model_folder, database) as first:
        with httpx.stream("POST", f"{first.url}/v1/responses", json={"input": "hi", "stream": True}) as stream:
            for line in stream.iter_lines():
                if line.startswith('data: {"type":"response.completed"'):
                    kill_everything(first)  # the moment the client has got it
                    done = json.loads(line.removeprefix("data: "))["response"]
                    break
        wait_until(lambda: first.exit_code() != 0, "a dead server")
    with server(model_folder, database) as second:
        assert httpx.get(f"{second.url}/v1/responses/{done['id']}").json() == done
        body = {"input": "And?", "previous_response_id": done["id"], "max_output_tokens": 5}
        assert second.post("/v1/responses", body)["status"] == "incomplete"
        ended = second.post("/v1/responses", {"input": "hi", "background": True})
        url = f"{second.url}/v1/responses/{ended['id']}"
        wait_until(lambda: httpx.get(url).json()["status"] == "completed", "a response in the background")
        events = httpx.get(f"{url}?stream=true").text
        running = second.post("/v1/responses", {"input": "hi", "background": True})
        assert running["status"] in ("queued", "in_progress")
        kill_everything(second)
    with server(model_folder, database) as third:
        found = httpx.get(f"{third.url}/v1/responses/{running['id']}").json()
        assert found["status"] == "failed"
        assert found["error"]["code"] == "server_error"
        check_response(found)
        again = httpx.get(f"{third.url}/v1/responses/{ended['id']}?stream=true").text
        assert again == events
        check_stream(parse(again))
        drained = third.post("/v1/responses", {"input": "hi", "background": True})
        third.terminate()
        assert third.exit_code() == 0
    with closing(sqlite3.connect(database)) as db:
        ((body,),) = db.execute("SELECT body FROM responses WHERE id = ?", (drained["id"],)).fetchall()
    found = check_response(json.loads(body)["response"])
    assert found["status"] == "failed"
    assert "shut" in found["error"]["message"]


def modes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mode & 0o777 for file in [folder, *folder.iterdir()]}


@pytest.mark.parametrize("existed", [False, True])
def test_files_are_the_servers_own(tmp_path: Path, existed: bool) -> None:
    folder = tmp_path / "deep" / "state"
    names = ("responses.db", "responses.db-wal", "responses.db-shm", "responses.db-runners")
    before = os.umask(0)
    try:
        if existed:
            folder.mkdir(parents=True)
            for name in names:
                (folder / name).touch(0o666)

        async def work(store: ResponseStore) -> None:
            await store.put(response("a"), [])
            found = modes(folder)
            assert found.pop("state") == (0o777 if existed else 0o700)
            assert found == dict.fromkeys(names, 0o600)

        with_store(folder / "responses.db", work)
    finally:
        os.umask(before)
