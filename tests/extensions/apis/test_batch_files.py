"""Files of batches without a server: lines, uploads that come at once, and what lines may take."""

import asyncio
import errno
import fcntl
import json
import os
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from oscine.api.apis import make_service
from oscine.api.app import create_app
from oscine.api.common import deleted_rows
from oscine.api.common.asgi import Receive, Scope, Send
from oscine.api.common.errors import APIError
from oscine.api.common.paging import PageQuery
from oscine.api.serving.service import Service
from oscine.extensions.apis.batches import job as jobs
from oscine.extensions.apis.batches.api import BatchesApi
from oscine.extensions.apis.batches.job import Answered, BatchJob, Room
from oscine.extensions.apis.batches.jobs import MAX_ACTIVE, BatchJobs
from oscine.extensions.apis.batches.lines import BatchFileError, BatchInput, BatchLine, BatchOutput
from oscine.extensions.apis.batches.retries import Retries
from oscine.extensions.apis.batches.schemas import BatchObject, BatchRequest, FileObject, RequestCounts
from oscine.extensions.apis.batches.store import FileStore
from oscine.settings.config import Config, ServerOptions

CHAT: Any = "/v1/chat/completions"


def line(name: str, **body: Any) -> bytes:
    return json.dumps({"custom_id": name, "url": CHAT, "body": {"messages": [], **body}}).encode()


def read(path: Path, data: bytes, longest: int | None = None) -> list[BatchLine]:
    path.write_bytes(data)
    with BatchInput.open(path, longest=longest) as lines:
        return [*lines]


def test_blank_lines_are_skipped_without_a_step_for_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    whole = BatchInput._read

    def counted(self: BatchInput, line: bytes, number: int) -> BatchLine:
        nonlocal steps
        steps += 1
        return whole(self, line, number)

    monkeypatch.setattr(BatchInput, "_read", counted)
    found = read(tmp_path / "in", b"\n" * 100_000 + line("a") + b"\r\n \t\r\n" * 50_000 + b"  " + line("b") + b"\n")
    assert [(one.custom_id, one.number, one.problem) for one in found] == [("a", 100_001, ""), ("b", 200_001, "")]
    assert steps == 2


@pytest.mark.parametrize("kind", [BatchInput, BatchOutput])
def test_a_pipe_is_refused(tmp_path: Path, kind: type[BatchInput | BatchOutput]) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BatchFileError, match=r"/pipe: must be a (regular )?file, not a"), kind.open(tmp_path / "pipe"):
        pass


def test_a_byte_order_mark_before_the_first_line_is_skipped(tmp_path: Path) -> None:
    first, second = read(tmp_path / "in", b"\xef\xbb\xbf" + line("a") + b"\n\xef\xbb\xbf" + line("b"))
    assert (first.custom_id, first.problem) == ("a", "")
    assert second.code == "invalid_json_line"


def test_a_body_is_passed_on_as_it_came(tmp_path: Path) -> None:
    (found,) = read(
        tmp_path / "in", b'{"custom_id": "a", "url": "%s", "body": {"model" : "m", "x": 1.0e5 }}' % CHAT.encode()
    )
    assert (found.body, found.model) == (b'{"model" : "m", "x": 1.0e5 }', "m")


def test_a_line_that_was_cut_within_an_emoji_is_a_request(tmp_path: Path) -> None:
    """As requests are: all that is read of it has U+FFFD, also when it is read again."""
    path, cut = tmp_path / "in", "Done \ud83d"
    first, second, third = read(path, line(cut, user=cut) + b"\n" + line("b") + b"\n" + line("b\ude00", stream=cut))
    assert (first.custom_id, first.problem, second.problem) == ("Done \ufffd", "", "")
    assert json.loads(first.body) == {"messages": [], "user": "Done \ufffd"}
    assert (third.custom_id, third.code) == ("b\ufffd", "invalid_request")
    with BatchInput.open(path) as lines:
        assert lines.again(first).body == first.body


@pytest.mark.parametrize("body", [b"[]", b'"hi"', b'{"model": [1]}', b'{"stream": 5}', b'{"stream": true}'])
def test_a_body_that_is_no_request_is_told_before_the_batch_runs(tmp_path: Path, body: bytes) -> None:
    (found,) = read(tmp_path / "in", b'{"custom_id": "a", "url": "%s", "body": %s}' % (CHAT.encode(), body))
    assert (found.code, found.custom_id) == ("invalid_request", "a")


def test_a_long_line_is_never_whole_in_memory(tmp_path: Path) -> None:
    long, good = read(tmp_path / "in", b"x" * 300_000 + b"\n" + line("a"), longest=1000)
    assert (long.code, long.problem) == ("line_too_long", "Line 1 is longer than 1000 bytes.")
    assert (good.custom_id, good.number) == ("a", 2)


