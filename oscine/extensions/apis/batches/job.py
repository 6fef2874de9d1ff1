"""One batch from its input to its outputs. Each line is written when it is answered, so a job can begin again."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Literal, TypeVar

from oscine.api.common.memory import FEW_BYTES, MAX_BATCHES_BYTES, memory_of
from oscine.api.common.work import BATCHES
from oscine.extensions.apis.batches.lines import BatchFileError, BatchInput, BatchLine, BatchOutput
from oscine.extensions.apis.batches.retries import Retries
from oscine.extensions.apis.batches.schemas import (
    TERMINAL,
    BatchError,
    BatchErrors,
    BatchObject,
    FileObject,
    RequestCounts,
)
from oscine.extensions.apis.batches.store import FileStore

MAX_LINES = 50_000
_MAX_ERRORS = 100  # that a failed batch lists
_SAVE_S = 1.0  # between two records of the counts
_COPIES = 2  # of the bytes of a line: as read, and as its request
_EXPIRED = "This request could not be executed before the completion window expired."


@dataclass(frozen=True, slots=True)
class Answered:
    status: int
    request_id: str
    body: bytes  # JSON
    retry_after: str | None = None


Ask = Callable[[BatchLine], Awaitable[Answered]]
Check = Callable[[str | None], str | None]  # says what is wrong with the name of a model
T = TypeVar("T")


class Room:
    """The memory for the lines in progress of all batches. Lines wait for it in their order."""

    def __init__(self) -> None:
        self._bytes = 0
        self._line = asyncio.Lock()
        self._left = asyncio.Event()

    @property
    def has_few(self) -> bool:
        return self._bytes <= FEW_BYTES

    async def read(self, next_line: Callable[[], BatchLine | None]) -> tuple[BatchLine | None, int]:
        """The next line, once there is room for it, and the bytes that it holds until they are given back."""
        async with self._line:  # so that only one line is in memory without having room
            line, size = await _in_thread(_weighed, next_line)
            while self._bytes + size > MAX_BATCHES_BYTES:
                self._left.clear()
                await self._left.wait()
            self._bytes += size
        return line, size

    def give_back(self, size: int) -> None:
        self._bytes -= size
        self._left.set()


def _weighed(next_line: Callable[[], BatchLine | None]) -> tuple[BatchLine | None, int]:
    """The next line and the memory that it takes until it is answered, at most all that there is."""
    line = next_line()
    if line is None:
        return None, 0
    try:
        values = memory_of(line.body)
    except ValueError:  # the endpoint will refuse it before it is decoded
        values = 0
    return line, min(_COPIES * len(line.body) + values, MAX_BATCHES_BYTES)


async def _in_thread(work: Callable[..., T], *args: object) -> T:
    """Runs work on files in the thread of all batches."""
    return await asyncio.get_running_loop().run_in_executor(BATCHES, partial(work, *args))


@dataclass(frozen=True, slots=True)
class _Outputs:
    """The files of a batch's answers and of its errors."""

    answers: BatchOutput
    errors: BatchOutput

    def missing(self, lines: BatchInput) -> Iterator[BatchLine]:
        """The lines that are in neither."""
        return (line for line in lines if not (self.answers.has(line) or self.errors.has(line)))

    def write(self, line: BatchLine, answered: Answered) -> None:
        output = self.answers if 200 <= answered.status < 300 else self.errors
        output.answer(line, answered.status, answered.request_id, answered.body)

    def expire(self, opening: AbstractContextManager[BatchInput]) -> None:
        """Says so for each line without an answer."""
        with opening as lines:
            for line in self.missing(lines):
                self.errors.refuse(line, "batch_expired", _EXPIRED)

    def count(self, counts: RequestCounts) -> None:
        counts.completed, counts.failed = self.answers.num_lines, self.errors.num_lines


