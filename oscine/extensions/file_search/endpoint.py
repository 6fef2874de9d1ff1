"""/v1/vector_stores, as OpenAI has it. An API key finds its own stores alone."""

import secrets
from collections.abc import AsyncIterator, Sequence
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from oscine.api.common.errors import APIError, invalid, not_found
from oscine.api.common.keys import Caller
from oscine.api.common.paging import PageQuery, shown_page
from oscine.api.http.body import json_response, read_body
from oscine.api.serving.schemas import decode
from oscine.extensions.apis.responses.schemas import read_query
from oscine.extensions.file_search.schemas.filters import read_filter
from oscine.extensions.file_search.schemas.objects import (
    CHUNK_TOKENS,
    OVERLAP_TOKENS,
    AttributesRequest,
    ChunkingStrategy,
    DeletedStore,
    DeletedStoreFile,
    FileBatchRequest,
    FileRequest,
    FilesQuery,
    RankingOptions,
    SearchRequest,
    SearchResult,
    SearchResults,
    StaticChunks,
    StoreChange,
    StoreRequest,
    TextContent,
    VectorStoreFile,
    VectorStoreFileBatch,
    VectorStoreFileList,
    VectorStoreList,
)
from oscine.extensions.file_search.search import Question
from oscine.extensions.file_search.storage.files import NewFile
from oscine.extensions.file_search.storage.stores import StoreRow
from oscine.extensions.file_search.vector_stores import VectorStores

_CONTENT = b'{"object":"vector_store.file_content.page","has_more":false,"next_page":null,"data":['
_PIECE = 64  # chunks that are sent at once
T = TypeVar("T")


class _Endpoint:
    def __init__(self, stores: VectorStores, max_body_bytes: int) -> None:
        self._stores, self._max_body_bytes = stores, max_body_bytes

    async def _body(self, request: Request, kind: type[T]) -> T:
        return await decode(await read_body(request, self._max_body_bytes), kind, request.scope)

    async def _store(self, request: Request, *, used: bool = False) -> StoreRow:
        """`used`: an expired store is refused, and another one begins its time anew."""
        find = self._stores.usable if used else self._stores.find
        return await find(request.path_params["id"], _owner(request))

    async def _new_files(self, files: Sequence[FileRequest], owner: str, where: str) -> list[NewFile]:
        """Each file once. Raises APIError for one that cannot be taken."""
        found = {}
        for i, file in enumerate(files):
            param = where.format(i)
            uploaded = await self._stores.uploaded(file.file_id, owner, param)
            chunks = _chunks(file.chunking_strategy)
            found[file.file_id] = NewFile(file.file_id, uploaded.filename, file.attributes or {}, chunks)
        return [*found.values()]


class Stores(_Endpoint):
    async def create(self, request: Request) -> Response:
        owner, body = _owner(request), await self._body(request, StoreRequest)
        same = [FileRequest(file_id, None, body.chunking_strategy) for file_id in body.file_ids]
        files = await self._new_files(same, owner, "file_ids[{}]")
        store_id, most = _new_id("vs"), self._stores.options.max_vector_stores
        fields = {
            "name": body.name,
            "description": body.description,
            "metadata": _metadata(body.metadata),
            "expires_days": body.expires_after and body.expires_after.days,
        }
        await self._stores.write(lambda storage: storage.stores.add(store_id, owner, fields, most))
        store = await self._stores.find(store_id, owner)
        if files:
            try:
                await self._stores.add_files(store, files)
            except BaseException:
                await self._stores.delete_store(store)
                raise
        return json_response((await self._stores.find(store_id, owner)).shown)

    async def list(self, request: Request) -> Response:
        page, owner = read_query(request.query_params, PageQuery), _owner(request)
        found = await self._stores.read(lambda storage: storage.stores.page(owner, page))
        return json_response(VectorStoreList("list", *shown_page(found, page.limit, attrgetter("id"))))

    async def retrieve(self, request: Request) -> Response:
        return json_response((await self._store(request)).shown)

    async def change(self, request: Request) -> Response:
        store, body = await self._store(request), await self._body(request, StoreChange)
        fields: dict[str, Any] = {}
        if body.name is not UNSET:
            fields["name"] = body.name or ""
        if body.metadata is not UNSET:
            fields["metadata"] = _metadata(body.metadata)
        if body.expires_after is not UNSET:
            fields["expires_days"] = body.expires_after and body.expires_after.days
        if fields:
            await self._stores.write(lambda storage: storage.stores.change(store.number, **fields))
        return json_response((await self._store(request)).shown)

    async def delete(self, request: Request) -> Response:
        store = await self._store(request)
        await self._stores.delete_store(store)
        return json_response(DeletedStore(store.shown.id))

    async def search(self, request: Request) -> Response:
        body = await self._body(request, SearchRequest)
        queries = [body.query] if isinstance(body.query, str) else body.query
        wanted = read_filter(body.filters, "filters")
        ranking = body.ranking_options or RankingOptions()
        question = Question(
            queries, wanted, body.max_num_results, ranking.score_threshold or 0.0, ranking.hybrid_search
        )
        hits = await self._stores.search([await self._store(request, used=True)], question)
        results = [
            SearchResult(found.file_id, found.filename, score, found.attributes, [TextContent(found.text)])
            for found, score in hits
        ]
        return json_response(SearchResults("vector_store.search_results.page", queries, results, False, None))


