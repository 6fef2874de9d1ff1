"""/v1/files and /v1/batches with the openai client, in front of real servers, some of which are killed."""

import asyncio
import json
import os
import signal
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from oscine.api.apis import make_service
from oscine.api.app import create_app
from oscine.extensions.apis.batches.jobs import BatchJobs
from oscine.extensions.apis.batches.schemas import FileObject
from oscine.extensions.apis.batches.store import TEMPORARY, FileStore
from oscine.settings.config import Config, ServerOptions
from tests.server import ServerProcess
from tests.waiting import wait_until

CHAT = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20},
    "/v1/completions": {"prompt": "hi", "max_tokens": 5},
    "/v1/responses": {"input": "hi", "max_output_tokens": 20, "store": False},
}


@pytest.fixture(scope="module")
def client(fake_server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{fake_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def line(name: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": BODIES[url] | body}


def upload(client: OpenAI, *lines: dict[str, Any] | str) -> str:
    text = "\n".join(text if isinstance(text, str) else json.dumps(text) for text in lines)
    return client.files.create(file=("lines.jsonl", text.encode()), purpose="batch").id


def start(client: OpenAI, *lines: dict[str, Any] | str, url: Any = CHAT) -> str:
    made = client.batches.create(
        input_file_id=upload(client, *lines), endpoint=url, completion_window="24h", metadata={"who": "test"}
    )
    assert made.expires_at == made.created_at + 24 * 3600
    return made.id


def ended(client: OpenAI, batch_id: str, deadline_s: float = 60.0) -> Any:
    over = ("completed", "failed", "cancelled", "expired")
    wait_until(lambda: client.batches.retrieve(batch_id).status in over, "the end of the batch", deadline_s)
    return client.batches.retrieve(batch_id)


def lines_of(client: OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(text) for text in client.files.content(file_id).text.splitlines()]


@pytest.mark.parametrize("url", BODIES)
def test_a_batch_answers_every_line(client: OpenAI, url: str) -> None:
    batch = ended(client, start(client, *(line(str(i), url) for i in range(5)), url=url))
    assert batch.status == "completed"
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (5, 5, 0)
    assert batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    assert batch.metadata == {"who": "test"}
    assert batch.error_file_id is None
    answers = lines_of(client, batch.output_file_id)
    assert {answer["custom_id"] for answer in answers} == set("01234")
    for answer in answers:
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        assert answer["response"]["body"]["usage"]["total_tokens"] > 0
    output = client.files.retrieve(str(batch.output_file_id))
    assert (output.purpose, output.bytes) == ("batch_output", len(client.files.content(output.id).content))


def test_requests_that_fail_are_in_the_error_file(client: OpenAI) -> None:
    batch = ended(client, start(client, line("good"), line("bad", temperature=9), line("worse", n=0)))
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 2)
    errors = {answer["custom_id"]: answer["response"] for answer in lines_of(client, batch.error_file_id)}
    assert errors["bad"]["status_code"] == 400
    assert errors["bad"]["body"]["error"]["param"] == "temperature"
    assert errors["worse"]["body"]["error"]["param"] == "n"


def test_lines_that_are_no_requests_fail_the_batch(client: OpenAI) -> None:
    cases: list[tuple[list[Any], str, int | None]] = [
        ([line("a"), "{no json"], "invalid_json_line", 2),
        ([line("a"), line("b"), line("a")], "duplicate_custom_id", 3),
        ([line("a", "/v1/completions")], "invalid_url", 1),
        ([{"custom_id": "a", "url": CHAT}], "missing_required_parameter", 1),
        ([line("a", stream=True)], "invalid_request", 1),
        ([line("a", model="gpt-9")], "model_not_found", 1),
        ([""], "empty_file", None),
    ]
    for lines, code, number in cases:
        batch = ended(client, start(client, *lines))
        assert batch.status == "failed"
        assert batch.failed_at
        assert (batch.errors.data[0].code, batch.errors.data[0].line) == (code, number)
        assert batch.output_file_id is batch.error_file_id is None
    responses = "/v1/responses"
    batch = ended(client, start(client, line("a", responses, background=True), url=responses))
    assert (batch.status, batch.errors.data[0].code) == ("failed", "invalid_request")


def test_files_are_listed_read_and_deleted(client: OpenAI) -> None:
    ids = [upload(client, line(str(i))) for i in range(3)]
    listed = [file.id for file in client.files.list(purpose="batch")]
    assert [file_id for file_id in listed if file_id in ids] == ids[::-1]
    page = client.files.list(limit=1, after=ids[1], order="desc")
    assert page.data[0].id == ids[0]
    file = client.files.retrieve(ids[0])
    assert (file.filename, file.purpose, file.status) == ("lines.jsonl", "batch", "processed")
    assert client.files.content(ids[0]).text == json.dumps(line("0"))
    assert client.files.delete(ids[0]).deleted
    for ask in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            ask(ids[0])
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id=ids[0], endpoint=CHAT, completion_window="24h")  # type: ignore[arg-type]


def test_a_file_may_have_an_end(client: OpenAI) -> None:
    expiry: Any = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=b"{}", purpose="batch", expires_after=expiry)
    assert file.expires_at == file.created_at + 3600
    with pytest.raises(openai.BadRequestError, match="seconds"):
        client.files.create(file=b"{}", purpose="batch", expires_after=expiry | {"seconds": 5})


