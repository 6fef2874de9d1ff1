"""Vector stores: what their tables say of each."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from oscine.api.common.paging import Listing, PageQuery
from oscine.extensions.file_search.schemas.objects import ExpiresAfter, FileCounts, VectorStore
from oscine.extensions.file_search.storage.database import Database

_DAY_S = 86_400
STATUSES = ("in_progress", "completed", "failed", "cancelled")
COUNTS = ", ".join(f"coalesce(sum(status = '{status}'), 0)" for status in STATUSES)  # fields of FileCounts
_WORDS = "CREATE VIRTUAL TABLE words_{0} USING fts5(text, content='', tokenize='porter unicode61')"
_STORES = f"""
SELECT s.number, s.id, s.name, s.description, s.metadata, s.created_s, s.active_s, s.expires_days,
    (SELECT coalesce(sum(size), 0) FROM files WHERE store = s.number AND NOT gone),
    (SELECT json_array({COUNTS}) FROM files WHERE store = s.number AND NOT gone)
FROM stores s WHERE owner = :owner AND NOT gone
"""


class StoreRow(NamedTuple):
    number: int  # of the store in the tables
    shown: VectorStore

    @property
    def is_expired(self) -> bool:
        return self.shown.status == "expired"


def counts_of(counts: Sequence[int]) -> FileCounts:
    """`counts`: those of COUNTS."""
    in_progress, completed, failed, cancelled = counts
    return FileCounts(in_progress, completed, failed, cancelled, sum(counts))


def stores_of(owner: str) -> str:
    """The name of their list, for deleted_rows."""
    return f"stores of {owner}"


class FullError(Exception):
    """A limit is reached. The message says which."""


class Stores:
    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, store_id: str, owner: str, fields: dict[str, Any], most: int) -> int:
        """The number of a new store. `fields`: columns. Raises FullError if the owner would have more than `most`."""
        row = {"id": store_id, "owner": owner, "created_s": self._db.now, "active_s": self._db.now, **fields}
        with self._db.transaction():
            ((count,),) = self._db.rows("SELECT count(*) FROM stores WHERE owner = ? AND NOT gone", (owner,))
            if count >= most:
                raise FullError(f"There are {most} vector stores, as many as a key may have. Delete some.")
            names, places = ", ".join(row), ", ".join(f":{name}" for name in row)
            ((number,),) = self._db.rows(f"INSERT INTO stores ({names}) VALUES ({places}) RETURNING number", row)
            self._db.execute(_WORDS.format(number))
        return int(number)

    def find(self, store_id: str, owner: str) -> StoreRow | None:
        rows = self._db.rows(f"{_STORES} AND id = :id", {"owner": owner, "id": store_id})
        return self._store_row(rows[0]) if rows else None

    def page(self, owner: str, page: PageQuery) -> list[VectorStore]:
        """At most one more than the limit of the page. Raises APIError 400 for an unknown `after` or `before`."""
        listing = Listing(stores_of(owner), _STORES, "SELECT number FROM stores WHERE owner = :owner AND id = :id")
        rows = listing.page(self._db.execute, {"owner": owner}, page)
        return [self._store_row(row).shown for row in rows]

    def change(self, number: int, **fields: Any) -> None:
        """`fields`: columns."""
        changes = ", ".join(f"{name} = :{name}" for name in fields)
        self._db.execute(f"UPDATE stores SET {changes} WHERE number = :number", {**fields, "number": number})

    def touch(self, number: int) -> None:
        """The store is in use now. At most once a minute it costs a transaction."""
        update = "UPDATE stores SET active_s = :now WHERE number = :number AND active_s < :now - 60"
        self._db.execute(update, {"number": number, "now": self._db.now})

    def _store_row(self, row: Sequence[Any]) -> StoreRow:
        number, store_id, name, about, metadata, created_s, active_s, days, size, counts = row
        files = counts_of(msgspec.json.decode(counts))
        expires_s = None if days is None else active_s + days * _DAY_S
        expired = expires_s is not None and expires_s <= self._db.now
        shown = VectorStore(
            id=store_id,
            created_at=created_s,
            name=name,
            description=about,
            usage_bytes=size,
            file_counts=files,
            status="expired" if expired else "in_progress" if files.in_progress else "completed",
            expires_after=None if days is None else ExpiresAfter(days, "last_active_at"),
            expires_at=expires_s,
            last_active_at=active_s,
            metadata=msgspec.json.decode(metadata),
        )
        return StoreRow(number, shown)

    def mark(self, number: int) -> None:
        """Deletes a store, but for the chunks of its files."""
        with self._db.transaction():
            self._db.execute("UPDATE stores SET gone = 1 WHERE number = ?", (number,))
            self._db.execute("UPDATE files SET gone = 1 WHERE store = ?", (number,))
            self._db.execute("DELETE FROM batches WHERE store = ?", (number,))
            self._db.execute(f"DROP TABLE IF EXISTS words_{number}")

    def mark_expired(self) -> None:
        """The files of stores whose time is over."""
        over = "active_s + expires_days * 86400 <= ?"
        update = f"UPDATE files SET gone = 1 WHERE NOT gone AND store IN (SELECT number FROM stores WHERE {over})"
        self._db.execute(update, (self._db.now,))
