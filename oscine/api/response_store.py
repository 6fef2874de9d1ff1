"""Where responses are kept between requests: SQLite, in a thread of its own, so that the event loop never waits.

Knows ids, sizes and ages; what a response or an item says is bytes to it. A response that is kept survives the death of
every process the moment `put` has returned.
"""

import asyncio
import fcntl
import logging
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

logger = logging.getLogger(__name__)

MEMORY = ":memory:"
_RUNNERS = "-runners"  # beside the database: which servers live
_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    previous TEXT,
    created_s REAL NOT NULL,
    used_s REAL NOT NULL,
    size INTEGER NOT NULL,
    runner INTEGER,          -- the server in which it runs; NULL when it is over
    body BLOB NOT NULL,
    input BLOB NOT NULL,
    events BLOB,
    owner TEXT NOT NULL DEFAULT ''
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (used_s);
CREATE TABLE IF NOT EXISTS items (
    id TEXT NOT NULL,
    response TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
    body BLOB NOT NULL,
    PRIMARY KEY (id, response)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS items_by_response ON items (response);
"""
_OWNERS = "ALTER TABLE responses ADD COLUMN owner TEXT NOT NULL DEFAULT ''"  # older databases lack it
_COLUMNS = "id, owner, previous, created_s, runner, body, input, events"
_ONE = f"SELECT {_COLUMNS} FROM responses WHERE id = ? AND owner = ?"
_CHAIN = f"""
WITH RECURSIVE chain (id, before, depth) AS (
    SELECT id, previous, 0 FROM responses WHERE id = ?1 AND owner = ?2
    UNION ALL
    SELECT r.id, r.previous, depth + 1 FROM responses r JOIN chain ON r.id = chain.before WHERE r.owner = ?2
)
SELECT {_COLUMNS} FROM chain JOIN responses USING (id) ORDER BY depth DESC
"""
_ITEM = """
SELECT i.id, i.body FROM items i JOIN responses r ON r.id = i.response
WHERE i.id = ? AND r.owner = ? AND r.created_s >= ? ORDER BY r.created_s LIMIT 1
"""

Item = tuple[str, bytes]  # id and JSON
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredResponse:
    id: str
    owner: str  # by whom alone it is found, and what it says
    previous: str | None  # the response whose conversation this one goes on with
    created_s: float  # Unix time
    running: bool
    body: bytes  # the response as JSON, with all that an `include` may ask for
    input: bytes  # its own input items as a JSON list
    events: bytes | None = None  # of a response that ran in the background, as they were streamed


class ResponseStore:
    """One database. Each method waits for its turn in the store's thread."""

    def __init__(self, path: str, max_bytes: int, max_age_s: float) -> None:
        """`path` may be MEMORY. When the responses outgrow `max_bytes`, those that were used longest ago go first."""
        self._path = path
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._runner = secrets.randbits(60)
        self._size = 0  # bytes of all responses
        self._open_files: list[sqlite3.Connection | BinaryIO] = []

    async def open(self, interrupted: Callable[[bytes], bytes]) -> None:
        """`interrupted` changes the body of a response that ran when its server died. Raises ValueError."""
        try:
            await self._run(lambda: self._open(interrupted))
        except (sqlite3.Error, OSError) as error:
            raise ValueError(f"--responses-db {self._path} cannot be used: {error}") from None

    async def close(self) -> None:
        await self._run(self._close)
        self._thread.shutdown(wait=False)

    async def put(self, response: StoredResponse, items: Sequence[Item]) -> None:
        """Keeps a response, or replaces it. `items` are those of its input and output, for references to them."""
        await self._run(lambda: self._put(response, items))

    async def get(self, response_id: str, owner: str) -> StoredResponse | None:
        found = await self._run(lambda: self._get(_ONE, response_id, owner))
        return found[0] if found else None

    async def chain(self, response_id: str, owner: str) -> list[StoredResponse]:
        """The response and all that it goes on with, the oldest first; what begins with a `previous` has lost it."""
        return await self._run(lambda: self._chain(response_id, owner))

    async def items(self, ids: Sequence[str], owner: str) -> dict[str, bytes]:
        """Those of the items that are kept; where several responses have one, as it was at first."""
        return await self._run(lambda: self._items(ids, owner))

    async def delete(self, response_id: str, owner: str) -> bool:
        """Whether there was one."""
        return await self._run(lambda: self._delete(response_id, owner))

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # ---- in the thread -----------------------------------------------------------------------------------------

    def _open(self, interrupted: Callable[[bytes], bytes]) -> None:
        if self._path != MEMORY:
            Path(self._path).parent.mkdir(0o700, parents=True, exist_ok=True)
            Path(self._path).touch(0o600)
        self._db = sqlite3.connect(self._path, isolation_level=None, timeout=30.0)
        self._open_files.append(self._db)
        self._db.execute("PRAGMA schema_version")  # fails for a file that is no database: that is left alone
        if self._path != MEMORY:
            Path(self._path + _RUNNERS).touch(0o600)
            for suffix in ("", "-wal", "-shm", _RUNNERS):
                _make_private(Path(self._path + suffix))
        # NORMAL in WAL mode: what is committed survives the process; a power cut may cost the last moments.
        for pragma in ("auto_vacuum = INCREMENTAL", "journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.executescript(_SCHEMA)
        self._upgrade()
        if self._path != MEMORY:
            self._runners = Path(self._path + _RUNNERS).open("wb")  # noqa: SIM115
            self._open_files.append(self._runners)
            fcntl.lockf(self._runners, fcntl.LOCK_EX, 1, self._runner)
            self._end_interrupted(interrupted)
        (self._size,) = self._db.execute("SELECT coalesce(sum(size), 0) FROM responses").fetchone()
        self._make_room()

    def _upgrade(self) -> None:
        if self._has_owners():
            return
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            if not self._has_owners():  # another server may have been quicker
                self._db.execute(_OWNERS)

    def _has_owners(self) -> bool:
        return any(column[1] == "owner" for column in self._db.execute("PRAGMA table_info(responses)"))

    def _end_interrupted(self, interrupted: Callable[[bytes], bytes]) -> None:
        running = self._db.execute("SELECT id, runner, body FROM responses WHERE runner IS NOT NULL").fetchall()
        for response_id, runner, body in running:
            if not self._is_alive(runner):
                ended = (interrupted(body), response_id)
                self._db.execute("UPDATE responses SET runner = NULL, body = ? WHERE id = ?", ended)

    def _is_alive(self, runner: int) -> bool:
        """A server locks one byte of a file for as long as it lives, so that others on its machine can tell."""
        try:
            fcntl.lockf(self._runners, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, runner)
        except OSError:
            return True
        fcntl.lockf(self._runners, fcntl.LOCK_UN, 1, runner)
        return False

    def _close(self) -> None:
        for file in self._open_files:
            file.close()

    def _put(self, response: StoredResponse, items: Sequence[Item]) -> None:
        size = len(response.body) + len(response.input) + len(response.events or b"") + sum(len(b) for _, b in items)
        runner = self._runner if response.running else None
        row = (response.id, response.previous, response.created_s, time.time(), size, runner)
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._forget(response.id)
            values = (*row, response.body, response.input, response.events, response.owner)
            self._db.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
            for item_id, body in items:
                self._db.execute("INSERT OR REPLACE INTO items VALUES (?, ?, ?)", (item_id, response.id, body))
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._size += size
        self._make_room()

    def _forget(self, response_id: str) -> bool:
        freed = self._db.execute("DELETE FROM responses WHERE id = ? RETURNING size", (response_id,)).fetchone()
        self._size -= freed[0] if freed else 0
        return freed is not None

    def _make_room(self) -> None:
        old = "SELECT id FROM responses WHERE runner IS NULL AND created_s < ?"
        for (response_id,) in self._db.execute(old, (self._oldest_s(),)).fetchall():
            self._forget(response_id)
        oldest = "SELECT id FROM responses WHERE runner IS NULL ORDER BY used_s LIMIT 1"
        while self._size > self._max_bytes and (found := self._db.execute(oldest).fetchone()):
            self._forget(found[0])
        self._shrink()

    def _shrink(self) -> None:
        """Gives free pages of the file back."""
        self._db.executescript("PRAGMA incremental_vacuum")  # `execute` would stop after one page

    def _oldest_s(self) -> float:
        return time.time() - self._max_age_s

    def _get(self, query: str, response_id: str, owner: str) -> list[StoredResponse]:
        rows = self._db.execute(query, (response_id, owner)).fetchall()
        found = [
            StoredResponse(id, owner, previous, created_s, runner is not None, body, input, events)
            for id, owner, previous, created_s, runner, body, input, events in rows
        ]
        return [response for response in found if response.running or response.created_s >= self._oldest_s()]

    def _chain(self, response_id: str, owner: str) -> list[StoredResponse]:
        """Marks them as used now: a long conversation is not forgotten from its begin."""
        found = self._get(_CHAIN, response_id, owner)
        ids = msgspec.json.encode([response.id for response in found]).decode()
        used = "UPDATE responses SET used_s = ? WHERE id IN (SELECT value FROM json_each(?))"
        self._db.execute(used, (time.time(), ids))
        return found

    def _items(self, ids: Sequence[str], owner: str) -> dict[str, bytes]:
        found = (self._db.execute(_ITEM, (item_id, owner, self._oldest_s())).fetchone() for item_id in ids)
        return {row[0]: row[1] for row in found if row is not None}

    def _delete(self, response_id: str, owner: str) -> bool:
        if not self._get(_ONE, response_id, owner):
            return False
        self._forget(response_id)
        self._shrink()
        return True


def _make_private(path: Path) -> None:
    """Takes a file from all users but the server's own. It is not opened: to close it would end SQLite's locks."""
    try:
        path.chmod(0o600)
    except FileNotFoundError:
        return
    except PermissionError as error:  # another user's, or a file system without modes
        logger.warning("--responses-db: %s may be read by other users: %s", path, error.strerror)