def test_files_whose_time_is_over_are_deleted_but_for_inputs(tmp_path: Path) -> None:
    async def go() -> None:
        jobs = BatchJobs(make_service(Config(server=ServerOptions(files_dir=str(tmp_path)))))
        await jobs.store.open()
        for name, expires_at in (
            ("file-old", 5),
            ("file-input", 5),
            ("file-new", int(time.time()) + 100),
            ("file-plain", None),
        ):
            jobs.store.path(name).touch()
            file = FileObject(id=name, bytes=1, created_at=1, filename="x", purpose="batch", expires_at=expires_at)
            await jobs.store.files.put(file, "me")
        jobs.is_input = lambda file_id: file_id == "file-input"  # type: ignore[method-assign]
        await jobs.remove_expired()
        await jobs.store.close()

    asyncio.run(go())
    assert {path.stem for path in tmp_path.glob("*.jsonl")} == {"file-input", "file-new", "file-plain"}


def test_uploads_of_a_server_that_was_killed_are_removed_after_a_day(tmp_path: Path) -> None:
    cut, new, known, output = (f"file-{digit * 32}" for digit in "abcd")
    others = ["file-notes.jsonl", f"{output}output.jsonl"]  # an output has no record before its batch has ended

    async def go() -> None:
        store = FileStore(str(tmp_path))
        await store.open()
        for file_id in (cut, new, known):
            store.new(file_id)
        for name in others:
            (tmp_path / name).touch()
        content = FileObject(id=known, bytes=0, created_at=1, filename="a", purpose="batch")
        await store.files.put(content, "me")
        await store.close()
        long_ago = time.time() - 25 * 3600
        for name in (f"{cut}.jsonl", f"{known}.jsonl", *others):
            os.utime(tmp_path / name, (long_ago, long_ago))
        store = FileStore(str(tmp_path))
        await store.open()
        await store.close()

    asyncio.run(go())
    names = {path.name for path in tmp_path.glob("file-*")}
    assert names == {f"{new}.jsonl", f"{known}.jsonl", *others}


@pytest.mark.parametrize("name", ["index.db", "index.db-wal", "index.db-shm", "index.db-journal"])
def test_a_table_behind_a_link_is_refused(tmp_path: Path, name: str) -> None:
    folder, other = tmp_path / "files", tmp_path / "other"
    folder.mkdir()
    other.touch()
    (folder / name).symlink_to(other)
    with pytest.raises(ValueError, match=rf"--files-dir .* cannot be used: {name} is a link"):
        asyncio.run(FileStore(str(folder)).open())
    assert not other.read_bytes()


def test_a_temporary_folder_of_a_server_that_was_killed_is_removed_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def names() -> list[str]:
        return sorted(path.name for path in tmp_path.iterdir())

    async def open_one() -> FileStore:
        store = FileStore(TEMPORARY)
        await store.open()
        store.new(f"file-{'0' * 32}").write_bytes(b"{}")
        store.new(f"file-{'0' * 32}output")
        return store

    async def go() -> None:
        killed = await open_one()
        [gone] = names()
        assert killed._temporary is not None
        killed._temporary.close()  # as the kernel does
        living = await open_one()
        [kept] = names()
        assert kept != gone
        (tmp_path / "oscine-files-keepsake").mkdir()
        (tmp_path / "oscine-files-01234567").mkdir()
        (tmp_path / "oscine-files-01234567" / "lock").touch()
        last = await open_one()
        assert len(names()) == 4
        for store in (living, last):
            await store.close()
        assert names() == ["oscine-files-01234567", "oscine-files-keepsake"]

    asyncio.run(go())