def test_what_a_problem_repeats_is_short(tmp_path: Path) -> None:
    (found,) = read(tmp_path / "in", b'{"custom_id": "a", "url": "%s", "body": {}}' % (b"u" * 100_000))
    assert found.code == "invalid_url"
    assert len(found.problem) < 500


# ---- a batch ----


def batch_of(file_id: str, batch_id: str = "batch_1") -> BatchObject:
    return BatchObject(
        id=batch_id,
        endpoint=CHAT,
        input_file_id=file_id,
        created_at=1,
        expires_at=1 << 40,
        request_counts=RequestCounts(),
    )


def with_files(folder: Path, work: Callable[[FileStore], Coroutine[Any, Any, None]]) -> None:
    async def go() -> None:
        store = FileStore(str(folder))
        await store.open()
        try:
            await work(store)
        finally:
            await store.close()

    asyncio.run(go())


def made(store: FileStore, ask: Any, room: Room) -> BatchJob:
    return BatchJob(batch_of("file-in"), "me", store, ask, lambda model: None, room, 1 << 20)


async def run_lines(store: FileStore, ask: Any, room: Room, *lines: bytes) -> BatchObject:
    store.new("file-in").write_bytes(b"\n".join(lines))
    job = made(store, ask, room)
    await job.run(asyncio.Semaphore(8), 8)
    return job.batch


