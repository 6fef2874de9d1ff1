"""The records of files and batches in a table of SQLite. A key finds its own alone.

The table is read and written in a thread of its own, so that the event loop never waits.
"""

import asyncio
import errno
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import msgspec

from oscine.api.common import deleted_rows
from oscine.api.common.errors import APIError, unavailable
from oscine.api.common.paging import Listing, PageQuery
from oscine.extensions.apis.batches.schemas import TERMINAL, BatchObject, FileObject

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS records (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    kind TEXT NOT NULL,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    purpose TEXT NOT NULL,
    size INTEGER NOT NULL,
    active INTEGER NOT NULL,  -- a batch that has not ended
    expires_s REAL,
    body BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS records_by_owner ON records (kind, owner, number);
{deleted_rows.SCHEMA}
"""
_INSERT = "INSERT INTO records (kind, id, owner, purpose, size, active, expires_s, body)"
_ROW = ":kind, :id, :owner, :purpose, :size, :active, :expires_s, :body"
_PUT = f"""
{_INSERT} VALUES ({_ROW})
ON CONFLICT (id) DO UPDATE SET size = excluded.size, active = excluded.active, body = excluded.body
"""
# Checks and adds in one statement, so that those who add at once, also in other servers, do not pass the limits.
_ADD = f"""
{_INSERT} SELECT {_ROW}
WHERE (
    SELECT coalesce(sum(kind = 'file' OR active), 0) < :most AND coalesce(sum(size), 0) + :size <= :most_bytes
    FROM records WHERE kind = :kind AND owner = :owner
)
RETURNING id
"""
_PAGE = """
SELECT body FROM records
WHERE kind = :kind AND owner = :owner AND (:purpose IS NULL OR purpose = :purpose)
AND (expires_s IS NULL OR expires_s >= :now_s)
"""
_PLACE = "SELECT number FROM records WHERE kind = :kind AND owner = :owner AND id = :id"
_WAIT_S = 10.0  # for another server that writes
T = TypeVar("T")
R = TypeVar("R", FileObject, BatchObject)


class RecordTable:
    """`connect` comes first and `close` last, both in the table's thread."""

    def __init__(self, check: Callable[[], None]) -> None:
        """`check` raises an error if there is no table."""
        self._check = check
        self._thread = ThreadPoolExecutor(1, "files")
        self._db: sqlite3.Connection | None = None

    def connect(self, path: Path) -> None:
        make_private(path)
        self._db = sqlite3.connect(path, _WAIT_S, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        if self._db is not None:
            self._db.close()

    def query(self, query: str, values: tuple[Any, ...] | dict[str, Any] = ()) -> list[Any]:
        """All rows of the result. For the table's thread, as `execute` is for others."""
        assert self._db is not None
        return self._db.execute(query, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that `query` writes within it, or nothing if an error is raised. For the table's thread."""
        assert self._db is not None
        with self._db:  # commits, or rolls back
            self._db.execute("BEGIN IMMEDIATE")
            yield

    async def execute(self, query: str, values: tuple[Any, ...] | dict[str, Any] = ()) -> list[Any]:
        """Raises APIError 503 when the disk fails."""
        return await self.do(self.query, query, values)

    async def do(self, work: Callable[..., T], *args: Any) -> T:
        """Runs work in the table's thread. Raises APIError 503 when the disk fails."""
        self._check()
        try:
            return await self.run(work, *args)
        except (sqlite3.Error, OSError) as error:
            raise storage_failed(error) from error

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *args))

    def end_thread(self) -> None:
        self._thread.shutdown(wait=False)


class Records(Generic[R]):
    """The files or the batches in the table. All methods raise APIError 503 when the disk fails."""

    def __init__(self, table: RecordTable, kind: Literal["file", "batch"], type_: type[R]) -> None:
        self._table, self._kind = table, kind
        self._type: type[R] = type_

    async def put(self, record: R, owner: str) -> None:
        await self._table.execute(_PUT, self._row(record, owner))

    async def add(self, record: R, owner: str, most: int, most_bytes: int = 0) -> bool:
        """False if the owner would then have more files, batches that have not ended, or bytes than that."""
        return bool(
            await self._table.execute(_ADD, self._row(record, owner) | {"most": most, "most_bytes": most_bytes})
        )

    def _row(self, record: R, owner: str) -> dict[str, Any]:
        row = {"kind": self._kind, "id": record.id, "owner": owner, "body": msgspec.json.encode(record)}
        if isinstance(record, FileObject):
            return {**row, "purpose": record.purpose, "size": record.bytes, "active": 0, "expires_s": record.expires_at}
        active = int(record.status not in TERMINAL)
        return {**row, "purpose": record.endpoint, "size": 0, "active": active, "expires_s": None}

    async def get(self, record_id: str, owner: str) -> R | None:
        select = "SELECT body FROM records WHERE kind = ? AND id = ? AND owner = ?"
        rows = await self._table.execute(select, (self._kind, record_id, owner))
        return msgspec.json.decode(rows[0][0], type=self._type) if rows else None

    async def page(self, owner: str, page: PageQuery, purpose: str | None = None) -> list[R]:
        """At most one more than the limit of the page. Raises APIError 400 for an unknown `after` or `before`."""
        listing = Listing(self._list(owner), _PAGE, _PLACE)
        values = {"kind": self._kind, "owner": owner, "purpose": purpose, "now_s": time.time()}
        rows = await self._table.do(listing.page, self._table.query, values, page)
        return [msgspec.json.decode(body, type=self._type) for (body,) in rows]

    def remove(self, record_id: str, owner: str) -> bool:
        """Whether it was there. For the table's thread."""
        delete = "DELETE FROM records WHERE kind = ? AND owner = ? AND id = ? RETURNING number"
        with self._table.transaction():
            rows = self._table.query(delete, (self._kind, owner, record_id))
            for (place,) in rows:
                deleted_rows.remember(self._table.query, self._list(owner), record_id, place)
        return bool(rows)

    def _list(self, owner: str) -> str:
        return f"{self._kind} of {owner}"

    async def use(self, owner: str) -> tuple[int, int]:
        """How many there are, and their bytes."""
        select = "SELECT count(*), coalesce(sum(size), 0) FROM records WHERE kind = ? AND owner = ?"
        ((count, size),) = await self._table.execute(select, (self._kind, owner))
        return count, size


def make_private(path: Path) -> None:
    """An empty file, unless there is one. Raises OSError for a link, which may lead to a file of others."""
    for beside in ("-wal", "-shm", "-journal"):  # files of SQLite's, which follows links
        if path.with_name(path.name + beside).is_symlink():
            raise OSError(f"{path.name}{beside} is a link")
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        why = "is a link" if error.errno == errno.ELOOP else error.strerror
        raise OSError(f"{path.name} {why}") from None


def storage_failed(error: Exception) -> APIError:
    return unavailable(f"The stored files cannot be reached: {error}.", code="storage_unavailable")