def test_without_a_temporary_folder_the_message_names_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nowhere")
    with pytest.raises(ValueError, match=r"--files-dir :temporary: cannot be used: .*TMPDIR names another place"):
        asyncio.run(FileStore(TEMPORARY).open())


def test_a_server_without_a_folder_says_that_it_keeps_no_files() -> None:
    async def go() -> int:
        app = create_app(make_service(Config()))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            answers = [await client.get("/v1/files"), await client.get("/v1/batches/x")]
            answers.append(await client.post("/v1/files", files={"file": b"{}"}, data={"purpose": "batch"}))
        assert {answer.json()["error"]["code"] for answer in answers} == {"files_not_offered"}
        return max(answer.status_code for answer in answers)

    assert asyncio.run(go()) == 501


def test_uploads_that_are_wrong_are_named(client: OpenAI, fake_server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="'purpose'"):
        client.files.create(file=b"{}", purpose="vision")
    url = f"{fake_server.url}/v1/files"
    with httpx.Client() as http:
        missing = http.post(url, files={"other": b"x"}, data={"purpose": "batch"})
        assert (missing.status_code, missing.json()["error"]["param"]) == (400, "file")
        assert http.post(url, json={}).status_code == 415
        form = {"Content-Type": "multipart/form-data; boundary=x"}
        for body in (
            b"--x\r\nContent-",
            b"no form",
            b"--x\r\nContent-Disposition: form-data; name=file; filename=a\r\n\r\nhi",
        ):
            assert http.post(url, content=body, headers=form).status_code == 400
        foreign = http.post(
            url, files={"file": b"x"}, data={"purpose": "batch"}, headers={"Origin": "https://evil.example"}
        )
        assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "origin_not_allowed")


def test_a_batch_that_is_cancelled_keeps_what_is_answered(client: OpenAI, fake_server: ServerProcess) -> None:
    batch_id = start(
        client, line("short", max_tokens=1), *(line(str(i), max_tokens=60_000, ignore_eos=True) for i in range(9))
    )
    wait_until(lambda: client.batches.retrieve(batch_id).request_counts.completed == 1, "the short answer")
    assert client.batches.cancel(batch_id).status == "cancelling"
    batch = ended(client, batch_id)
    assert (batch.status, batch.request_counts.completed) == ("cancelled", 1)
    assert [answer["custom_id"] for answer in lines_of(client, batch.output_file_id)] == ["short"]
    fake_server.wait_idle()
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch_id)


def test_batches_are_listed(client: OpenAI) -> None:
    ids = [start(client, line("a")) for _ in range(3)]
    for batch_id in ids:
        ended(client, batch_id)
    page = client.batches.list(limit=2)
    assert ([batch.id for batch in page.data], page.has_more) == ([ids[2], ids[1]], True)
    assert client.batches.list(limit=1, after=ids[1]).data[0].id == ids[0]


@pytest.mark.slow
def test_an_interactive_request_overtakes_a_batch(client: OpenAI, fake_server: ServerProcess) -> None:
    """The batch takes all places of the engine. The request gets one of them all the same, long before its end."""
    batch_id = start(client, *(line(str(i), max_tokens=60_000, ignore_eos=True) for i in range(80)))
    wait_until(lambda: fake_server.metric("oscine:num_requests_running") >= 64, "a full engine")
    before = fake_server.metric("oscine:num_preemptions_total")
    model = client.models.list().data[0].id
    client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}], max_tokens=3)
    wait_until(lambda: fake_server.metric("oscine:num_preemptions_total") > before, "a preemption")
    assert client.batches.retrieve(batch_id).request_counts.completed == 0
    client.batches.cancel(batch_id)
    ended(client, batch_id)


def served(folder: Path, model: Path, *options: str) -> ServerProcess:
    fake = ("--executor", "fake", "--fake-step-s", "0.002", "--log-level", "error")
    return ServerProcess(str(model), *fake, "--files-dir", str(folder), *options)


