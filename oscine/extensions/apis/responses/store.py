"""The store of responses between requests: SQLite, in threads of its own, so that the event loop never waits.

Responses and items are bytes here, with ids, sizes and ages. Once `put` has returned, a response survives the death of
every process. A file is read in one thread and written in another. So readers wait neither for writers nor for other
servers that write.
"""

import asyncio
import fcntl
import logging
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, ParamSpec, Protocol, TypeVar

import msgspec

from oscine.api.common.errors import unavailable
from oscine.extensions.apis.compaction.seal import Seal
from oscine.extensions.apis.responses.conversation_store import SCHEMA as CONVERSATIONS
from oscine.extensions.apis.responses.conversation_store import ConversationTables

logger = logging.getLogger(__name__)

MEMORY = ":memory:"
WRITE_S = 5.0  # after which a write has failed
_RUNNERS = "-runners"  # suffix of the file beside the database that shows which servers live
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
CREATE TABLE IF NOT EXISTS secrets (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
"""
_SECRET = "compaction"  # name of the secret that signs compacted conversations
_OWNERS = "ALTER TABLE responses ADD COLUMN owner TEXT NOT NULL DEFAULT ''"  # older databases lack it
_COLUMNS = "id, owner, previous, created_s, runner IS NOT NULL, body, input, events"  # as in StoredResponse
_ONE = f"SELECT {_COLUMNS} FROM responses WHERE id = ? AND owner = ?"
_CHAIN = f"""
WITH RECURSIVE chain (id, before, depth) AS (
    SELECT id, previous, 0 FROM responses WHERE id = ?1 AND owner = ?2
    UNION ALL
    SELECT r.id, r.previous, depth + 1 FROM responses r JOIN chain ON r.id = chain.before WHERE r.owner = ?2
)
SELECT {_COLUMNS} FROM chain JOIN responses USING (id) ORDER BY depth DESC
"""
_DELETE = "DELETE FROM responses WHERE id = ? RETURNING size"
_SIZE = "SELECT (SELECT coalesce(sum(size), 0) FROM responses) + (SELECT coalesce(sum(size), 0) FROM conversations)"
_LEAST_USED = """
SELECT id, owner, used_s, 0 FROM (SELECT * FROM responses WHERE runner IS NULL ORDER BY used_s LIMIT 1)
UNION ALL
SELECT id, owner, used_s, 1 FROM (SELECT * FROM conversations ORDER BY used_s LIMIT 1)
ORDER BY used_s LIMIT 1
"""
_ITEM = """
SELECT i.id, i.body FROM items i JOIN responses r ON r.id = i.response
WHERE i.id = ? AND r.owner = ? AND r.created_s >= ? ORDER BY r.created_s LIMIT 1
"""

Item = tuple[str, bytes]  # id and JSON
T = TypeVar("T")
P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class StoredResponse:
    id: str
    owner: str  # the only owner for which it is found
    previous: str | None  # the response whose conversation this one continues
    created_s: float  # Unix time
    running: bool
    body: bytes  # the response as JSON, with all that an `include` may ask for
    input: bytes  # its own input items as a JSON list
    events: bytes | None = None  # of a response that ran in the background, as they were streamed


class Memory(Protocol):
    """Responses that are not stored, and can be continued for a while."""

    def chain(self, response_id: str) -> list[StoredResponse]:
        """The response and those before it, the oldest first, as far as they are here."""
        ...

    def keep(self, response: StoredResponse) -> None: ...


class ResponseStore:
    """One database. All methods raise APIError 503 when it cannot be reached."""

    def __init__(self, path: str, max_bytes: int, max_age_s: float) -> None:
        """`path` may be MEMORY. When the responses outgrow `max_bytes`, the least recently used ones are deleted
        first."""
        self._path, self._database = path, _Database(path, max_bytes, max_age_s)
        self._writer = ThreadPoolExecutor(1, "responses-writer")
        self._reader = ThreadPoolExecutor(1, "responses-reader") if path != MEMORY else self._writer

    async def open(self, interrupted: Callable[[bytes], bytes]) -> None:
        """`interrupted` changes the body of a response that ran when its server died. Raises ValueError."""
        try:
            await _in(self._writer, self._database.open, interrupted)
        except (sqlite3.Error, OSError) as error:
            raise ValueError(f"--responses-db {self._path} cannot be used: {error}") from None

    @property
    def seal(self) -> Seal:
        """Of compacted conversations, the same for all servers that share the database. The store is open."""
        return Seal(self._database.secret)

    async def close(self) -> None:
        """Closes the store, even if it was not opened or not completely."""
        await _in(self._reader, int)  # the end of all reads before
        await _in(self._writer, self._database.close)
        for thread in (self._reader, self._writer):
            thread.shutdown(wait=False)

    async def put(self, response: StoredResponse, items: Sequence[Item]) -> None:
        """Keeps a response, or replaces it. `items`: of its input and output, for references to them."""
        await self._write(self._database.put, response, items)

    async def get(self, response_id: str, owner: str) -> StoredResponse | None:
        return next(iter(await self._read(self._database.get, _ONE, response_id, owner)), None)

    async def chain(self, response_id: str, owner: str) -> list[StoredResponse]:
        """The response and all earlier ones of its conversation, the oldest first. If the oldest has a `previous`, that
        one is lost."""
        found = await self._read(self._database.get, _CHAIN, response_id, owner)
        self._writer.submit(self._database.mark_used, [response.id for response in found])
        return found

    async def items(self, ids: Sequence[str], owner: str) -> dict[str, bytes]:
        """The items that are kept, by id. An item of several responses is returned as the first of them has it."""
        return await self._read(self._database.items, ids, owner)

    async def delete(self, response_id: str, owner: str) -> bool:
        """Deletes a response. Returns whether it existed."""
        return await self._write(self._database.delete, response_id, owner)

    async def read_conversation(self, work: Callable[[ConversationTables, sqlite3.Connection], T]) -> T:
        return await self._read(self._database.read_conversation, work)

    async def write_conversation(self, work: Callable[[ConversationTables, sqlite3.Connection], int | None]) -> bool:
        """Runs one of the methods of ConversationTables that change the database. Returns whether it did."""
        return await self._write(self._database.write_conversation, work)

    async def _read(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        with _unreachable():
            return await _in(self._reader, work, *args, **kwargs)

    async def _write(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a write, which waits at most WRITE_S in all for a lock and for the writes before it."""
        deadline_s = time.monotonic() + WRITE_S

        def write() -> T:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise sqlite3.OperationalError("the writes before it took too long")
            self._database.wait_for_locks(left_s)
            return work(*args, **kwargs)

        with _unreachable():
            return await _in(self._writer, write)


class _Database:
    """The tables. `get` and `items` run in the store's thread for reads, all other methods in the one for writes."""

    def __init__(self, path: str, max_bytes: int, max_age_s: float) -> None:
        self._path, self._max_bytes, self._max_age_s = path, max_bytes, max_age_s
        self._open_files: list[sqlite3.Connection | BinaryIO] = []
        self._runner = secrets.randbits(60)
        self._conversations = ConversationTables(max_age_s)
        self._size = 0  # bytes of all responses and conversations

    def open(self, interrupted: Callable[[bytes], bytes]) -> None:
        if self._path != MEMORY:
            Path(self._path).parent.mkdir(0o700, parents=True, exist_ok=True)
            Path(self._path).touch(0o600)
        self._db = self._connect()
        self._db.execute("PRAGMA schema_version")  # fails for a file that is not a database, and leaves it unchanged
        if self._path != MEMORY:
            Path(self._path + _RUNNERS).touch(0o600)
            for suffix in ("", "-wal", "-shm", _RUNNERS):
                _make_private(Path(self._path + suffix))
        # NORMAL in WAL mode: what is committed survives the process; a power cut may cost the last moments.
        for pragma in ("auto_vacuum = INCREMENTAL", "journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.executescript(_SCHEMA + CONVERSATIONS)
        _add_owners(self._db)
        self.secret = _secret(self._db)
        self._reads = self._db if self._path == MEMORY else self._connect()
        if self._path != MEMORY:
            runners = Path(self._path + _RUNNERS).open("wb")  # noqa: SIM115
            self._open_files.append(runners)
            fcntl.lockf(runners, fcntl.LOCK_EX, 1, self._runner)
            self._end_interrupted(runners, interrupted)
        (self._size,) = self._db.execute(_SIZE).fetchone()
        self._make_room()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, WRITE_S, isolation_level=None, check_same_thread=False)
        self._open_files.append(connection)
        return connection

    def _end_interrupted(self, runners: BinaryIO, interrupted: Callable[[bytes], bytes]) -> None:
        running = self._db.execute("SELECT id, runner, body FROM responses WHERE runner IS NOT NULL").fetchall()
        for response_id, runner, body in running:
            if not _is_alive(runners, runner):
                ended = (interrupted(body), response_id)
                self._db.execute("UPDATE responses SET runner = NULL, body = ? WHERE id = ?", ended)

    def close(self) -> None:
        for file in self._open_files:
            file.close()

    def wait_for_locks(self, at_most_s: float) -> None:
        """Sets the longest wait of later statements."""
        self._db.execute(f"PRAGMA busy_timeout = {at_most_s * 1000:.0f}")

    def put(self, response: StoredResponse, items: Sequence[Item]) -> None:
        size = len(response.body) + len(response.input) + len(response.events or b"") + sum(len(b) for _, b in items)
        runner = self._runner if response.running else None
        row = (response.id, response.previous, response.created_s, time.time(), size, runner)
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            freed = self._db.execute(_DELETE, (response.id,)).fetchone()
            values = (*row, response.body, response.input, response.events, response.owner)
            self._db.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
            for item_id, body in items:
                self._db.execute("INSERT OR REPLACE INTO items VALUES (?, ?, ?)", (item_id, response.id, body))
        self._size += size - (freed[0] if freed else 0)
        self._try_to_make_room()

    def read_conversation(self, work: Callable[[ConversationTables, sqlite3.Connection], T]) -> T:
        return work(self._conversations, self._reads)

    def write_conversation(self, work: Callable[[ConversationTables, sqlite3.Connection], int | None]) -> bool:
        self._db.execute("BEGIN IMMEDIATE")
        with self._db:
            grown = work(self._conversations, self._db)
        self._size += grown or 0
        self._try_to_make_room()
        return grown is not None

    def _try_to_make_room(self) -> None:
        try:
            self._make_room()
        except sqlite3.Error:
            logger.exception("old responses could not be removed")

    def _forget(self, response_id: str) -> bool:
        freed = self._db.execute(_DELETE, (response_id,)).fetchone()
        self._size -= freed[0] if freed else 0
        return freed is not None

    def _make_room(self) -> None:
        old = "SELECT id FROM responses WHERE runner IS NULL AND created_s < ?"
        for (response_id,) in self._db.execute(old, (self._oldest_s(),)).fetchall():
            self._forget(response_id)
        unused = "SELECT id, owner FROM conversations WHERE used_s < ?"
        for conversation_id, owner in self._db.execute(unused, (self._oldest_s(),)).fetchall():
            self._size += self._conversations.delete(self._db, conversation_id, owner) or 0
        while self._size > self._max_bytes and (found := self._db.execute(_LEAST_USED).fetchone()):
            if found[3]:
                self._size += self._conversations.delete(self._db, *found[:2]) or 0
            else:
                self._forget(found[0])
        self._shrink()

    def _shrink(self) -> None:
        """Gives free pages of the file back."""
        self._db.executescript("PRAGMA incremental_vacuum")  # `execute` would stop after one page

    def _oldest_s(self) -> float:
        return time.time() - self._max_age_s

    def get(self, query: str, response_id: str, owner: str) -> list[StoredResponse]:
        found = [StoredResponse(*row) for row in self._reads.execute(query, (response_id, owner)).fetchall()]
        return [response for response in found if response.running or response.created_s >= self._oldest_s()]

    def mark_used(self, ids: Sequence[str]) -> None:
        """Marks a whole chain, so that a long conversation does not lose its oldest responses first."""
        used = "UPDATE responses SET used_s = ? WHERE id IN (SELECT value FROM json_each(?))"
        try:
            self.wait_for_locks(0)
            self._db.execute(used, (time.time(), msgspec.json.encode(ids).decode()))
        except sqlite3.Error as error:
            logger.warning("the time of use of a response was not stored: %s", error)

    def items(self, ids: Sequence[str], owner: str) -> dict[str, bytes]:
        found = (self._reads.execute(_ITEM, (item_id, owner, self._oldest_s())).fetchone() for item_id in ids)
        return dict(row for row in found if row is not None)

    def delete(self, response_id: str, owner: str) -> bool:
        mine = self._db.execute("SELECT 1 FROM responses WHERE id = ? AND owner = ?", (response_id, owner)).fetchone()
        deleted = mine is not None and self._forget(response_id)
        self._shrink()
        return deleted


def _secret(db: sqlite3.Connection) -> bytes:
    db.execute("INSERT OR IGNORE INTO secrets VALUES (?, ?)", (_SECRET, secrets.token_bytes(32)))
    (value,) = db.execute("SELECT value FROM secrets WHERE name = ?", (_SECRET,)).fetchone()
    return bytes(value)


def _add_owners(db: sqlite3.Connection) -> None:
    if _has_owners(db):
        return
    db.execute("BEGIN IMMEDIATE")
    with db:
        if not _has_owners(db):  # another server may have added them meanwhile
            db.execute(_OWNERS)


def _has_owners(db: sqlite3.Connection) -> bool:
    return ("owner",) in db.execute("SELECT name FROM pragma_table_info('responses')").fetchall()


def _is_alive(runners: BinaryIO, runner: int) -> bool:
    """A server locks one byte of a file for as long as it lives, so that others on its machine can tell."""
    try:
        fcntl.lockf(runners, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, runner)
    except OSError:
        return True
    fcntl.lockf(runners, fcntl.LOCK_UN, 1, runner)
    return False


async def _in(thread: ThreadPoolExecutor, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await asyncio.get_running_loop().run_in_executor(thread, partial(work, *args, **kwargs))


@contextmanager
def _unreachable() -> Iterator[None]:
    """Turns errors of the database into APIError 503."""
    try:
        yield
    except sqlite3.Error as error:
        message = f"The stored responses cannot be reached: {error}."
        raise unavailable(message, code="storage_unavailable") from error


def _make_private(path: Path) -> None:
    """Makes a file accessible to the server's user only. It is not opened: closing it would end SQLite's locks."""
    try:
        path.chmod(0o600)
    except FileNotFoundError:
        return
    except PermissionError as error:  # the file of another user, or a file system without modes
        logger.warning("--responses-db: %s may be read by other users: %s", path, error.strerror)
