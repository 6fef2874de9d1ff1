"""Background responses, made without a waiting client: started, read while they grow, cancelled."""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from oscine.api.common.asgi import Write
from oscine.api.common.errors import unavailable
from oscine.extensions.apis.responses.events import ResponseEvents
from oscine.extensions.apis.responses.resource import interrupted
from oscine.extensions.apis.responses.schemas import ResponseAnswer
from oscine.extensions.apis.responses.store import MEMORY, ResponseStore
from oscine.settings.config import ServerOptions

FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # between attempts to store an ended response; doubled each time


class BackgroundRun(Protocol):
    """The work of one response; see ResponseRun."""

    events: ResponseEvents
    begun: asyncio.Event
    cancelling: bool
    unstored: bool  # it has ended and could not be stored

    @property
    def id(self) -> str: ...

    @property
    def owner(self) -> str: ...

    @property
    def ended(self) -> bool:
        """Whether only its storage and the notification are left."""

    async def run(self, write: Write | None) -> None: ...

    async def store(self) -> bool: ...

    def snapshot(self) -> ResponseAnswer: ...


class BackgroundResponse:
    """One background response, from its start to its end."""

    def __init__(self, run: BackgroundRun) -> None:
        self.run = run
        self._news = asyncio.Condition()
        self._over = False  # whether there will be no more events
        self.task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        try:
            await self.run.run(self._publish)
        finally:
            self._over = True
            await self._publish(b"")

    async def _publish(self, events: bytes) -> None:
        async with self._news:
            self._news.notify_all()

    async def events(self, number: int) -> AsyncIterator[bytes]:
        """The events from a number on, as they come."""
        events = self.run.events
        while True:
            async with self._news:
                while events.num_taken <= number and not self._over:
                    await self._news.wait()
            data, number = events.since(number), events.num_taken
            if data:
                yield data
            if self._over and events.num_taken <= number:
                return

    async def cancel(self, *, by_client: bool) -> None:
        """Cancels it. Returns when it has ended and is stored."""
        if not self.run.ended:
            self.run.cancelling = by_client
            self.task.cancel()
        await asyncio.wait((self.task,))


class BackgroundResponses:
    """The background responses of one server that have not ended or are not stored yet, by id."""

    def __init__(self) -> None:
        self._live: dict[str, BackgroundResponse] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}

    async def start(self, run: BackgroundRun) -> BackgroundResponse:
        """Returns when the run has begun. Raises its error if it cannot begin, and APIError 503 while others wait for
        storage.
        """
        if any(response.run.unstored for response in self._live.values()):
            raise unavailable("Earlier responses are not stored yet; no other is begun.", code="storage_unavailable")
        response = BackgroundResponse(run)
        self._live[run.id] = response
        self._keepers[run.id] = asyncio.create_task(self._keep(response))
        begun = asyncio.ensure_future(run.begun.wait())
        await asyncio.wait((response.task, begun), return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if not run.begun.is_set():
            await response.task
        return response

    async def _keep(self, response: BackgroundResponse) -> None:
        """Keeps a response until it is stored; one that is not to be stored, until it has ended."""
        run, pause_s = response.run, FIRST_PAUSE_S
        try:
            await asyncio.wait((response.task,))
            while run.unstored:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                await run.store()
        finally:
            del self._live[run.id], self._keepers[run.id]

    async def forget(self, response: BackgroundResponse) -> None:
        """Drops a response that has ended, stored or not."""
        keeper = self._keepers.get(response.run.id)
        if keeper is not None:
            keeper.cancel()
            await asyncio.wait((keeper,))

    def get(self, response_id: str, owner: str) -> BackgroundResponse | None:
        """None for a response of another owner, and for one that has not begun: its id is not known to clients yet."""
        found = self._live.get(response_id)
        return found if found is not None and found.run.owner == owner and found.run.begun.is_set() else None

    async def stop(self) -> None:
        """Ends all responses as failed, and tries one last time to store what is not stored."""
        responses = [*self._live.values()]
        await asyncio.gather(*(response.cancel(by_client=False) for response in responses))
        await asyncio.gather(*map(self.forget, responses))
        await asyncio.gather(*(response.run.store() for response in responses if response.run.unstored))


class KeptResponses:
    """The responses of a server: stored ones, and those that run in the background."""

    def __init__(self, options: ServerOptions) -> None:
        path = options.responses_db or MEMORY
        self.store = ResponseStore(path, options.responses_max_bytes, options.responses_max_age)
        self.background = BackgroundResponses()

    async def open(self) -> None:
        """Raises ValueError when the database cannot be used."""
        await self.store.open(interrupted)

    async def stop(self) -> None:
        await self.background.stop()
        await self.store.close()