class StoreFiles(_Endpoint):
    async def add(self, request: Request) -> Response:
        body = await self._body(request, FileRequest)
        store = await self._store(request, used=True)
        await self._stores.add_files(store, await self._new_files([body], _owner(request), "file_id"))
        return json_response(await self._file(store, body.file_id))

    async def list(self, request: Request) -> Response:
        return await self._listed(request, await self._store(request))

    async def _listed(self, request: Request, store: StoreRow, batch_id: str | None = None) -> Response:
        page = read_query(request.query_params, FilesQuery)
        found = await self._stores.read(lambda storage: storage.files.page(store, page, page.filter, batch_id))
        return json_response(VectorStoreFileList("list", *shown_page(found, page.limit, attrgetter("id"))))

    async def retrieve(self, request: Request) -> Response:
        return json_response(await self._file(await self._store(request), request.path_params["file_id"]))

    async def change(self, request: Request) -> Response:
        body, file_id = await self._body(request, AttributesRequest), request.path_params["file_id"]
        store = await self._store(request)
        await self._stores.write(
            lambda storage: storage.files.set_attributes(store.number, file_id, body.attributes or {})
        )
        return json_response(await self._file(store, file_id))

    async def delete(self, request: Request) -> Response:
        """The uploaded file stays."""
        store, file_id = await self._store(request), request.path_params["file_id"]
        if not await self._stores.delete_file(store, file_id):
            raise _no_file(file_id)
        return json_response(DeletedStoreFile(file_id))

    async def content(self, request: Request) -> Response:
        """The chunks, a few at a time."""
        store, file_id = await self._store(request), request.path_params["file_id"]
        await self._file(store, file_id)

        async def texts(after: int) -> list[str]:
            return await self._stores.read(lambda storage: storage.files.texts(store.number, file_id, after, _PIECE))

        async def pieces(first: list[str]) -> AsyncIterator[bytes]:
            yield _CONTENT
            found, after = first, 0
            while found:
                encoded = b",".join(msgspec.json.encode(TextContent(text)) for text in found)
                yield b"," + encoded if after else encoded
                after += len(found)
                found = await texts(after)
            yield b"]}"

        return StreamingResponse(pieces(await texts(0)), media_type="application/json")

    async def _file(self, store: StoreRow, file_id: str) -> VectorStoreFile:
        found = await self._stores.read(lambda storage: storage.files.find(store.shown.id, store.number, file_id))
        if found is None:
            raise _no_file(file_id)
        return found


class Batches(StoreFiles):
    async def create(self, request: Request) -> Response:
        body, owner = await self._body(request, FileBatchRequest), _owner(request)
        if bool(body.file_ids) is bool(body.files):
            raise invalid("file_ids", "give either it or 'files'")
        store = await self._store(request, used=True)
        same = [FileRequest(file_id, body.attributes, body.chunking_strategy) for file_id in body.file_ids]
        files = await self._new_files(same or body.files, owner, "file_ids[{}]" if same else "files[{}]")
        batch_id = _new_id("vsfb")
        await self._stores.add_files(store, files, batch_id)
        return json_response(await self._batch(store, batch_id))

    async def retrieve(self, request: Request) -> Response:
        return json_response(await self._batch(await self._store(request), request.path_params["batch_id"]))

    async def cancel(self, request: Request) -> Response:
        store, batch_id = await self._store(request), request.path_params["batch_id"]
        batch = await self._batch(store, batch_id)
        if batch.status == "in_progress":
            await self._stores.write(lambda storage: storage.files.cancel_batch(batch_id))
            batch = await self._batch(store, batch_id)
        return json_response(batch)

    async def files(self, request: Request) -> Response:
        store = await self._store(request)
        batch = await self._batch(store, request.path_params["batch_id"])
        return await self._listed(request, store, batch.id)

    async def _batch(self, store: StoreRow, batch_id: str) -> VectorStoreFileBatch:
        found = await self._stores.read(lambda storage: storage.files.batch(store, batch_id))
        if found is None:
            raise not_found(f"No file batch found with id '{batch_id}'.", "file_batch_not_found", "batch_id")
        return found


def _owner(request: Request) -> str:
    return Caller.of(request.scope).name


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _no_file(file_id: str) -> APIError:
    return not_found(f"No file found with id '{file_id}' in the vector store.", "file_not_found", "file_id")


def _metadata(given: dict[str, str] | None) -> bytes:
    return msgspec.json.encode(given or {})


def _chunks(strategy: ChunkingStrategy | None) -> StaticChunks:
    """Raises APIError."""
    if strategy is None or strategy.type == "auto":
        return StaticChunks(CHUNK_TOKENS, OVERLAP_TOKENS)
    if strategy.static is None:
        raise invalid("chunking_strategy.static", "the type 'static' needs it")
    if 2 * strategy.static.chunk_overlap_tokens > strategy.static.max_chunk_size_tokens:
        where = "chunking_strategy.static.chunk_overlap_tokens"
        raise invalid(where, "it must be at most half of 'max_chunk_size_tokens'")
    return strategy.static
