"""The vector stores of a server: their tables, beside the event loop, and what is read into them."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from oscine.api.common.errors import APIError, invalid, not_found, unavailable, unsupported
from oscine.api.serving.service import Service
from oscine.extensions.apis.batches.api import BatchesApi
from oscine.extensions.apis.batches.records import storage_failed
from oscine.extensions.apis.batches.schemas import FileObject
from oscine.extensions.file_search.ingestion import Ingestion, Sources
from oscine.extensions.file_search.search import Hit, Question, search
from oscine.extensions.file_search.storage.files import NewFile
from oscine.extensions.file_search.storage.stores import FullError, StoreRow
from oscine.extensions.file_search.storage.tables import Storage

if TYPE_CHECKING:
    from oscine.extensions.file_search.vectors import Embeddings

_DATABASE, _LOCK = "vector_stores.db", "vector_stores.lock"
_READERS = 2
T = TypeVar("T")


class VectorStores:
    """`open` comes first and `stop` last. Others raise APIError: 501 if no files are kept, 503 if the disk fails."""

    def __init__(self, service: Service) -> None:
        self.options = service.config.tools.file_search
        self._service = service
        self._writer = ThreadPoolExecutor(1, "vector stores")
        self._readers = ThreadPoolExecutor(_READERS, "searches")
        self._own = threading.local()  # each thread's Storage
        self._opened: list[Storage] = []
        self._ingestion: Ingestion | None = None
        self._embeddings = self._made_embeddings()

    def _made_embeddings(self) -> "Embeddings | None":
        url, model = self.options.embeddings_url, self.options.embeddings_model
        if url is None or model is None:
            return None
        from oscine.extensions.file_search.vectors import Embeddings  # numpy is needed only with embeddings

        return Embeddings(url, model, self.options.embeddings_key)

    async def open(self) -> None:
        """Once the folder of files is there."""
        batches = self._service.apis["batches"]
        assert isinstance(batches, BatchesApi)
        self._files = batches.jobs.store
        if not self._files.is_offered:
            return
        self._files.when_deleted.append(self.forget_file)
        folder = self._files.folder
        self._database = folder / _DATABASE
        try:
            await self.write(lambda storage: None)
        except APIError as error:
            raise ValueError(error.message) from None
        self._ingestion = Ingestion(
            Sources(
                database=self._database,
                lock=folder / _LOCK,
                path_of=self._files.path,
                tokenizer=self._tokenizer,
                embeddings=self._embeddings,
                max_chunks=self.options.max_vector_store_chunks,
            )
        )

    def start_reading(self) -> None:
        """Once the models are ready."""
        if self._ingestion is not None:
            self._ingestion.start()

    async def stop(self) -> None:
        if self._ingestion is not None:
            await asyncio.to_thread(self._ingestion.stop)
        for threads in (self._writer, self._readers):
            await asyncio.to_thread(threads.shutdown)
        for storage in self._opened:
            storage.db.close()

    def _tokenizer(self) -> Path | None:
        """That of the first model that is ready."""
        for model in self._service.models:
            if model.state == "ready":
                return model.ready().tokenizer.path
        return None

    # ---- the tables ----

    async def read(self, work: Callable[[Storage], T]) -> T:
        return await self._do(self._readers, work)

    async def write(self, work: Callable[[Storage], T]) -> T:
        """Raises APIError 413 if a limit is reached."""
        return await self._do(self._writer, work)

    async def _do(self, threads: ThreadPoolExecutor, work: Callable[[Storage], T]) -> T:
        self._files.check()
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, partial(self._with_storage, work))
        except FullError as error:
            raise APIError(str(error), status=413, code="storage_limit_exceeded") from None
        except (sqlite3.Error, OSError) as error:
            raise storage_failed(error) from error

    def _with_storage(self, work: Callable[[Storage], T]) -> T:
        storage: Storage | None = getattr(self._own, "storage", None)
        if storage is None:
            storage = self._own.storage = Storage(self._database)
            self._opened.append(storage)
        return work(storage)

    # ---- stores and files ----

    async def find(self, store_id: str, owner: str) -> StoreRow:
        """Raises APIError 404."""
        found = await self.read(lambda storage: storage.stores.find(store_id, owner))
        if found is None:
            raise not_found(f"No vector store found with id '{store_id}'.", "vector_store_not_found", "vector_store_id")
        return found

    async def usable(self, store_id: str, owner: str) -> StoreRow:
        """A store that has not expired, and is in use from now on."""
        found = await self.find(store_id, owner)
        if found.is_expired:
            raise invalid("vector_store_id", f"the vector store '{store_id}' has expired")
        if found.shown.expires_after is not None:
            await self.write(lambda storage: storage.stores.touch(found.number))
        return found

    async def uploaded(self, file_id: str, owner: str, param: str) -> FileObject:
        """Raises APIError 404, and 413 for a file that is too large."""
        file = await self._files.files.get(file_id, owner)
        if file is None or (file.expires_at is not None and file.expires_at < time.time()):
            raise not_found(f"No such File object: {file_id}", "file_not_found", param)
        most = self.options.max_vector_store_file_bytes
        if file.bytes > most:
            message = f"The file '{file_id}' has {file.bytes} bytes, and vector stores take files up to {most} bytes."
            raise APIError(message, status=413, param=param, code="file_too_large")
        return file

    async def add_files(self, store: StoreRow, files: Sequence[NewFile], batch_id: str | None = None) -> None:
        most = self.options.max_vector_store_chunks
        await self.write(lambda storage: storage.files.add(store.number, files, most, batch_id))
        if self._ingestion is not None:
            self._ingestion.wake()

    async def delete_store(self, store: StoreRow) -> None:
        await self.write(lambda storage: storage.stores.mark(store.number))
        await self._sweep()

    async def delete_file(self, store: StoreRow, file_id: str) -> bool:
        """Whether it was there."""
        gone = await self.write(lambda storage: storage.files.mark(file_id, store=store.number))
        await self._sweep()
        return gone

    async def forget_file(self, file_id: str, owner: str) -> None:
        """An uploaded file was deleted: it leaves all stores."""
        if await self.write(lambda storage: storage.files.mark(file_id, owner=owner)):
            await self._sweep()

    async def _sweep(self) -> None:
        while await self.write(lambda storage: storage.chunks.sweep()):
            pass

    # ---- search ----

    async def search(self, stores: Sequence[StoreRow], question: Question) -> list[Hit]:
        """Raises APIError."""
        weights = question.weights
        if self._embeddings is None:
            if weights is not None and weights.embedding_weight:
                where = "ranking_options.hybrid_search.embedding_weight"
                raise unsupported(where, "this server has no embeddings: see --embeddings-url")
        elif weights is None or weights.embedding_weight:
            question = await self._with_vector(question, self._embeddings)
        numbers = [store.number for store in stores]
        return await self.read(lambda storage: search(storage, numbers, question))

    async def _with_vector(self, question: Question, embeddings: "Embeddings") -> Question:
        from oscine.extensions.file_search.vectors import EmbeddingsError

        try:
            (vector,) = await asyncio.to_thread(embeddings.of, ["\n".join(question.queries)])
        except EmbeddingsError as error:
            raise unavailable(str(error), code="embeddings_unavailable") from None
        return replace(question, vector=vector, model=embeddings.model)
