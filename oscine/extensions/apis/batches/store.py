"""Files and batches on disk: contents as files of a folder, and a table of what is there.

A key finds its own alone. The table is read and written in a thread of its own, so that the event loop never waits.
"""

import asyncio
import contextlib
import errno
import logging
import os
import re
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from oscine.api.common.errors import APIError, unavailable
from oscine.extensions.apis.batches.schemas import TERMINAL, BatchObject, FileObject
from oscine.system.owned_folder import Kind, OwnedFolder, make_temporary

logger = logging.getLogger(__name__)

TEMPORARY = ":temporary:"
_KIND = Kind("files", re.compile(r"index\.db(-wal|-shm|-journal)?|file-[0-9a-z]+\.jsonl"))
_SCHEMA = """
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
"""
_PUT = """
INSERT INTO records (kind, id, owner, purpose, size, active, expires_s, body) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (id) DO UPDATE SET size = excluded.size, active = excluded.active, body = excluded.body
"""
# Checks and adds in one statement, so that those who add at once, also in other servers, do not pass the limits.
_ADD = """
INSERT INTO records (kind, id, owner, purpose, size, active, expires_s, body)
SELECT :kind, :id, :owner, :purpose, :size, :active, :expires_s, :body
WHERE (
    SELECT coalesce(sum(kind = 'file' OR active), 0) < :most AND coalesce(sum(size), 0) + :size <= :most_bytes
    FROM records WHERE kind = :kind AND owner = :owner
)
"""
_PAGE = """
SELECT body FROM records
WHERE kind = :kind AND owner = :owner AND (:purpose IS NULL OR purpose = :purpose)
AND (:after IS NULL OR number {sign} (SELECT number FROM records WHERE kind = :kind AND owner = :owner AND id = :after))
ORDER BY number {order} LIMIT :limit
"""
_WAIT_S = 10.0  # for another server that writes
_UPLOAD = re.compile(r"file-[0-9a-f]{32}")
_ABANDONED_S = 24 * 3600.0  # without a write, after which an upload has ended with its server
T = TypeVar("T")
_Kind = Literal["file", "batch"]


def _make(path: Path) -> None:
    """An empty file, unless there is one. Raises OSError for a link, which may lead to a file of others."""
    for beside in ("-wal", "-shm", "-journal"):  # files of SQLite's, which follows links
        if path.with_name(path.name + beside).is_symlink():
            raise OSError(f"{path.name}{beside} is a link")
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
    except OSError as error:
        why = "is a link" if error.errno == errno.ELOOP else error.strerror
        raise OSError(f"{path.name} {why}") from None


