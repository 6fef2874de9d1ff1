"""Conversations in the database of responses: items in their order, kept by owner."""

import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from oscine.api.common import deleted_rows
from oscine.api.common.paging import Listing, PageQuery

SCHEMA = f"""
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    created_s REAL NOT NULL,
    used_s REAL NOT NULL,
    size INTEGER NOT NULL,
    metadata BLOB NOT NULL,
    state BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS conversations_by_use ON conversations (used_s);
CREATE TABLE IF NOT EXISTS conversation_items (
    place INTEGER PRIMARY KEY AUTOINCREMENT,
    conversation TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
    id TEXT NOT NULL,
    body BLOB NOT NULL,
    UNIQUE (conversation, id)
);
{deleted_rows.SCHEMA}
"""
_GET = "SELECT id, created_s, size, metadata, state FROM conversations WHERE id = ? AND owner = ? AND used_s >= ?"
_OF_ITEMS = "FROM conversation_items WHERE conversation = :conversation"
_ITEMS = f"SELECT body {_OF_ITEMS}"
_BASE = 256  # bytes that a conversation without items counts

Item = tuple[str, bytes]  # id and JSON


@dataclass(frozen=True, slots=True)
class StoredConversation:
    id: str
    created_s: float  # Unix time
    size: int  # bytes of its items
    metadata: dict[str, str]
    state: bytes  # of the built-in tools after its last response, as JSON


class ConversationTables:
    """What is done in the database. Methods that change it return by how many bytes it grows, or None: there is no such
    conversation. The caller holds the transaction, and none finds what is of another owner."""

    def __init__(self, max_age_s: float) -> None:
        self._max_age_s = max_age_s

    def create(self, db: sqlite3.Connection, conversation_id: str, owner: str, metadata: Mapping[str, str]) -> int:
        now_s = time.time()
        row = (conversation_id, owner, now_s, now_s, _BASE, msgspec.json.encode(metadata), b"{}")
        db.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        return _BASE

    def get(self, db: sqlite3.Connection, conversation_id: str, owner: str) -> StoredConversation | None:
        row = db.execute(_GET, (conversation_id, owner, time.time() - self._max_age_s)).fetchone()
        if row is None:
            return None
        found_id, created_s, size, metadata, state = row
        return StoredConversation(found_id, created_s, size, msgspec.json.decode(metadata, type=dict[str, str]), state)

    def describe(
        self, db: sqlite3.Connection, conversation_id: str, owner: str, metadata: Mapping[str, str]
    ) -> int | None:
        changed = (msgspec.json.encode(metadata), conversation_id, owner)
        done = db.execute("UPDATE conversations SET metadata = ? WHERE id = ? AND owner = ?", changed)
        return 0 if done.rowcount else None

    def append(
        self,
        db: sqlite3.Connection,
        conversation_id: str,
        owner: str,
        items: Sequence[Item],
        state: bytes | None = None,
    ) -> int | None:
        """Adds items at the end; one whose id is there stays as it is."""
        if self.get(db, conversation_id, owner) is None:
            return None
        add = "INSERT OR IGNORE INTO conversation_items (conversation, id, body) VALUES (?, ?, ?)"
        grown = sum(len(body) for item_id, body in items if db.execute(add, (conversation_id, item_id, body)).rowcount)
        used = "UPDATE conversations SET size = size + ?, used_s = ?, state = coalesce(?, state) WHERE id = ?"
        db.execute(used, (grown, time.time(), state, conversation_id))
        return grown

    def items(self, db: sqlite3.Connection, conversation_id: str) -> list[bytes]:
        rows = db.execute(f"{_ITEMS} ORDER BY place", {"conversation": conversation_id}).fetchall()
        return [body for (body,) in rows]

    def item(self, db: sqlite3.Connection, conversation_id: str, item_id: str) -> bytes | None:
        row = db.execute(f"{_ITEMS} AND id = :id", {"conversation": conversation_id, "id": item_id}).fetchone()
        return None if row is None else row[0]

    def page(self, db: sqlite3.Connection, conversation_id: str, page: PageQuery) -> list[bytes]:
        """At most one item more than the limit of the page. Raises APIError 400 for an unknown `after` or `before`."""
        listing = Listing(conversation_id, _ITEMS, f"SELECT place {_OF_ITEMS} AND id = :id", "place")
        return [body for (body,) in listing.page(db.execute, {"conversation": conversation_id}, page)]

    def ids(self, db: sqlite3.Connection, conversation_id: str) -> set[str]:
        """Of its items."""
        rows = db.execute(f"SELECT id {_OF_ITEMS}", {"conversation": conversation_id})
        return {item_id for (item_id,) in rows}

    def remove(self, db: sqlite3.Connection, conversation_id: str, owner: str, item_id: str) -> int | None:
        if self.get(db, conversation_id, owner) is None:
            return None
        gone = "DELETE FROM conversation_items WHERE conversation = ? AND id = ? RETURNING length(body), place"
        row = db.execute(gone, (conversation_id, item_id)).fetchone()
        if row is None:
            return None
        size, place = row
        deleted_rows.remember(db.execute, conversation_id, item_id, place)
        db.execute("UPDATE conversations SET size = size - ? WHERE id = ?", (size, conversation_id))
        return -int(size)

    def delete(self, db: sqlite3.Connection, conversation_id: str, owner: str) -> int | None:
        row = db.execute(
            "DELETE FROM conversations WHERE id = ? AND owner = ? RETURNING size", (conversation_id, owner)
        ).fetchone()
        return None if row is None else -int(row[0])
