"""The tables of vector stores in SQLite, and a connection to them. All SQL of file search is in this folder.

The words of a store are an FTS5 table of its own, so that no other store changes its scores. The number of a chunk is
that of its file times 2**20, plus its place in the file. Deleted files and stores are marked `gone`: nothing shows them
any more, and Chunks.sweep removes them in short transactions.
"""

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from oscine.api.common import deleted_rows
from oscine.extensions.apis.batches.records import make_private
from oscine.extensions.file_search.storage.words import spaced

PLACE_BITS = 20  # of a chunk's number: its place in the file
_WAIT_S = 30.0  # for another connection that writes

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS stores (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    name TEXT NOT NULL,
    description TEXT,
    metadata BLOB NOT NULL,
    created_s INTEGER NOT NULL,
    active_s INTEGER NOT NULL,
    expires_days INTEGER,
    gone INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX IF NOT EXISTS stores_by_owner ON stores (owner, number);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    store INTEGER NOT NULL,
    created_s INTEGER NOT NULL,
    cancelled INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    store INTEGER NOT NULL,
    batch INTEGER,
    id TEXT NOT NULL,
    filename TEXT NOT NULL,
    status TEXT NOT NULL DEFAULT 'in_progress',
    attributes TEXT NOT NULL,
    created_s INTEGER NOT NULL,
    chunk_tokens INTEGER NOT NULL,
    overlap_tokens INTEGER NOT NULL,
    chunks INTEGER NOT NULL DEFAULT 0,
    size INTEGER NOT NULL DEFAULT 0,  -- bytes of its chunks and vectors
    error_code TEXT,
    error TEXT,
    gone INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX IF NOT EXISTS files_by_id ON files (store, id) WHERE NOT gone;
CREATE INDEX IF NOT EXISTS files_by_store ON files (store, number);
CREATE INDEX IF NOT EXISTS files_by_uploaded ON files (id);
CREATE INDEX IF NOT EXISTS files_waiting ON files (number) WHERE status = 'in_progress' AND NOT gone;
CREATE INDEX IF NOT EXISTS files_gone ON files (number) WHERE gone;
CREATE TABLE IF NOT EXISTS chunks (number INTEGER PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS vectors (first INTEGER PRIMARY KEY, model TEXT NOT NULL, body BLOB NOT NULL);
{deleted_rows.SCHEMA}
"""  # a row of `vectors` has those of consecutive chunks, `first` and the following ones


class Database:
    """One connection. Each thread has its own; another one may close it."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        make_private(path)
        self._clock = clock
        self._db = sqlite3.connect(path, _WAIT_S, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.create_function("spaced", 1, spaced, deterministic=True)
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def transaction(self, *, writes: bool = True) -> Iterator[None]:
        """What is read within it is one state of the database."""
        self._db.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise

    def rows(self, query: str, values: Sequence[Any] | dict[str, Any] = ()) -> list[Any]:
        return self._db.execute(query, values).fetchall()

    def execute(self, query: str, values: Sequence[Any] | dict[str, Any] = ()) -> sqlite3.Cursor:
        return self._db.execute(query, values)

    def execute_each(self, query: str, values: Iterable[Sequence[Any]]) -> None:
        self._db.executemany(query, values)

    @property
    def now(self) -> int:
        return int(self._clock())
