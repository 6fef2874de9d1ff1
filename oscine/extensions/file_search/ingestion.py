"""Reads the files of vector stores in the background, one at a time: chunks, their vectors, and what is gone.

A thread of the server writes, and a process of its own reads files. A server that ends leaves its files `in_progress`,
and the next one begins with these. Of several servers with one folder, one reads.
"""

import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from oscine.extensions.file_search.reader.messages import ErrorCode, Job, Told
from oscine.extensions.file_search.storage.chunks import MAX_CHUNKS, Waiting
from oscine.extensions.file_search.storage.tables import Storage
from oscine.system.owned_folder import take_lock
from oscine.system.python_child import bound_command, child_environment

if TYPE_CHECKING:
    from oscine.extensions.file_search.vectors import Embeddings

logger = logging.getLogger(__name__)

_READER = "oscine.extensions.file_search.reader.main"
_IDLE_S = 60.0  # after which the process ends
_PAUSE_S = 5.0  # after a failure, and before the lock is tried again
_STOP_S = 10.0
_ATTEMPTS = 5  # to get embeddings
_ENVIRONMENT = ("HOME", "LANG", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR")  # of the process: no keys


@dataclass(frozen=True)
class Sources:
    """What the reading of files needs."""

    database: Path
    lock: Path
    path_of: Callable[[str], Path]  # of an uploaded file
    tokenizer: Callable[[], Path | None]  # None: no model is ready
    embeddings: "Embeddings | None"
    max_chunks: int  # of a key


class _FailedError(Exception):
    """A file that cannot be read, as its `last_error` has it."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ErrorCode = code


class Ingestion:
    """`start` comes first, and `stop` last."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._woken, self._stopped = threading.Event(), threading.Event()
        self._reader = _Reader()
        self._thread = threading.Thread(target=self._run, name="ingestion", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """There is a new file."""
        self._woken.set()

    def stop(self) -> None:
        """Returns when nothing is read any more, or at the latest after _STOP_S, if embeddings are awaited."""
        self._stopped.set()
        self._woken.set()
        self._reader.kill()
        if self._thread.is_alive():
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        storage = Storage(self._sources.database)
        lock = os.open(self._sources.lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            while not self._stopped.is_set():
                self._woken.clear()
                pause_s = self._turn(storage, lock)
                if not self._woken.wait(pause_s):
                    self._reader.end()
        finally:
            self._reader.end()
            storage.db.close()
            os.close(lock)

    def _turn(self, storage: Storage, lock: int) -> float:
        """Does what there is to do. Returns the seconds until it is to be looked for again."""
        try:
            take_lock(lock, needed=False)
            storage.stores.mark_expired()
            while not self._stopped.is_set() and storage.chunks.sweep():
                pass
            while not self._stopped.is_set() and (file := storage.chunks.waiting()) is not None:
                if (tokenizer := self._sources.tokenizer()) is None:
                    return _PAUSE_S
                self._read(storage, file, tokenizer)
        except BlockingIOError:  # another server reads
            return _PAUSE_S
        except Exception:
            logger.exception("reading files of vector stores goes on after a pause")
            return _PAUSE_S
        return _IDLE_S

    def _read(self, storage: Storage, file: Waiting, tokenizer: Path) -> None:
        path = str(self._sources.path_of(file.id))
        job = Job(str(tokenizer), path, file.filename, file.chunk_tokens, file.overlap_tokens)
        first = 0
        try:
            for told in self._reader.read(job):
                if self._stopped.is_set():
                    return self._reader.end()
                if told.code is not None:
                    raise _FailedError(told.code, told.message)
                if told.texts and not self._add(storage, file, first, told.texts):
                    return self._reader.end()  # the rest is not needed
                first += len(told.texts)
            if not self._stopped.is_set():
                storage.chunks.finish(file)
        except _FailedError as error:
            if not self._stopped.is_set():
                storage.chunks.finish(file, (error.code, str(error)))
        return None

    def _add(self, storage: Storage, file: Waiting, first: int, texts: list[str]) -> bool:
        most = self._sources.max_chunks
        if storage.chunks.used(file.store) + len(texts) > most or first + len(texts) > MAX_CHUNKS:
            self._reader.end()
            raise _FailedError("server_error", f"There is no more room: the files of a key may have {most} chunks.")
        return storage.chunks.add(file, first, texts, self._vectors(texts))

    def _vectors(self, texts: list[str]) -> tuple[str, bytes] | None:
        embeddings = self._sources.embeddings
        if embeddings is None:
            return None
        from oscine.extensions.file_search.vectors import EmbeddingsError, packed

        for attempt in range(_ATTEMPTS):
            try:
                return embeddings.model, packed(embeddings.of(texts))
            except EmbeddingsError as error:
                why = str(error)
            if self._stopped.wait(2**attempt / 2):
                break
        self._reader.end()
        raise _FailedError("server_error", why)


class _Reader:
    """The process that reads files. It is started by the first file."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, job: Job) -> Iterator[Told]:
        """What the process says of one file. Raises _FailedError if it ends meanwhile."""
        process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.write(msgspec.json.encode(job) + b"\n")
            process.stdin.flush()
        for line in process.stdout:
            told = msgspec.json.decode(line, type=Told)
            yield told
            if told.done:
                return
        self.end()
        raise _FailedError("invalid_file", "Reading the file takes too much time or memory.")

    def _started(self) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in child_environment().items() if name in _ENVIRONMENT}
        self._process = subprocess.Popen(
            bound_command(_READER), stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        return self._process

    def kill(self) -> None:
        """From any thread. Whatever reads then fails."""
        if (process := self._process) is not None:
            process.kill()

    def end(self) -> None:
        self.kill()
        process, self._process = self._process, None
        if process is not None:
            with suppress(BrokenPipeError), process:  # waits, and closes the pipes
                pass