@asynccontextmanager
async def _opened(store: FileStore, batch: BatchObject) -> AsyncIterator[_Outputs]:
    """Opening reads the files, and closing waits for the disk."""
    opened = ExitStack()
    try:
        answers, errors = [
            await _in_thread(opened.enter_context, BatchOutput.open(store.new(_file_id(batch, kind))))
            for kind in ("output", "error")
        ]
        yield _Outputs(answers, errors)
    finally:
        await _in_thread(opened.close)


def _file_id(batch: BatchObject, kind: str) -> str:
    return f"file-{batch.id.removeprefix('batch_')}{kind}"


@dataclass(frozen=True, slots=True)
class _LineRequests:
    """The lines of a batch that have no answer, as requests that are sent one after another."""

    lines: BatchInput
    todo: Iterator[BatchLine]
    room: Room
    slots: asyncio.Semaphore
    ask: Ask

    async def send_next(self) -> tuple[BatchLine, Answered] | None:
        """The next line, without its body, and its answer; None after the last one.

        Tries again while the server is busy. A line that waits takes no slot and no memory: its body is read again.
        """
        retries, read = Retries(), partial(next, self.todo, None)
        while True:
            line, size = await self.room.read(read)
            if line is None:
                return None
            try:
                async with self.slots:
                    answered = await self.ask(line)
            finally:
                self.room.give_back(size)
            line = replace(line, body=b"")
            delay_s = retries.delay_s(answered.status, answered.body, answered.retry_after)
            if delay_s is None:
                return line, answered
            read = partial(self.lines.again, line)
            await asyncio.sleep(delay_s)


