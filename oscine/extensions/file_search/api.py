"""Vector stores as a part of the server, and the tool that searches them."""

from oscine.api.common.errors import Error
from oscine.api.common.paging import PageQuery
from oscine.api.interface import Api
from oscine.api.openapi import DELETE, GET, POST, Operation
from oscine.api.serving.service import Service
from oscine.extensions.file_search.endpoint import Batches, StoreFiles, Stores
from oscine.extensions.file_search.schemas.objects import (
    AttributesRequest,
    DeletedStore,
    DeletedStoreFile,
    FileBatchRequest,
    FileRequest,
    FilesQuery,
    SearchRequest,
    SearchResults,
    StoreChange,
    StoredContent,
    StoreRequest,
    VectorStore,
    VectorStoreFile,
    VectorStoreFileBatch,
    VectorStoreFileList,
    VectorStoreList,
)
from oscine.extensions.file_search.tool import FileSearchTools
from oscine.extensions.file_search.vector_stores import VectorStores

_STORES = "/v1/vector_stores"
_STORE, _FILES, _BATCHES = (f"{_STORES}/{{id}}{end}" for end in ("", "/files", "/file_batches"))
_FILE, _BATCH = f"{_FILES}/{{file_id}}", f"{_BATCHES}/{{batch_id}}"
_OFF = {"501": Error, "503": Error}


class FileSearchApi(Api):
    def __init__(self, service: Service) -> None:
        super().__init__(service)
        self.stores = VectorStores(service)
        service.tools.add(FileSearchTools(self.stores))

    @property
    def operations(self) -> list[Operation]:
        return [*self._of_stores(), *self._of_batches(), *self._of_files()]

    def _of_stores(self) -> list[Operation]:
        stores, named = Stores(self.stores, self.service.config.server.max_body_bytes), {"name": "Handbook"}
        return [
            POST(
                _STORES,
                stores.create,
                "Create a vector store",
                body=StoreRequest,
                answer=VectorStore,
                example=named,
                other=_OFF,
            ),
            GET(_STORES, stores.list, "List vector stores", query=PageQuery, answer=VectorStoreList, other=_OFF),
            GET(_STORE, stores.retrieve, "One vector store", answer=VectorStore, other=_OFF),
            POST(
                _STORE,
                stores.change,
                "Change a vector store",
                body=StoreChange,
                answer=VectorStore,
                example=named,
                other=_OFF,
            ),
            DELETE(_STORE, stores.delete, "Delete a vector store", answer=DeletedStore, other=_OFF),
            POST(
                f"{_STORE}/search",
                stores.search,
                "Search a vector store",
                body=SearchRequest,
                answer=SearchResults,
                example={"query": "What is 27 + 58?"},
                other=_OFF,
            ),
        ]

    def _of_files(self) -> list[Operation]:
        files = StoreFiles(self.stores, self.service.config.server.max_body_bytes)
        return [
            POST(
                _FILES,
                files.add,
                "Add a file to a vector store",
                body=FileRequest,
                answer=VectorStoreFile,
                example={"file_id": "file-1"},
                other=_OFF,
            ),
            GET(_FILES, files.list, "Files of a store", query=FilesQuery, answer=VectorStoreFileList, other=_OFF),
            GET(_FILE, files.retrieve, "One file of a store", answer=VectorStoreFile, other=_OFF),
            POST(
                _FILE,
                files.change,
                "Change the attributes of a file",
                body=AttributesRequest,
                answer=VectorStoreFile,
                example={"attributes": {"year": 2025}},
                other=_OFF,
            ),
            DELETE(_FILE, files.delete, "Remove a file from a store", answer=DeletedStoreFile, other=_OFF),
            GET(f"{_FILE}/content", files.content, "The chunks of a file", answer=StoredContent, other=_OFF),
        ]

    def _of_batches(self) -> list[Operation]:
        batches = Batches(self.stores, self.service.config.server.max_body_bytes)
        return [
            POST(
                _BATCHES,
                batches.create,
                "Add files to a vector store",
                body=FileBatchRequest,
                answer=VectorStoreFileBatch,
                example={"file_ids": ["file-1"]},
                other=_OFF,
            ),
            GET(_BATCH, batches.retrieve, "Files that were added together", answer=VectorStoreFileBatch, other=_OFF),
            POST(f"{_BATCH}/cancel", batches.cancel, "Stop reading files", answer=VectorStoreFileBatch, other=_OFF),
            GET(
                f"{_BATCH}/files",
                batches.files,
                "Files of a batch",
                query=FilesQuery,
                answer=VectorStoreFileList,
                other=_OFF,
            ),
        ]

    async def open(self) -> None:
        """Raises ValueError when the folder of files cannot be used."""
        await self.stores.open()

    async def started(self) -> None:
        self.stores.start_reading()

    async def stop(self) -> None:
        await self.stores.stop()