def test_files_of_a_batch_are_read_beside_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread of their own: requests of clients do not wait behind them."""
    seen = set()
    whole = BatchInput._skip_blank

    def noted(self: BatchInput) -> None:
        seen.add(threading.current_thread().name)
        whole(self)

    async def ask(line: BatchLine) -> Answered:
        return Answered(200, "", b"{}")

    async def work(store: FileStore) -> None:
        batch = await run_lines(store, ask, Room(), *(line(str(i)) for i in range(20)))
        assert (batch.status, batch.request_counts.completed) == ("completed", 20)

    monkeypatch.setattr(BatchInput, "_skip_blank", noted)
    with_files(tmp_path, work)
    assert seen == {"batches_0"}


def test_a_batch_runs_where_files_have_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    async def ask(line: BatchLine) -> Answered:
        return Answered(200, "", b"{}")

    async def work(store: FileStore) -> None:
        batch = await run_lines(store, ask, Room(), line("1"))
        assert (batch.status, batch.request_counts.completed) == ("completed", 1)

    monkeypatch.setattr(fcntl, "flock", none)
    with_files(tmp_path, work)
    assert f"{tmp_path} has no file locks" in caplog.text


def test_lines_wait_until_there_is_room_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_BATCHES_BYTES", 10_000)
    held, most = 0, 0

    async def ask(line: BatchLine) -> Answered:
        nonlocal held, most
        held += len(line.body)
        most = max(most, held)
        for _ in range(10):
            await asyncio.sleep(0)
        held -= len(line.body)
        return Answered(200, "", b"{}")

    async def work(store: FileStore) -> None:
        texts = [{"messages": [{"role": "user", "content": "x" * size}]} for size in (*[1500] * 12, 40_000)]
        room = Room()
        batch = await run_lines(store, ask, room, *(line(str(i), **text) for i, text in enumerate(texts)))
        assert batch.request_counts.completed == 13, "also one that is larger than all the room"
        assert room.has_few

    with_files(tmp_path, work)
    assert most >= 3000
    assert most <= 45_000


def test_lines_that_wait_for_their_keys_rate_leave_room_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "MAX_BATCHES_BYTES", 10_000)
    waits, other_done = asyncio.Event(), asyncio.Event()
    asked: list[tuple[str, bytes]] = []

    async def ask(line: BatchLine) -> Answered:
        if line.custom_id != "other" and not other_done.is_set():
            waits.set()
            return Answered(429, "", b"{}", retry_after="0")
        asked.append((str(line.custom_id), line.body))
        return Answered(200, "", b"{}")

    async def work(store: FileStore) -> None:
        content = {"messages": [{"role": "user", "content": "\u00e9" * 600}]}
        texts = {name: line(name, **content) for name in ("1", "2", "3", "4", "other")}
        room = Room()
        limited = made(store, ask, room)
        store.new("file-in").write_bytes(b"\n \n".join(text for name, text in texts.items() if name != "other"))
        running = asyncio.create_task(limited.run(asyncio.Semaphore(8), 8))
        await waits.wait()
        store.new("file-other").write_bytes(texts["other"])
        other = BatchJob(batch_of("file-other", "batch_2"), "you", store, ask, lambda model: None, room, 1 << 20)
        await asyncio.wait_for(other.run(asyncio.Semaphore(8), 8), 60)
        assert [name for name, _ in asked] == ["other"]
        other_done.set()
        await running
        assert limited.batch.request_counts.completed == 4
        assert {name: json.loads(body) for name, body in asked} == {
            name: json.loads(text)["body"] for name, text in texts.items()
        }
        assert room.has_few

    with_files(tmp_path, work)


def test_a_file_of_too_many_lines_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_LINES", 10)
    numbers: list[int] = []
    whole = BatchInput._read

    def noted(self: BatchInput, line: bytes, number: int) -> BatchLine:
        numbers.append(number)
        return whole(self, line, number)

    async def work(store: FileStore) -> None:
        batch = await run_lines(store, None, Room(), *(line(str(i)) for i in range(1000)))
        assert batch.errors is not None
        assert [error.code for error in batch.errors.data] == ["too_many_requests"]

    monkeypatch.setattr(BatchInput, "_read", noted)
    with_files(tmp_path, work)
    assert numbers == [*range(1, 12)]


# ---- limits of a key ----


def jobs_of(service: Service) -> BatchJobs:
    api = service.apis["batches"]
    assert isinstance(api, BatchesApi)
    return api.jobs


def with_service(folder: Path, work: Callable[[BatchJobs, httpx.AsyncClient], Coroutine[Any, Any, None]]) -> None:
    async def go() -> None:
        service = make_service(Config(server=ServerOptions(files_dir=str(folder), files_max_bytes=1000)))
        await service.apis["batches"].open()
        transport = httpx.ASGITransport(create_app(service))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                await work(jobs_of(service), client)
        finally:
            await service.apis["batches"].close()

    asyncio.run(go())


def upload(client: httpx.AsyncClient, data: bytes) -> Coroutine[Any, Any, httpx.Response]:
    return client.post("/v1/files", files={"file": data}, data={"purpose": "batch"})


def test_uploads_that_come_at_once_do_not_pass_the_limit_together(tmp_path: Path) -> None:
    async def work(jobs: BatchJobs, client: httpx.AsyncClient) -> None:
        answers = await asyncio.gather(*(upload(client, b"x" * 300) for _ in range(12)))
        statuses = [answer.status_code for answer in answers]
        assert set(statuses) == {200, 413}
        stored = statuses.count(200)
        assert stored <= 3
        refused = next(answer for answer in answers if answer.status_code == 413)
        assert refused.json()["error"]["code"] == "storage_limit_exceeded"
        assert len([*tmp_path.glob("*.jsonl")]) == stored, "what was refused leaves nothing"
        while stored < 3:  # and takes no room
            assert (await upload(client, b"x" * 300)).status_code == 200
            stored += 1
        assert (await upload(client, b"x" * 101)).status_code == 413
        assert (await upload(client, b"x" * 100)).status_code == 200

    with_service(tmp_path, work)


def test_batches_that_are_made_at_once_do_not_pass_the_limit_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BatchJobs, "_run", lambda *arguments: None)

    async def work(jobs: BatchJobs, client: httpx.AsyncClient) -> None:
        request = BatchRequest(input_file_id="file-x", endpoint=CHAT, completion_window="24h")
        made = await asyncio.gather(*(jobs.create_batch(request, "me") for _ in range(40)), return_exceptions=True)
        refused = [error for error in made if isinstance(error, APIError)]
        assert len(refused) == 40 - MAX_ACTIVE
        assert {(error.status, error.code) for error in refused} == {(429, "too_many_batches")}
        assert isinstance(await jobs.create_batch(request, "other"), BatchObject)

    with_service(tmp_path, work)


def test_a_list_begins_behind_an_entry_of_its_owner_alone(tmp_path: Path) -> None:
    async def work(store: FileStore) -> None:
        for owner, name in (("a", "file-1"), ("b", "file-2"), ("a", "file-3")):
            await store.files.put(FileObject(id=name, bytes=1, created_at=1, filename="x", purpose="batch"), owner)
        page = await store.files.page("a", PageQuery(after="file-3"))
        assert [file.id for file in page] == ["file-1"]
        for records in (store.files, store.batches):
            with pytest.raises(APIError, match="'after': there is no object 'file-2'"):
                await records.page("a", PageQuery(after="file-2"))

    with_files(tmp_path, work)


def test_a_list_goes_on_behind_a_file_that_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: FileStore) -> None:
        names = [f"file-{i}" for i in range(6)]
        for name in names:
            await store.files.put(FileObject(id=name, bytes=1, created_at=1, filename="x", purpose="batch"), "a")
        seen, after = [], None
        while page := await store.files.page("a", PageQuery(2, "asc", after)):
            for file in page:
                await store.delete_file(file.id, "a")
            seen += [file.id for file in page]
            after = seen[-1]
        assert seen == names
        assert await store.files.page("a", PageQuery(after="file-4")) == []

        async def put_and_delete(owner: str, *names: str) -> None:
            for name in names:
                await store.files.put(FileObject(id=name, bytes=1, created_at=1, filename="x", purpose="batch"), owner)
                await store.delete_file(name, owner)

        async def is_known(after: str, owner: str = "a") -> bool:
            try:
                return await store.files.page(owner, PageQuery(after=after)) == []
            except APIError:
                return False

        monkeypatch.setattr(deleted_rows, "MAX_OF_LIST", 2)
        await put_and_delete("a", "file-6")
        await put_and_delete("b", "b-1", "b-2", "b-3")
        assert [await is_known(name) for name in ("file-4", "file-5", "file-6")] == [False, True, True]
        assert [await is_known(name, "b") for name in ("file-5", "b-1", "b-2", "b-3")] == [False, False, True, True]
        monkeypatch.setattr(deleted_rows, "MAX_ROWS", 2)
        await put_and_delete("c", "c-1")
        assert [await is_known("file-6"), await is_known("b-3", "b"), await is_known("c-1", "c")] == [False, True, True]

    with_files(tmp_path, work)


def test_files_whose_time_is_over_are_not_listed(tmp_path: Path) -> None:
    async def work(store: FileStore) -> None:
        for name, expires_at in (("file-1", None), ("file-2", 1), ("file-3", 1 << 40)):
            made = FileObject(id=name, bytes=1, created_at=1, filename="x", purpose="batch", expires_at=expires_at)
            await store.files.put(made, "a")
        assert [file.id for file in await store.files.page("a", PageQuery(order="asc"))] == ["file-1", "file-3"]

    with_files(tmp_path, work)


def test_a_file_that_cannot_be_deleted_is_not_remembered_as_deleted(tmp_path: Path) -> None:
    async def work(store: FileStore) -> None:
        await store.files.put(FileObject(id="file-1", bytes=1, created_at=1, filename="x", purpose="batch"), "a")
        fails = "CREATE TRIGGER fails BEFORE DELETE ON records BEGIN SELECT raise(ABORT, 'the disk fails'); END"
        await store._table.execute(fails)
        with pytest.raises(APIError, match="the disk fails"):
            await store.delete_file("file-1", "a")
        assert await store._table.execute("SELECT count(*) FROM deleted") == [(0,)]
        await store._table.execute("DROP TRIGGER fails")
        assert await store.delete_file("file-1", "a")
        assert await store._table.execute("SELECT id FROM deleted") == [("file-1",)]

    with_files(tmp_path, work)


def test_a_form_of_many_parts_is_refused_at_the_first_too_many(tmp_path: Path) -> None:
    part = b'--x\r\nContent-Disposition: form-data; name="f"\r\n\r\n\r\n'

    async def work(jobs: BatchJobs, client: httpx.AsyncClient) -> None:
        headers = {"Content-Type": "multipart/form-data; boundary=x"}
        answer = await client.post("/v1/files", content=part * 17, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_form")
        assert "more than 16 parts" in answer.json()["error"]["message"]

    with_service(tmp_path, work)


def test_lines_count_against_the_rate_limit_of_their_key_and_wait(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("[{name: me, key: secret, requests_per_minute: 2}]")
    status = 503

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def go() -> None:
        nonlocal status
        service = make_service(Config(server=ServerOptions(api_keys_file=str(keys))))
        jobs = jobs_of(service)
        jobs._endpoints = {CHAT: endpoint}
        one = BatchLine("1", "a", CHAT, b"{}")
        assert [(await jobs._ask("me", one)).status for _ in range(3)] == [503, 503, 503], "they are sent again"
        status = 200
        first, second = [await jobs._ask("me", one) for _ in range(2)]
        assert (first.status, second.status) == (200, 429)
        wait_s = Retries().delay_s(second.status, second.body, second.retry_after)
        assert wait_s == 30.0, "one request is left to clients"
        use = service.keys.named("me")
        assert use is not None
        use.take_request()

    asyncio.run(go())


def test_a_rate_limit_is_waited_for_as_long_as_it_says_each_time() -> None:
    retries = Retries()
    assert [retries.delay_s(429, b"", "2") for _ in range(4)] == [2.0] * 4
    assert [retries.delay_s(503, b"", None) for _ in range(3)] == [0.5, 1.0, 2.0]
