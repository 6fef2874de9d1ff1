"""/v1/files and /v1/batches, as OpenAI has them."""

import secrets
import sys
import time
from collections.abc import AsyncIterator
from operator import attrgetter
from typing import Any, get_args

from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response

from oscine.api.common.asgi import ClientLeftError
from oscine.api.common.errors import APIError, invalid, not_found
from oscine.api.common.keys import Caller
from oscine.api.common.memory import Held
from oscine.api.common.paging import PageQuery, shown_page
from oscine.api.http.body import json_response, read_body
from oscine.api.serving.schemas import decode
from oscine.extensions.apis.batches.jobs import BatchJobs
from oscine.extensions.apis.batches.records import storage_failed
from oscine.extensions.apis.batches.schemas import (
    BatchList,
    BatchObject,
    BatchRequest,
    DeletedFile,
    FileList,
    FileObject,
    FilesQuery,
    UploadPurpose,
)
from oscine.extensions.apis.batches.upload import Upload, UploadRoom, read_upload, storage_full
from oscine.extensions.apis.responses.schemas import read_query

MAX_FILES = 10_000  # of one key
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_LEAST_S, _MAX_S = 3600, 2_592_000  # as OpenAI's
_PURPOSES: tuple[UploadPurpose, ...] = get_args(UploadPurpose)


class Files:
    def __init__(self, jobs: BatchJobs) -> None:
        self._jobs, self._store = jobs, jobs.store
        self._rooms: dict[str, UploadRoom] = {}  # by owner

    async def create(self, request: Request) -> Response:
        self._store.check()
        await self._jobs.remove_expired()
        owner, options = _owner(request), self._jobs.config.server
        count, used = await self._store.files.use(owner)
        room = self._rooms.setdefault(owner, UploadRoom())
        file_id = f"file-{secrets.token_hex(16)}"
        content_type = request.headers.get("content-type", "").encode("latin-1")
        try:
            with room.reserved(options.max_file_bytes, MAX_FILES - count, options.files_max_bytes - used) as reserve:
                upload = await read_upload(content_type, self._pieces(request), self._store.new(file_id), reserve)
                file = _made(file_id, upload)
                if not await self._store.files.add(file, owner, MAX_FILES, options.files_max_bytes):
                    raise storage_full()
        except BaseException as error:
            self._store.discard(file_id)
            if isinstance(error, OSError):
                raise storage_failed(error) from error
            raise
        return json_response(file)

    async def _pieces(self, request: Request) -> AsyncIterator[bytes]:
        """The body. Its memory is given back at once, because it goes to the disk."""
        held = Held.of(request.scope)
        try:
            async for piece in request.stream():
                yield piece
                held.give_back()
        except ClientDisconnect:
            raise ClientLeftError from None

    async def list(self, request: Request) -> Response:
        query = read_query(request.query_params, FilesQuery)
        found = await self._store.files.page(_owner(request), query, query.purpose)
        return json_response(FileList("list", *shown_page(found, query.limit, attrgetter("id"))))

    async def retrieve(self, request: Request) -> Response:
        return json_response(await self._found(request))

    async def content(self, request: Request) -> Response:
        file = await self._found(request)
        name = file.filename.encode("ascii", "replace").decode().replace('"', "'")
        return FileResponse(self._store.path(file.id), media_type="application/octet-stream", filename=name)

    async def delete(self, request: Request) -> Response:
        file_id, owner = request.path_params["id"], _owner(request)
        if self._jobs.is_input(file_id):
            raise APIError(f"The file '{file_id}' is the input of a batch that runs.", status=409, code="file_in_use")
        if not await self._store.delete_file(file_id, owner):
            raise _no_file(file_id)
        return json_response(DeletedFile(file_id, "file", deleted=True))

    async def _found(self, request: Request) -> FileObject:
        file_id = request.path_params["id"]
        file = await self._store.files.get(file_id, _owner(request))
        if file is None or (file.expires_at or sys.maxsize) < time.time():
            raise _no_file(file_id)
        return file


class Batches:
    def __init__(self, jobs: BatchJobs) -> None:
        self._jobs, self._store = jobs, jobs.store

    async def create(self, request: Request) -> Response:
        self._store.check()
        owner = _owner(request)
        received = await read_body(request, self._jobs.config.server.max_body_bytes)
        body = await decode(received, BatchRequest, request.scope)
        file = await self._store.files.get(body.input_file_id, owner)
        if file is None:
            raise _no_file(body.input_file_id, "input_file_id")
        if file.purpose != "batch":
            raise invalid("input_file_id", "the file was not uploaded with the purpose 'batch'")
        return json_response(await self._jobs.create_batch(body, owner))

    async def list(self, request: Request) -> Response:
        query, owner = read_query(request.query_params, PageQuery), _owner(request)
        found = await self._store.batches.page(owner, query)
        live = [job.batch if (job := self._jobs.job(batch.id, owner)) else batch for batch in found]
        return json_response(BatchList("list", *shown_page(live, query.limit, attrgetter("id"))))

    async def retrieve(self, request: Request) -> Response:
        batch_id, owner = request.path_params["id"], _owner(request)
        job = self._jobs.job(batch_id, owner)
        return json_response(job.batch if job is not None else await self._found(batch_id, owner))

    async def cancel(self, request: Request) -> Response:
        """What is answered stays; the output files come once the running requests have ended."""
        batch_id, owner = request.path_params["id"], _owner(request)
        job = self._jobs.job(batch_id, owner)
        if job is None or job.ended or job.batch.status == "finalizing":
            batch = await self._found(batch_id, owner)
            message = f"The batch '{batch_id}' is {batch.status} and cannot be cancelled."
            raise APIError(message, status=409, code="batch_not_cancellable")
        await job.cancel()
        return json_response(job.batch)

    async def _found(self, batch_id: str, owner: str) -> BatchObject:
        batch = await self._store.batches.get(batch_id, owner)
        if batch is None:
            raise not_found(f"No batch found with id '{batch_id}'.", "batch_not_found")
        return batch


def _owner(request: Request) -> str:
    return Caller.of(request.scope).name


def _no_file(file_id: str, param: str = "id") -> APIError:
    return not_found(f"No such File object: {file_id}", "file_not_found", param)


def _made(file_id: str, upload: Upload) -> FileObject:
    """Raises APIError for fields that are missing or wrong."""
    fields: dict[str, Any] = upload.fields
    if upload.filename is None:
        raise invalid("file", "it is required")
    purpose = fields.get("purpose")
    if purpose not in _PURPOSES:
        one = f"it must be one of {', '.join(_PURPOSES)}, not {purpose[:80]!r}" if purpose else "it is required"
        raise invalid("purpose", one)
    now = int(time.time())
    expires_at = None
    if _SECONDS in fields or _ANCHOR in fields:
        seconds = fields.get(_SECONDS, "")
        if fields.get(_ANCHOR) != "created_at":
            raise invalid(_ANCHOR, "it must be 'created_at'")
        if not (seconds.isascii() and seconds.isdecimal() and _LEAST_S <= int(seconds) <= _MAX_S):
            raise invalid(_SECONDS, f"it must be between {_LEAST_S} and {_MAX_S}, not {seconds[:20]!r}")
        expires_at = now + int(seconds)
    return FileObject(
        id=file_id, bytes=upload.size, created_at=now, filename=upload.filename, purpose=purpose, expires_at=expires_at
    )
