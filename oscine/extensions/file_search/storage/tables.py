"""All tables of vector stores over one connection."""

import time
from collections.abc import Callable
from pathlib import Path

from oscine.extensions.file_search.storage.chunks import Chunks
from oscine.extensions.file_search.storage.database import Database
from oscine.extensions.file_search.storage.files import Files
from oscine.extensions.file_search.storage.index import Index
from oscine.extensions.file_search.storage.stores import Stores


class Storage:
    """For one thread. Raises sqlite3.Error and OSError, as its parts do."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self.db = Database(path, clock)
        self.stores, self.files = Stores(self.db), Files(self.db)
        self.chunks, self.index = Chunks(self.db), Index(self.db)
