"""Requests on their way to the scheduler."""

from collections.abc import Sequence

from oscine.engine.core.extension import EngineExtension, Progress, overrides
from oscine.engine.core.request import Request
from oscine.engine.core.scheduler import Scheduler
from oscine.types import Executor, RemotePrefill


class PendingRequests:
    """Requests that extensions hold, or that the executor cannot take yet. Then the scheduler gets them."""

    def __init__(self, executor: Executor, scheduler: Scheduler, extensions: Sequence[EngineExtension]) -> None:
        self._executor, self._scheduler = executor, scheduler
        self._holders = tuple(one for one in extensions if overrides(one, "admit"))
        self._fetches_prompts = any(one.fetches_prompts for one in extensions)
        self._unprepared: list[Request] = []  # live, but the executor cannot take them yet

    def waiting(self) -> list[Request]:
        """Those that the scheduler does not have yet."""
        return self._unprepared + [request for holder in self._holders for request in holder.requests]

    def add(self, request: Request, first: int = 0) -> None:
        """Queues a request, unless an extension holds it: the `first` of those that may, or one after it."""
        for holder in self._holders[first:]:
            if holder.admit(request):
                return
        source = request.given.prefill
        if source is not None and not self._fetches_prompts:
            request.remote_prefill = RemotePrefill(source.replica, failure="this engine does not fetch pages")
        self._queue(request)

    def remove(self, request: Request) -> bool:
        """A request ends. False if it is not here."""
        if request in self._unprepared:
            self._unprepared.remove(request)
            return True
        return any(holder.abandon(request) for holder in self._holders)

    def poll(self, num_ended: int, num_launched: int) -> None:
        """Queues the requests whose pages or grammars have arrived. `num_ended`, `num_launched`: steps."""
        if self._holders:
            running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
            progress = Progress(num_ended, num_launched, running, waiting)
            for place, holder in enumerate(self._holders, 1):
                for request in holder.poll(progress):
                    self.add(request, place)
        if self._unprepared:
            unprepared, self._unprepared = self._unprepared, []
            for request in unprepared:
                self._queue(request)

    def _queue(self, request: Request) -> None:
        if self._executor.prepare(request.sampling):
            self._scheduler.add(request)
        else:
            self._unprepared.append(request)
