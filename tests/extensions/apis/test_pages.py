"""Pages of all lists: they obey the same parameters."""

import itertools
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from oscine.api.common import deleted_rows
from oscine.api.common.paging import Listing, PageQuery, page_of
from oscine.extensions.apis.batches.jobs import BatchJobs
from tests.api.scripted_server import ScriptedServer

SIZE = 5
FORM = {"Content-Type": "multipart/form-data; boundary=b"}
FILE = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n{}\r\n--b--\r\n'
)
SAID = {"type": "message", "role": "user", "content": "hi"}


@pytest.fixture
def server(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    """Batches do not run."""
    monkeypatch.setattr(BatchJobs, "_run", lambda *arguments: None)
    with ScriptedServer(model_folder, files_dir=str(tmp_path)) as server:
        yield server


def ids_of(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [each["id"] for each in answer.json()["data"]]


def upload(server: ScriptedServer) -> str:
    answer = server.run(server._request("POST", "/v1/files", FILE, FORM))
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def made_files(server: ScriptedServer) -> tuple[str, list[str]]:
    return "/v1/files", [upload(server) for _ in range(SIZE)]


def made_batches(server: ScriptedServer) -> tuple[str, list[str]]:
    body = {"input_file_id": upload(server), "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    return "/v1/batches", [server.post("/v1/batches", body).json()["id"] for _ in range(SIZE)]


def made_stores(server: ScriptedServer) -> tuple[str, list[str]]:
    return "/v1/vector_stores", [server.post("/v1/vector_stores", {}).json()["id"] for _ in range(SIZE)]


def made_items(server: ScriptedServer) -> tuple[str, list[str]]:
    made = server.post("/v1/conversations", {"items": [SAID] * SIZE}).json()["id"]
    url = f"/v1/conversations/{made}/items"
    return url, ids_of(server.get(f"{url}?order=asc"))


def made_input(server: ScriptedServer) -> tuple[str, list[str]]:
    made = server.post("/v1/responses", {"input": [SAID] * SIZE}).json()["id"]
    url = f"/v1/responses/{made}/input_items"
    return url, ids_of(server.get(f"{url}?order=asc"))


def expected(
    ids: Sequence[str], limit: int, order: str, after: str | None, before: str | None
) -> tuple[list[str], bool]:
    ordered = [*ids] if order == "asc" else [*ids][::-1]
    begin = 0 if after is None else ordered.index(after) + 1
    found = ordered[begin : None if before is None else ordered.index(before)]
    last = before is not None and after is None
    return found[-limit:] if last else found[:limit], len(found) > limit


LISTS = [made_files, made_batches, made_stores, made_items, made_input]


Made = Callable[[ScriptedServer], tuple[str, list[str]]]
WRONG = {
    "after=none": "after",
    "before=none": "before",
    "order=up": "order",
    "limit=0": "limit",
    "limit=10001": "limit",
    f"after={'x' * 513}": "after",
    f"before={'x' * 513}": "before",
}


@pytest.mark.parametrize("made", LISTS)
def test_all_lists_obey_limit_order_after_and_before(server: ScriptedServer, made: Made) -> None:
    url, ids = made(server)
    ends = [(None, ids[3]), (ids[1], None), (None, ids[0]), (ids[0], ids[4]), (ids[4], ids[0])]
    for order, limit, (after, before) in itertools.product(("asc", "desc"), (1, 2, 100), ends):
        bounds = {"after": after, "before": before, "order": order, "limit": str(limit)}
        query = "&".join(f"{name}={value}" for name, value in bounds.items() if value is not None)
        page = server.get(f"{url}?{query}")
        wanted, has_more = expected(ids, limit, order, after, before)
        assert ids_of(page) == wanted, query
        found = page.json()
        assert (found["has_more"], found["first_id"] or None) == (has_more, wanted[0] if wanted else None), query
        assert (found["last_id"] or None) == (wanted[-1] if wanted else None), query
    for query, param in WRONG.items():
        refused = server.get(f"{url}?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def test_pages_in_a_database_and_in_memory_are_the_same() -> None:
    names, db = [f"n{i}" for i in range(SIZE)], sqlite3.connect(":memory:")
    db.executescript(f"CREATE TABLE objects (number INTEGER PRIMARY KEY, id TEXT); {deleted_rows.SCHEMA}")
    db.executemany("INSERT INTO objects (id) VALUES (?)", [(name,) for name in names])
    listing = Listing("all", "SELECT id FROM objects WHERE true", "SELECT number FROM objects WHERE id = :id")
    ends: list[str | None] = [None, *names]
    queries: list[tuple[Any, ...]] = [*itertools.product((1, 2, 4, 5, 9), ("asc", "desc"), ends, ends)]
    for limit, order, after, before in queries:
        page = PageQuery(limit, order, after, before)
        wanted, has_more = expected(names, limit, order, after, before)
        for found in ([name for (name,) in listing.page(db.execute, {}, page)], page_of(names, str, page)):
            assert (found[:limit], len(found) > limit) == (wanted, has_more), page