def kill(server: ServerProcess) -> None:
    """At once, with all its processes."""
    for process in [*server.processes()]:
        process.kill()
    os.kill(server.pid, signal.SIGKILL)
    server.exit_code()


def end(server: ServerProcess) -> None:
    """As an operator does. The batch does not hold it up."""
    server.terminate()
    assert server.exit_code() == 0


@pytest.mark.parametrize(
    ("count", "stop"),
    [
        (40, kill),
        pytest.param(1000, kill, marks=pytest.mark.slow),
        pytest.param(300, end, marks=pytest.mark.slow),
    ],
)
def test_a_server_that_is_killed_goes_on_with_its_batches(
    tmp_path: Path, model_folder: Path, count: int, stop: Callable[[ServerProcess], None]
) -> None:
    """All lines are answered once."""
    server = served(tmp_path, model_folder, "--max-num-seqs", "8")
    with server, OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        lines = (line(str(i), max_tokens=20 + i % 50, ignore_eos=True) for i in range(count))
        batch_id = start(client, *lines)
        few = count // 4
        wait_until(lambda: client.batches.retrieve(batch_id).request_counts.completed > few, "some answers", 60)
        stop(server)
    with served(tmp_path, model_folder) as again, OpenAI(base_url=f"{again.url}/v1", api_key="none") as client:
        batch = ended(client, batch_id, 200)
        answers = lines_of(client, batch.output_file_id)
    assert (batch.status, batch.request_counts.completed, batch.error_file_id) == ("completed", count, None)
    assert Counter(answer["custom_id"] for answer in answers) == Counter(map(str, range(count)))


@pytest.mark.slow
def test_keys_see_their_own_and_have_limits(tmp_path: Path, model_folder: Path) -> None:
    options = (
        "--api-key",
        "one-key",
        "--api-key",
        "other-key",
        "--files-max-bytes",
        "2000",
        "--max-file-bytes",
        "1000",
    )
    with served(tmp_path, model_folder, *options) as server:
        one, other = (
            OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) for key in ("one-key", "other-key")
        )
        batch = ended(one, start(one, line("a")))
        file_id = batch.input_file_id
        for ask, name in (
            (other.files.retrieve, file_id),
            (other.files.content, batch.output_file_id),
            (other.files.delete, file_id),
            (other.batches.retrieve, batch.id),
            (other.batches.cancel, batch.id),
        ):
            with pytest.raises(openai.NotFoundError):
                ask(name)
        assert not other.files.list().data
        assert not other.batches.list().data
        with pytest.raises(openai.APIStatusError) as caught:
            other.files.create(file=b"x" * 1001, purpose="batch")
        assert caught.value.status_code == 413
        other.files.create(file=b"x" * 999, purpose="batch")
        other.files.create(file=b"x" * 999, purpose="batch")
        with pytest.raises(openai.APIStatusError) as caught:
            other.files.create(file=b"x" * 999, purpose="batch")
        assert caught.value.status_code == 413
        files = [*tmp_path.glob("*.jsonl")]
        assert len(files) == 4, "what was refused leaves nothing"
        assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
        for client in (one, other):
            client.close()


def test_a_batch_expires(tmp_path: Path, model_folder: Path) -> None:
    """A server is started when the time of its batch is over."""
    with served(tmp_path, model_folder) as server, OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        batch_id = start(client, line("short", max_tokens=1), line("long", max_tokens=60_000, ignore_eos=True))
        wait_until(lambda: client.batches.retrieve(batch_id).request_counts.completed == 1, "the short answer")
        kill(server)
    with closing(sqlite3.connect(tmp_path / "index.db")) as index, index:
        (body,) = index.execute("SELECT body FROM records WHERE id = ?", (batch_id,)).fetchone()
        past = json.loads(body) | {"expires_at": int(time.time()) - 1}
        index.execute("UPDATE records SET body = ? WHERE id = ?", (json.dumps(past), batch_id))
    with served(tmp_path, model_folder) as server, OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        batch = ended(client, batch_id)
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("expired", 1, 1)
        (error,) = lines_of(client, batch.error_file_id)
        assert (error["custom_id"], error["response"], error["error"]["code"]) == ("long", None, "batch_expired")
