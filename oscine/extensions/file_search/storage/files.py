"""Files of vector stores, and their batches."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from oscine.api.common.paging import Listing, PageQuery
from oscine.extensions.file_search.schemas.objects import (
    Attributes,
    FileStatus,
    LastError,
    StaticChunks,
    StaticStrategy,
    VectorStoreFile,
    VectorStoreFileBatch,
)
from oscine.extensions.file_search.storage.database import PLACE_BITS, Database
from oscine.extensions.file_search.storage.stores import COUNTS, FullError, StoreRow, counts_of

MAX_STORE_FILES = 10_000
_FILES = """
SELECT id, size, created_s, status, error_code, error, chunk_tokens, overlap_tokens, attributes
FROM files WHERE store = :store AND NOT gone
"""
USED = """
SELECT coalesce(sum(chunks), 0) FROM files
WHERE NOT gone AND store IN (SELECT number FROM stores WHERE owner = (SELECT owner FROM stores WHERE number = ?))
"""


def files_of(store: int) -> str:
    """The name of its list, for deleted_rows."""
    return f"files of {store}"


class NewFile(NamedTuple):
    id: str  # of the uploaded file
    filename: str
    attributes: Attributes
    chunks: StaticChunks


class Files:
    def __init__(self, db: Database) -> None:
        self._db = db

    def add(self, store: int, files: Sequence[NewFile], most_chunks: int, batch_id: str | None = None) -> None:
        """Files to be read, in a new batch if it has an id. They replace those with the same ids. Raises FullError."""
        now = self._db.now
        with self._db.transaction():
            self._check_room(store, len(files), most_chunks)
            batch = None
            if batch_id is not None:
                insert = "INSERT INTO batches (id, store, created_s) VALUES (?, ?, ?) RETURNING number"
                ((batch,),) = self._db.rows(insert, (batch_id, store, now))
            self._db.execute_each(
                "UPDATE files SET gone = 1 WHERE store = ? AND id = ? AND NOT gone", [(store, f.id) for f in files]
            )
            self._db.execute_each(
                "INSERT INTO files (store, batch, id, filename, attributes, created_s, chunk_tokens, overlap_tokens) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [(store, batch, f.id, f.filename, _json(f.attributes), now, *_sizes(f.chunks)) for f in files],
            )
            self._db.execute("UPDATE stores SET active_s = ? WHERE number = ?", (now, store))

    def _check_room(self, store: int, more: int, most_chunks: int) -> None:
        ((used,),) = self._db.rows(USED, (store,))
        if used >= most_chunks:
            raise FullError(f"There are {used} chunks of files, and a key may have {most_chunks}. Delete some files.")
        ((count,),) = self._db.rows("SELECT count(*) FROM files WHERE store = ? AND NOT gone", (store,))
        if count + more > MAX_STORE_FILES:
            raise FullError(f"A vector store has at most {MAX_STORE_FILES} files.")

    def find(self, store_id: str, store: int, file_id: str) -> VectorStoreFile | None:
        rows = self._db.rows(f"{_FILES} AND id = :id", {"store": store, "id": file_id})
        return _file(store_id, rows[0]) if rows else None

    def page(
        self, store: StoreRow, page: PageQuery, status: FileStatus | None = None, batch_id: str | None = None
    ) -> list[VectorStoreFile]:
        """Of all files, or of a batch: at most one more than the limit of the page. Raises APIError 400 for an unknown
        `after` or `before`."""
        query, values = _FILES, {"store": store.number, "status": status, "batch": batch_id}
        query += " AND status = :status" if status is not None else ""
        query += " AND batch = (SELECT number FROM batches WHERE id = :batch)" if batch_id is not None else ""
        anchor = "SELECT number FROM files WHERE store = :store AND id = :id ORDER BY gone, number DESC LIMIT 1"
        rows = Listing(files_of(store.number), query, anchor).page(self._db.execute, values, page)
        return [_file(store.shown.id, row) for row in rows]

    def set_attributes(self, store: int, file_id: str, attributes: Attributes) -> None:
        update = "UPDATE files SET attributes = ? WHERE store = ? AND id = ? AND NOT gone"
        self._db.execute(update, (_json(attributes), store, file_id))

    def batch(self, store: StoreRow, batch_id: str) -> VectorStoreFileBatch | None:
        select = f"""
            SELECT b.created_s, b.cancelled, {COUNTS}
            FROM batches b LEFT JOIN files f ON f.batch = b.number AND NOT gone
            WHERE b.id = ? AND b.store = ? GROUP BY b.number
        """
        rows = self._db.rows(select, (batch_id, store.number))
        if not rows:
            return None
        created_s, cancelled, *counts = rows[0]
        status: FileStatus = "cancelled" if cancelled else "in_progress" if counts[0] else "completed"
        return VectorStoreFileBatch(
            id=batch_id,
            created_at=created_s,
            vector_store_id=store.shown.id,
            status=status,
            file_counts=counts_of(counts),
        )

    def cancel_batch(self, batch_id: str) -> None:
        """Files that have been read stay."""
        of_batch = "batch = (SELECT number FROM batches WHERE id = ?)"
        with self._db.transaction():
            self._db.execute("UPDATE batches SET cancelled = 1 WHERE id = ?", (batch_id,))
            update = f"UPDATE files SET status = 'cancelled' WHERE status = 'in_progress' AND {of_batch}"
            self._db.execute(update, (batch_id,))

    def texts(self, store: int, file_id: str, after: int, count: int) -> list[str]:
        """Of the chunks of a file from the place `after` on."""
        select = f"""
            SELECT text FROM files f JOIN chunks c
                ON c.number >= (f.number << {PLACE_BITS}) + ? AND c.number < (f.number + 1) << {PLACE_BITS}
            WHERE f.store = ? AND f.id = ? AND NOT gone AND status = 'completed' ORDER BY c.number LIMIT ?
        """
        return [text for (text,) in self._db.rows(select, (after, store, file_id, count))]

    def mark(self, file_id: str, store: int | None = None, owner: str | None = None) -> bool:
        """Whether it was there: in one store, or in any of an owner's."""
        of_owner = "store IN (SELECT number FROM stores WHERE owner = :owner)"
        of = "store = :store" if store is not None else of_owner
        update = f"UPDATE files SET gone = 1 WHERE id = :id AND NOT gone AND {of} RETURNING id"
        return bool(self._db.rows(update, {"id": file_id, "store": store, "owner": owner}))


def _file(store_id: str, row: Sequence[Any]) -> VectorStoreFile:
    file_id, size, created_s, status, code, error, tokens, overlap, attributes = row
    return VectorStoreFile(
        id=file_id,
        usage_bytes=size,
        created_at=created_s,
        vector_store_id=store_id,
        status=status,
        last_error=None if code is None else LastError(code, error),
        chunking_strategy=StaticStrategy("static", StaticChunks(tokens, overlap)),
        attributes=msgspec.json.decode(attributes),
    )


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _sizes(chunks: StaticChunks) -> tuple[int, int]:
    return chunks.max_chunk_size_tokens, chunks.chunk_overlap_tokens