class FileStore:
    """`open` comes first and `close` last. Other methods raise APIError 503 when the disk fails."""

    def __init__(self, folder: str | None) -> None:
        """`folder`: TEMPORARY for one that ends with the server; None: no files are kept, and APIError 501 says so."""
        self._given = folder
        self._temporary: OwnedFolder | None = None
        self._thread = ThreadPoolExecutor(1, "files")

    @property
    def is_offered(self) -> bool:
        return self._given is not None

    def check(self) -> None:
        if not self.is_offered:
            message = "This server keeps no files, so it has no batches: see --files-dir."
            raise APIError(message, status=501, type="server_error", code="files_not_offered")

    async def open(self) -> None:
        """Raises ValueError."""
        if self._given is None:
            return
        try:
            await self._in(self._open)
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"--files-dir {self._given} cannot be used: {error}") from None

    def _open(self) -> None:
        if self._given == TEMPORARY:
            self._temporary = make_temporary(_KIND, logger.warning)
            self._folder = self._temporary.path
        else:
            self._folder = Path(str(self._given))
            self._folder.mkdir(0o700, parents=True, exist_ok=True)
        index = self._folder / "index.db"
        _make(index)
        self._table = sqlite3.connect(index, _WAIT_S, isolation_level=None, check_same_thread=False)
        self._table.execute("PRAGMA journal_mode = WAL")
        self._table.executescript(_SCHEMA)
        if self._temporary is None:
            self._remove_abandoned()

    def _remove_abandoned(self) -> None:
        """Uploads of servers that were killed: they have no record. Another server may write its own meanwhile."""
        uploads = [path for path in self._folder.glob("file-*.jsonl") if _UPLOAD.fullmatch(path.stem)]
        known = {row[0] for row in self._table.execute("SELECT id FROM records WHERE kind = 'file'")}
        for path in uploads:
            with contextlib.suppress(FileNotFoundError):  # it was discarded meanwhile
                if path.stem not in known and time.time() - path.lstat().st_mtime > _ABANDONED_S:
                    path.unlink()

    async def close(self) -> None:
        if self.is_offered:
            await self._in(self._close)
        self._thread.shutdown(wait=False)

    def _close(self) -> None:
        if hasattr(self, "_table"):
            self._table.close()
        if self._temporary is not None:
            self._temporary.remove(logger.warning)

    def path(self, file_id: str) -> Path:
        """Of the content. `file_id` is one that the store knows or makes."""
        return self._folder / f"{file_id}.jsonl"

    def new(self, file_id: str) -> Path:
        """The path of a content that may be there already. Only the server's user can read it."""
        path = self.path(file_id)
        path.touch(0o600)
        return path

    async def put_file(self, file: FileObject, owner: str) -> None:
        row = ("file", file.id, owner, file.purpose, file.bytes, 0, file.expires_at, msgspec.json.encode(file))
        await self._do(self._execute, _PUT, row)

    async def put_batch(self, batch: BatchObject, owner: str) -> None:
        active = batch.status not in TERMINAL
        row = ("batch", batch.id, owner, batch.endpoint, 0, int(active), None, msgspec.json.encode(batch))
        await self._do(self._execute, _PUT, row)

    async def add_file(self, file: FileObject, owner: str, most: int, most_bytes: int) -> bool:
        """False if the owner would then have more files or bytes than that."""
        row = {"kind": "file", "id": file.id, "owner": owner, "purpose": file.purpose, "size": file.bytes, "active": 0}
        limits = {"most": most, "most_bytes": most_bytes}
        body = msgspec.json.encode(file)
        return await self._do(self._add, {**row, **limits, "expires_s": file.expires_at, "body": body})

    async def add_batch(self, batch: BatchObject, owner: str, most: int) -> bool:
        """Adds a new batch. False if the owner has that many batches that have not ended."""
        row = {"kind": "batch", "id": batch.id, "owner": owner, "purpose": batch.endpoint, "size": 0, "active": 1}
        limits = {"most": most, "most_bytes": 0}
        return await self._do(self._add, {**row, **limits, "expires_s": None, "body": msgspec.json.encode(batch)})

    def _add(self, row: dict[str, Any]) -> bool:
        return self._table.execute(_ADD, row).rowcount == 1

    async def file(self, file_id: str, owner: str) -> FileObject | None:
        return await self._one("file", file_id, owner, FileObject)

    async def batch(self, batch_id: str, owner: str) -> BatchObject | None:
        return await self._one("batch", batch_id, owner, BatchObject)

    async def _one(self, kind: _Kind, record_id: str, owner: str, type: type[T]) -> T | None:
        select = "SELECT body FROM records WHERE kind = ? AND id = ? AND owner = ?"
        rows = await self._do(self._execute, select, (kind, record_id, owner))
        return msgspec.json.decode(rows[0][0], type=type) if rows else None

    async def page(
        self,
        kind: _Kind,
        owner: str,
        type: type[T],
        limit: int,
        *,
        purpose: str | None = None,
        after: str | None = None,
        ascending: bool = False,
    ) -> list[T]:
        """The newest first, unless `ascending`."""
        sign, order = (">", "ASC") if ascending else ("<", "DESC")
        values = {"kind": kind, "owner": owner, "purpose": purpose, "after": after, "limit": limit}
        rows = await self._do(self._execute, _PAGE.format(sign=sign, order=order), values)
        return [msgspec.json.decode(body, type=type) for (body,) in rows]

    async def use(self, kind: _Kind, owner: str) -> tuple[int, int, int]:
        """How many there are, how many of them are active, and their bytes."""
        sums = "count(*), coalesce(sum(active), 0), coalesce(sum(size), 0)"
        select = f"SELECT {sums} FROM records WHERE kind = ? AND owner = ?"
        ((count, active, size),) = await self._do(self._execute, select, (kind, owner))
        return count, active, size

    async def unfinished(self) -> list[tuple[str, BatchObject]]:
        """The batches that have not ended, with their owners, the oldest first."""
        select = "SELECT owner, body FROM records WHERE kind = 'batch' AND active ORDER BY number"
        rows = await self._do(self._execute, select, ())
        return [(owner, msgspec.json.decode(body, type=BatchObject)) for owner, body in rows]

    async def delete_file(self, file_id: str, owner: str) -> bool:
        """Whether it was there."""
        return await self._do(self._delete, file_id, owner)

    def _delete(self, file_id: str, owner: str) -> bool:
        delete = "DELETE FROM records WHERE kind = 'file' AND id = ? AND owner = ?"
        deleted = self._table.execute(delete, (file_id, owner)).rowcount == 1
        if deleted:
            self.path(file_id).unlink(missing_ok=True)
        return deleted

    async def expired(self, now_s: float) -> list[tuple[str, str]]:
        """The files whose time is over, with their owners."""
        select = "SELECT id, owner FROM records WHERE kind = 'file' AND expires_s < ?"
        return await self._do(self._execute, select, (now_s,))

    def _execute(self, query: str, values: tuple[Any, ...] | dict[str, Any]) -> list[Any]:
        return self._table.execute(query, values).fetchall()

    async def _do(self, work: Callable[..., T], *args: Any) -> T:
        self.check()
        try:
            return await self._in(work, *args)
        except (sqlite3.Error, OSError) as error:
            raise storage_failed(error) from error

    async def _in(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *args))

    def discard(self, file_id: str) -> None:
        """Removes a content that no record names."""
        with contextlib.suppress(OSError):
            self.path(file_id).unlink()


def storage_failed(error: Exception) -> APIError:
    return unavailable(f"The stored files cannot be reached: {error}.", code="storage_unavailable")
