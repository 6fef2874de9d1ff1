"""Files and batches on disk: contents as files of a folder, and a table of what is there."""

import contextlib
import logging
import re
import sqlite3
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from oscine.api.common.errors import APIError
from oscine.extensions.apis.batches.records import Records, RecordTable
from oscine.extensions.apis.batches.schemas import BatchObject, FileObject
from oscine.system.owned_folder import Kind, OwnedFolder, make_temporary

logger = logging.getLogger(__name__)

TEMPORARY = ":temporary:"
WhenDeleted = Callable[[str, str], Awaitable[None]]  # gets the id of a file, and its owner
_TABLES = r"(index|vector_stores)\.db(-wal|-shm|-journal)?|vector_stores\.lock"  # also file search's
_KIND = Kind("files", re.compile(rf"{_TABLES}|file-[0-9a-z]+\.jsonl"))
_UPLOAD = re.compile(r"file-[0-9a-f]{32}")
_ABANDONED_S = 24 * 3600.0  # without a write, after which an upload has ended with its server


class FileStore:
    """`open` comes first and `close` last. Other methods raise APIError 503 when the disk fails."""

    def __init__(self, folder: str | None) -> None:
        """`folder`: TEMPORARY for one that ends with the server; None: no files are kept, and APIError 501 says so."""
        self._given = folder
        self._temporary: OwnedFolder | None = None
        self.when_deleted: list[WhenDeleted] = []
        self._table = RecordTable(self.check)
        self.files, self.batches = Records(self._table, "file", FileObject), Records(self._table, "batch", BatchObject)

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
            await self._table.run(self._open)
        except (OSError, sqlite3.Error) as error:
            raise ValueError(f"--files-dir {self._given} cannot be used: {error}") from None

    def _open(self) -> None:
        if self._given == TEMPORARY:
            self._temporary = make_temporary(_KIND, logger.warning)
            self.folder = self._temporary.path
        else:
            self.folder = Path(str(self._given))
            self.folder.mkdir(0o700, parents=True, exist_ok=True)
        self._table.connect(self.folder / "index.db")
        if self._temporary is None:
            self._remove_abandoned()

    def _remove_abandoned(self) -> None:
        """Uploads of servers that were killed: they have no record. Another server may write its own meanwhile."""
        uploads = [path for path in self.folder.glob("file-*.jsonl") if _UPLOAD.fullmatch(path.stem)]
        known = {row[0] for row in self._table.query("SELECT id FROM records WHERE kind = 'file'")}
        for path in uploads:
            with contextlib.suppress(FileNotFoundError):  # it was discarded meanwhile
                if path.stem not in known and time.time() - path.lstat().st_mtime > _ABANDONED_S:
                    path.unlink()

    async def close(self) -> None:
        if self.is_offered:
            await self._table.run(self._close)
        self._table.end_thread()

    def _close(self) -> None:
        self._table.close()
        if self._temporary is not None:
            self._temporary.remove(logger.warning)

    def path(self, file_id: str) -> Path:
        """Of the content. `file_id` is one that the store knows or makes."""
        return self.folder / f"{file_id}.jsonl"

    def new(self, file_id: str) -> Path:
        """The path of a content that may be there already. Only the server's user can read it."""
        path = self.path(file_id)
        path.touch(0o600)
        return path

    def discard(self, file_id: str) -> None:
        """Removes a content that no record names."""
        with contextlib.suppress(OSError):
            self.path(file_id).unlink()

    async def unfinished(self) -> list[tuple[str, BatchObject]]:
        """The batches that have not ended, with their owners, the oldest first."""
        select = "SELECT owner, body FROM records WHERE kind = 'batch' AND active ORDER BY number"
        rows = await self._table.execute(select)
        return [(owner, msgspec.json.decode(body, type=BatchObject)) for owner, body in rows]

    async def delete_file(self, file_id: str, owner: str) -> bool:
        """Whether it was there."""
        deleted = await self._table.do(self._delete, file_id, owner)
        if deleted:
            for tell in self.when_deleted:
                await tell(file_id, owner)
        return deleted

    def _delete(self, file_id: str, owner: str) -> bool:
        deleted = self.files.remove(file_id, owner)
        if deleted:
            self.path(file_id).unlink(missing_ok=True)
        return deleted

    async def expired(self, now_s: float) -> list[tuple[str, str]]:
        """The files whose time is over, with their owners."""
        select = "SELECT id, owner FROM records WHERE kind = 'file' AND expires_s < ?"
        return await self._table.execute(select, (now_s,))
