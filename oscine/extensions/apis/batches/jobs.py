"""The files of a server, and the batches that run in it."""

import asyncio
import logging
import secrets
import time
import uuid
from functools import partial

from oscine.api.common.asgi import ASGIApp, Message
from oscine.api.common.errors import APIError, internal, unavailable
from oscine.api.common.keys import batch_scope
from oscine.api.common.rate_limits import KeyUse
from oscine.api.openai.chat_completions import ChatCompletions
from oscine.api.openai.completions import Completions
from oscine.api.serving.service import Service
from oscine.extensions.apis.batches.job import Answered, BatchJob, Room
from oscine.extensions.apis.batches.lines import BatchFileError, BatchLine, FileInUseError
from oscine.extensions.apis.batches.retries import is_busy
from oscine.extensions.apis.batches.schemas import BatchError, BatchObject, BatchRequest, RequestCounts
from oscine.extensions.apis.batches.store import FileStore
from oscine.extensions.apis.responses.api import responses_of

logger = logging.getLogger(__name__)

MAX_ACTIVE = 16  # batches of one key that have not ended
_WINDOW_S = 24 * 3600
_BESIDE_BODY = 65_536  # bytes of a line beside its body
_PAUSE_S = 60.0  # after a failure of the server itself


class BatchJobs:
    """The files of a server, and the batches that run in it."""

    def __init__(self, service: Service) -> None:
        self.config, self.store = service.config, FileStore(service.config.server.files_dir)
        self._service = service
        self._endpoints: dict[str, ASGIApp] = {
            "/v1/chat/completions": ChatCompletions(service),
            "/v1/completions": Completions(service),
            "/v1/responses": responses_of(service).responses,
        }
        self._jobs: dict[str, tuple[BatchJob, asyncio.Task[None]]] = {}
        self._stopped = False
        self._room = Room()
        self._slots: asyncio.Semaphore | None = None  # for all batches together; made by the first

    async def go_on(self) -> None:
        """With the batches that an earlier server has not ended. Call it when the models are ready."""
        if self.store.is_offered:
            for owner, batch in await self.store.unfinished():
                if self._wrong_model(batch.model) is None:  # else it belongs to a server with other models
                    self._run(batch, owner)

    async def stop(self) -> None:
        """Batches end where they are."""
        self._stopped = True
        tasks = [task for _, task in self._jobs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def has_few(self) -> bool:
        """Whether few bytes of lines are held."""
        return self._room.has_few

    async def create_batch(self, request: BatchRequest, owner: str) -> BatchObject:
        if self._stopped:
            raise unavailable("The server shuts down and takes no batches.", code="draining")
        now = int(time.time())
        batch = BatchObject(
            id=f"batch_{secrets.token_hex(16)}",
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            created_at=now,
            expires_at=now + _WINDOW_S,
            request_counts=RequestCounts(),
            metadata=request.metadata,
        )
        if not await self.store.batches.add(batch, owner, MAX_ACTIVE):
            message = f"There are {MAX_ACTIVE} batches that have not ended, as many as a key may have."
            raise APIError(message, status=429, type="rate_limit_error", code="too_many_batches")
        self._run(batch, owner)
        return batch

    def job(self, batch_id: str, owner: str) -> BatchJob | None:
        """The job of a batch that runs in this server."""
        found = self._jobs.get(batch_id)
        return found[0] if found is not None and found[0].owner == owner else None

    async def remove_expired(self) -> None:
        """Deletes the files whose time is over, but for inputs of batches that run."""
        for file_id, owner in await self.store.expired(time.time()):
            if not self.is_input(file_id):
                await self.store.delete_file(file_id, owner)

    def is_input(self, file_id: str) -> bool:
        """Whether a batch that runs in this server reads the file."""
        return any(job.batch.input_file_id == file_id for job, _ in self._jobs.values())

    def _run(self, batch: BatchObject, owner: str) -> None:
        places = sum(model.max_num_seqs for model in self._service.models)
        self._slots = self._slots or asyncio.Semaphore(places)
        longest = self.config.server.max_body_bytes + _BESIDE_BODY
        job = BatchJob(batch, owner, self.store, partial(self._ask, owner), self._wrong_model, self._room, longest)
        task = asyncio.create_task(self._run_job(job, self._slots, places))
        self._jobs[batch.id] = (job, task)
        task.add_done_callback(lambda task: self._jobs.pop(batch.id, None))

    async def _run_job(self, job: BatchJob, slots: asyncio.Semaphore, places: int) -> None:
        """Until the batch has ended. A failure, such as a full disk, is tried again: what was answered is kept."""
        while True:
            try:
                return await job.run(slots, places)
            except FileInUseError:
                logger.info("%s runs in another server", job.batch.id)
                return None
            except BatchFileError:
                logger.exception("%s has lost a file", job.batch.id)
                return await job.fail(BatchError("invalid_file", "A file of the batch was deleted."))
            except Exception:
                logger.exception("%s goes on after a pause", job.batch.id)
                await asyncio.sleep(_PAUSE_S)

    def _wrong_model(self, name: str | None) -> str | None:
        try:
            self._service.find(name)
        except APIError as error:
            return error.message
        return None

    async def _ask(self, owner: str, line: BatchLine) -> Answered:
        """Sends a line to its endpoint, without HTTP. It counts as a request of its key, unless it is sent again."""
        request_id = uuid.uuid4().hex
        key: KeyUse | None = None
        if self._service.keys:
            key = self._service.keys.named(owner)
            if key is None:
                gone = APIError("The API key of this batch is no longer known.", status=401, code="invalid_api_key")
                return Answered(401, request_id, gone.body())
            try:
                key.take_request(in_batch=True)
            except APIError as error:
                return _refused(error, request_id)
        answered = await self._sent(line, key, request_id)
        if key is not None and is_busy(answered.status):
            key.give_back_request()
        return answered

    async def _sent(self, line: BatchLine, key: KeyUse | None, request_id: str) -> Answered:
        reply = _Reply(line.body)
        try:
            await self._endpoints[line.url](batch_scope(line.url, key), reply.receive, reply.send)
        except APIError as error:
            return _refused(error, request_id)
        except Exception:
            logger.exception("a line of a batch failed")
            return Answered(500, request_id, internal().body())
        return Answered(reply.status, request_id, bytes(reply.body))


def _refused(error: APIError, request_id: str) -> Answered:
    return Answered(error.status, request_id, error.body(), error.headers.get("Retry-After"))


class _Reply:
    """Both ends of a request that no client sent."""

    def __init__(self, body: bytes) -> None:
        self._request: bytes | None = body
        self.status = 500
        self.body = bytearray()

    async def receive(self) -> Message:
        if self._request is None:
            await asyncio.get_running_loop().create_future()  # there is no client that leaves
        body, self._request = self._request, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")
