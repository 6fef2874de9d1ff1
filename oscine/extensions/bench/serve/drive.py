"""One client process: sends the requests of its sessions as their arrival says, and records the answers."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from oscine.extensions.bench.serve.answer import Answer, Counters, Record
from oscine.extensions.bench.serve.api import Api
from oscine.extensions.bench.serve.arrival import Arrival
from oscine.extensions.bench.serve.connection import Connection
from oscine.extensions.bench.serve.load import Session, Turn
from oscine.extensions.bench.serve.target import Target

NUM_COUNTERS = 3
TOKENS, DONE, FAILED = range(NUM_COUNTERS)  # what the counters count


@dataclass(frozen=True, slots=True)
class Client:
    """How requests are made."""

    target: Target
    api: Api
    model: str
    extra: dict[str, Any] = field(default_factory=dict)  # parameters of every request
    timeout_s: float = 3600.0  # of one answer
    think_s: float = 0.0  # from an answer to the next turn of its session

    def request(self, turn: Turn, history: list[str]) -> bytes:
        return self.target.request(self.api.path, self.api.body(self.model, turn, history, self.extra))


@dataclass(frozen=True, slots=True)
class Job:
    session: Session
    first: bytes  # the request of the first turn, ready to be sent
    offset_s: float  # from the start of the measurement


class Driver:
    """`counters` may be memory that another process reads."""

    def __init__(self, client: Client, counters: Counters) -> None:
        self._client, self._counters = client, counters
        self._tls = client.target.tls()
        self._idle: list[Connection] = []
        self._records: list[Record] = []

    async def drive(self, jobs: Sequence[Job], arrival: Arrival, start_s: float) -> list[Record]:
        """Sends the sessions from `start_s` on, a time of time.perf_counter(). Returns a record per request."""
        if arrival.rate is None:
            assert arrival.concurrency
            await _until(start_s)
            turns = iter(jobs)
            await asyncio.gather(*(self._take_turns(turns) for _ in range(min(arrival.concurrency, len(jobs)))))
        else:
            room = asyncio.Semaphore(arrival.concurrency) if arrival.concurrency else None
            await self._arrive(jobs, room, start_s)
        for connection in self._idle:
            connection.close()
        return self._records

    async def _take_turns(self, jobs: Any) -> None:
        for job in jobs:
            await self._hold(job, None)

    async def _arrive(self, jobs: Sequence[Job], room: asyncio.Semaphore | None, start_s: float) -> None:
        async def enter(job: Job) -> None:
            async with room or nullcontext():
                await self._hold(job, start_s + job.offset_s)

        async with asyncio.TaskGroup() as group:
            for job in jobs:
                await _until(start_s + job.offset_s)
                group.create_task(enter(job))

    async def _hold(self, job: Job, due_s: float | None) -> None:
        """A whole session. It ends where a turn fails: the next one would not be what was meant."""
        request, history = job.first, []
        for index, turn in enumerate(job.session):
            is_last = index + 1 == len(job.session)
            sent_s = time.perf_counter()
            answer = Answer(self._client.api, Record(due_s or sent_s, sent_s), self._counters, keep=not is_last)
            await self._ask(request, answer)
            if is_last or answer.record.error:
                return
            history += [str(turn.prompt), self._client.api.text(answer.kept)]
            request, due_s = self._client.request(job.session[index + 1], history), None
            if self._client.think_s:
                await asyncio.sleep(self._client.think_s)

    async def _ask(self, request: bytes, answer: Answer) -> None:
        record = answer.record
        try:
            async with asyncio.timeout(self._client.timeout_s):
                await self._exchange(request, answer)
            answer.finish()
        except TimeoutError:
            record.error = f"no end within {self._client.timeout_s:g} s"
        except (OSError, ValueError) as error:
            record.error = str(error) or type(error).__name__
        self._records.append(record)
        self._counters[FAILED if record.error else DONE] += 1

    async def _exchange(self, request: bytes, answer: Answer) -> None:
        connection, is_new = await self._connection()
        try:
            await connection.ask(request, answer)
        except ConnectionError:
            if is_new or answer.begun:
                raise
            connection = await self._connect()  # the server had closed an idle connection
            await connection.ask(request, answer)
        if connection.is_open:
            self._idle.append(connection)

    async def _connection(self) -> tuple[Connection, bool]:
        """A connection, and whether it is new."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection, False
        return await self._connect(), True

    async def _connect(self) -> Connection:
        target = self._client.target
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, target.host, target.port, ssl=self._tls)
        return connection


async def _until(time_s: float) -> None:
    left_s = time_s - time.perf_counter()
    if left_s > 0:
        await asyncio.sleep(left_s)
