"""Responses that are made without a client that waits: started, read while they grow, cancelled."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol

from oscine.api.response_events import ResponseEvents
from oscine.api.sse import Write


class Run(Protocol):
    """What makes one; see ResponseRun."""

    events: ResponseEvents
    begun: asyncio.Event
    cancelling: bool

    @property
    def id(self) -> str: ...

    @property
    def owner(self) -> str: ...

    @property
    def ended(self) -> bool:
        """Whether what is left to do is to store it and to tell."""
        ...

    async def run(self, write: Write | None) -> None: ...

    def snapshot(self) -> dict[str, Any]: ...


class BackgroundResponse:
    """One of them, from its begin to its end."""

    def __init__(self, run: Run) -> None:
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
        """Those from a number on, as they come."""
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
        """Returns when it has ended, and is stored."""
        if not self.run.ended:
            self.run.cancelling = by_client
            self.task.cancel()
        await asyncio.wait((self.task,))


class BackgroundResponses:
    """Those of one server that have not ended, by id."""

    def __init__(self) -> None:
        self._live: dict[str, BackgroundResponse] = {}

    async def start(self, run: Run) -> BackgroundResponse:
        """Returns when it has begun; raises what kept it from that."""
        response = BackgroundResponse(run)
        self._live[run.id] = response
        response.task.add_done_callback(lambda _: self._live.pop(run.id, None))
        begun = asyncio.ensure_future(run.begun.wait())
        await asyncio.wait((response.task, begun), return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if not run.begun.is_set():
            await response.task
        return response

    def get(self, response_id: str, owner: str) -> BackgroundResponse | None:
        """None for another owner's, and before it has begun: then it cannot be known."""
        found = self._live.get(response_id)
        return found if found is not None and found.run.owner == owner and found.run.begun.is_set() else None

    async def stop(self) -> None:
        """Ends them all as failed."""
        await asyncio.gather(*(response.cancel(by_client=False) for response in self._live.values()))