class BatchJob:
    """Runs one batch. `run` may be cancelled at any time; a new job of the same batch goes on where it was."""

    def __init__(
        self,
        batch: BatchObject,
        owner: str,
        store: FileStore,
        ask: Ask,
        check_model: Check,
        room: Room,
        longest_line: int,
    ) -> None:
        self.batch, self.owner = batch, owner
        self._room, self._longest_line = room, longest_line
        self._store, self._ask, self._check_model = store, ask, check_model
        self._working: asyncio.Task[None] | None = None
        self._saved_s = 0.0

    async def run(self, slots: asyncio.Semaphore, at_once: int) -> None:
        """Raises FileInUseError if another server runs the batch."""
        async with _opened(self._store, self.batch) as outputs:
            if self.batch.status == "validating":
                await self._validate()
            if self.batch.status == "in_progress" and not await self._work_in_time(outputs, slots, at_once):
                await _in_thread(outputs.expire, self._input())
            if self.batch.status != "failed":
                await self._finish(outputs)
        if self.batch.output_file_id is None:
            self._store.discard(_file_id(self.batch, "output"))
        if self.batch.error_file_id is None:
            self._store.discard(_file_id(self.batch, "error"))

    async def cancel(self) -> None:
        """Ends the batch with what is answered. Returns at once."""
        if self.batch.status in ("validating", "in_progress"):
            await self._enter("cancelling")
            if self._working is not None:
                self._working.cancel()

    async def fail(self, *errors: BatchError) -> None:
        self.batch.errors = BatchErrors("list", [*errors])
        await self._enter("failed")

    async def _enter(self, status: Literal["in_progress", "failed", "finalizing", "cancelling"]) -> None:
        self.batch.status = status
        setattr(self.batch, f"{status}_at", int(time.time()))
        await self._save()

    async def _save(self) -> None:
        self._saved_s = time.monotonic()
        await self._store.batches.put(self.batch, self.owner)

    async def _validate(self) -> None:
        """The batch fails unless all its lines are requests of its endpoint."""
        models: dict[str | None, int] = {}
        try:
            errors, total = await _in_thread(_check, self._input(), models)
        except BatchFileError:
            errors, total = [BatchError("invalid_file", "The input file was deleted.", "input_file_id")], 0
        for model, number in models.items():
            if wrong := self._check_model(model):
                errors.append(BatchError("model_not_found", wrong, "body.model", number))
        if self.batch.status != "validating":  # it was cancelled meanwhile
            return
        if errors:
            await self.fail(*errors)
            return
        self.batch.model = next(iter(models))
        self.batch.request_counts = RequestCounts(total)
        await self._enter("in_progress")

    def _input(self) -> AbstractContextManager[BatchInput]:
        path = self._store.path(self.batch.input_file_id)
        return BatchInput.open(path, (self.batch.endpoint,), self._longest_line)

    async def _work_in_time(self, outputs: _Outputs, slots: asyncio.Semaphore, at_once: int) -> bool:
        """Answers all lines, or those until the batch is cancelled. Returns False if the batch expires first."""
        self._working = asyncio.create_task(self._work(outputs, slots, at_once))
        try:
            left_s = max(self.batch.expires_at - time.time(), 0)
            done, _ = await asyncio.wait((self._working,), timeout=left_s)
            if done and not self._working.cancelled():
                self._working.result()
            return bool(done)
        finally:
            self._working.cancel()
            await asyncio.wait((self._working,))

    async def _work(self, outputs: _Outputs, slots: asyncio.Semaphore, at_once: int) -> None:
        with self._input() as lines:
            requests = _LineRequests(lines, outputs.missing(lines), self._room, slots, self._ask)
            outputs.count(self.batch.request_counts)
            async with asyncio.TaskGroup() as group:
                for _ in range(at_once):
                    group.create_task(self._take_turns(requests, outputs))

    async def _take_turns(self, requests: _LineRequests, outputs: _Outputs) -> None:
        while (found := await requests.send_next()) is not None:
            outputs.write(*found)
            outputs.count(self.batch.request_counts)
            if time.monotonic() - self._saved_s >= _SAVE_S:
                await self._save()

    async def _finish(self, outputs: _Outputs) -> None:
        cancelled = self.batch.status == "cancelling"
        if not cancelled:
            await self._enter("finalizing")
        outputs.count(self.batch.request_counts)
        self.batch.output_file_id = await self._keep(outputs.answers, "output")
        self.batch.error_file_id = await self._keep(outputs.errors, "error")
        now = int(time.time())
        if cancelled:
            self.batch.status, self.batch.cancelled_at = "cancelled", now
        elif (self.batch.finalizing_at or 0) >= self.batch.expires_at:
            self.batch.status, self.batch.expired_at = "expired", now
        else:
            self.batch.status, self.batch.completed_at = "completed", now
        await self._save()

    async def _keep(self, output: BatchOutput, kind: str) -> str | None:
        """The id of a file with these lines; None if there are none."""
        if not output.num_lines:
            return None
        file_id, name = _file_id(self.batch, kind), f"{self.batch.id}_{kind}.jsonl"
        size = self._store.path(file_id).stat().st_size
        file = FileObject(id=file_id, bytes=size, created_at=int(time.time()), filename=name, purpose="batch_output")
        await self._store.files.put(file, self.owner)
        return file_id

    @property
    def ended(self) -> bool:
        return self.batch.status in TERMINAL


def _check(opening: AbstractContextManager[BatchInput], models: dict[str | None, int]) -> tuple[list[BatchError], int]:
    """The problems of the input, and its number of lines. Collects the models that lines name, with a line each."""
    errors: list[BatchError] = []
    total = 0
    with opening as lines:
        for line in islice(lines, MAX_LINES + 1):
            total += 1
            models.setdefault(line.model, line.number)
            if line.problem and len(errors) < _MAX_ERRORS:
                errors.append(BatchError(line.code, line.problem, None, line.number))
    if not total:
        errors.append(BatchError("empty_file", "The input file has no lines.", "input_file_id"))
    if total > MAX_LINES:
        errors.append(BatchError("too_many_requests", f"The input file has more than {MAX_LINES} lines."))
    return errors, total
