"""Chunks of files: those that are added as a file is read, and those that go."""

from collections.abc import Sequence
from typing import NamedTuple

from oscine.api.common.deleted_rows import remember
from oscine.extensions.file_search.reader.messages import ErrorCode
from oscine.extensions.file_search.storage.database import PLACE_BITS, Database
from oscine.extensions.file_search.storage.files import USED, files_of
from oscine.extensions.file_search.storage.stores import stores_of
from oscine.extensions.file_search.storage.words import spaced

MAX_CHUNKS = 1 << PLACE_BITS  # of a file
_PIECE = 64  # chunks that are removed in one transaction
_OF_FILE = f"number BETWEEN :file << {PLACE_BITS} AND (:file << {PLACE_BITS}) + {MAX_CHUNKS - 1}"


class Waiting(NamedTuple):
    """A file that is to be read."""

    number: int
    store: int
    id: str
    filename: str
    chunk_tokens: int
    overlap_tokens: int


class Chunks:
    def __init__(self, db: Database) -> None:
        self._db = db

    def waiting(self) -> Waiting | None:
        """The oldest file that is to be read, without the chunks of an earlier attempt."""
        select = """
            SELECT number, store, id, filename, chunk_tokens, overlap_tokens FROM files
            WHERE status = 'in_progress' AND NOT gone ORDER BY number LIMIT 1
        """
        rows = self._db.rows(select)
        if not rows:
            return None
        found, more = Waiting(*rows[0]), True
        while more:
            with self._db.transaction():
                more = self._clear(found.number, found.store)
        return found

    def add(self, file: Waiting, first: int, texts: Sequence[str], vectors: tuple[str, bytes] | None) -> bool:
        """Adds chunks from the place `first` on; `vectors`: a model, and theirs. False: the file is unwanted."""
        numbers = range((file.number << PLACE_BITS) + first, (file.number << PLACE_BITS) + first + len(texts))
        size = sum(len(text.encode()) for text in texts) + (len(vectors[1]) if vectors else 0)
        update = """
            UPDATE files SET chunks = :chunks, size = size * (:first > 0) + :size
            WHERE number = :file AND status = 'in_progress' AND NOT gone RETURNING 1
        """
        values = {"chunks": first + len(texts), "first": first, "size": size, "file": file.number}
        with self._db.transaction():
            if not self._db.rows(update, values):
                return False
            self._db.execute_each("INSERT INTO chunks VALUES (?, ?)", zip(numbers, texts, strict=True))
            words = zip(numbers, map(spaced, texts), strict=True)
            self._db.execute_each(f"INSERT INTO words_{file.store} (rowid, text) VALUES (?, ?)", words)
            if vectors is not None:
                self._db.execute("INSERT INTO vectors VALUES (?, ?, ?)", (numbers[0], *vectors))
        return True

    def used(self, store: int) -> int:
        """Chunks of all files of the owner of a store."""
        ((used,),) = self._db.rows(USED, (store,))
        return int(used)

    def finish(self, file: Waiting, error: tuple[ErrorCode, str] | None = None) -> None:
        """The file is read, or it cannot be: then its chunks go."""
        more = error is not None
        while more:
            with self._db.transaction():
                more = self._clear(file.number, file.store)
        update = """
            UPDATE files SET status = ?, error_code = ?, error = ?, chunks = chunks * ?, size = size * ?
            WHERE number = ? AND status = 'in_progress' AND NOT gone
        """
        code, message = error or (None, None)
        kept = error is None
        self._db.execute(update, ("completed" if kept else "failed", code, message, kept, kept, file.number))

    def sweep(self) -> bool:
        """Removes some chunks of what is gone. Whether there may be more."""
        with self._db.transaction():
            rows = self._db.rows("SELECT number, store, id FROM files WHERE gone LIMIT 1")
            if not rows:
                for store_id, owner, number in self._db.rows("SELECT id, owner, number FROM stores WHERE gone"):
                    remember(self._db.execute, stores_of(owner), store_id, number)
                self._db.execute("DELETE FROM stores WHERE gone")
                return False
            ((file, store, file_id),) = rows
            if not self._clear(file, store):
                if self._has(store):
                    remember(self._db.execute, files_of(store), file_id, file)
                self._db.execute("DELETE FROM files WHERE number = ?", (file,))
        return True

    def _has(self, store: int) -> bool:
        return bool(self._db.rows("SELECT 1 FROM stores WHERE number = ? AND NOT gone", (store,)))

    def _clear(self, file: int, store: int) -> bool:
        """Removes some chunks of a file. Whether there may be more. Within a transaction."""
        some = f"SELECT number FROM chunks WHERE {_OF_FILE} LIMIT {_PIECE}"
        if self._has(store):
            self._db.execute(
                f"INSERT INTO words_{store} (words_{store}, rowid, text) "
                f"SELECT 'delete', number, spaced(text) FROM chunks WHERE number IN ({some})",
                {"file": file},
            )
        deleted = self._db.rows(f"DELETE FROM chunks WHERE number IN ({some}) RETURNING 1", {"file": file})
        self._db.execute(f"DELETE FROM vectors WHERE {_OF_FILE.replace('number', 'first')}", {"file": file})
        return len(deleted) == _PIECE
