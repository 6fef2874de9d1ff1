"""Requests on the replicas of one model: each is placed, and moved when the replica that had it is gone."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from oscine.engine.wire import messages as wire
from oscine.engine.wire.links import Link
from oscine.engine.wire.stream import EngineDied, EngineError, EngineOverloaded, RequestStream
from oscine.extensions.replicas.client.live_request import LiveRequest
from oscine.extensions.replicas.client.prompt_digests import PromptDigests
from oscine.extensions.replicas.client.reports import Reports
from oscine.extensions.replicas.spec.placement import NoPlace, Place, Placer
from oscine.statistic import counter, seconds, statistic
from oscine.types import GenerationOutput, GenerationRequest

logger = logging.getLogger(__name__)

LONGEST_RETRY_S = 1.0  # between two tries to find a place, or what can be served
_SHORTEST_RETRY_S = 0.1

_CONNECT_S = 5.0  # to hear from the engine at the other end
_IDLE_S = 300.0  # without requests before the connection is given up, or up to twice as long

_NOT_PLACED = "the request could not be placed"
_NOT_IN_TIME = "the engine was lost, and no other one has gone on with the request in time"


@dataclass(frozen=True, slots=True)
class MigrationLimits:
    """What a request may cost, before it ends with an error."""

    max_losses: int = 4  # engines that may break while they have it: perhaps they do because of it
    max_refusals: int = 8  # engines in a row that may be full
    timeout_s: float = 60.0  # without an engine that goes on with it, once it was lost


@dataclass(slots=True)
class MigrationCounters:
    """Of all requests since the start."""

    migrations: int = counter("Requests that went on in another replica, each time", "migrations")
    failures: int = counter("Requests that lost their replica and could not go on", "migration_failures")
    pause_s: float = seconds("Longest pause of each request that moved, added up", "migration_pause_seconds")
    longest_pause_s: float = statistic(0.0, "gauge", "Of all requests that moved", "migration_longest_pause_seconds")


class EngineLink:
    """A connection to one life of one engine, shared by all requests that run there. The first of them opens it."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], place: Place, owner: "Dispatcher", key: str = ""
    ) -> None:
        """Raises ZMQError if the connection is impossible. `key`: see oscine.engine.wire.tcp."""
        self.replica, self.address = place.replica, place.address
        self.was_up = False
        self.broke = False  # once it is closed: whether the engine ended unasked
        self.heard_s = time.monotonic()
        self._owner = owner
        self._requests: dict[str, LiveRequest] = {}  # by their ids in the engine
        self._is_used = False  # since the last look
        self._loop = asyncio.get_running_loop()
        hear = self._on_up, self._receive, self._on_down
        self._link = Link(context, place.address, wire.decode_to_client, *hear, key=key, patient=False)
        self._timer = self._loop.call_later(_CONNECT_S, self._close, "the engine cannot be reached")
        self._link.send(wire.Hello())  # goes first, so that the engine tells this client of its end

    def submit(self, live: LiveRequest, place: Place) -> None:
        live.link = self
        request = live.for_engine(place.prefill)
        self._requests[request.request_id] = live
        self._is_used = True
        self._link.send(wire.Submit(request))

    def cancel(self, live: LiveRequest) -> None:
        self._requests.pop(live.engine_id, None)
        self._link.send(wire.Cancel(live.engine_id))

    def shut(self) -> list[LiveRequest]:
        """Closes without an event for the owner. Returns its requests."""
        self._timer.cancel()
        self._link.close()
        requests, self._requests = list(self._requests.values()), {}
        return requests

    def _look(self) -> None:
        """Gives up a connection that had no request since the last look."""
        if self._requests or self._is_used:
            self._is_used = False
            self._timer = self._loop.call_later(_IDLE_S, self._look)
        else:
            self._close(None)

    def _close(self, error: str | None, *, asked: bool = False) -> None:
        self.broke = self.was_up and error is not None and not asked
        self._owner.link_closed(self, error, self.shut())

    def _on_up(self) -> None:
        self.was_up = True
        self._timer.cancel()
        self._look()

    def _on_down(self) -> None:
        self._close("the connection to the engine broke")

    def _receive(self, message: wire.ToClient) -> None:
        self.heard_s = time.monotonic()
        match message:
            case wire.Outputs():
                self._deliver(message.outputs)
                if message.stats is not None:
                    self._owner.reports.take(self.address, message.stats)
            case wire.Refused():
                live = self._requests.pop(message.request_id, None)
                if live is not None:
                    self._owner.refused(self, live, message.message)
            case wire.Ending():
                self._close(message.message, asked=message.asked)
            case wire.Failed():
                self._close(message.message)

    def _deliver(self, outputs: list[GenerationOutput]) -> None:
        requests = self._requests
        for output in outputs:
            live = requests.get(output.request_id)
            if live is None:
                continue  # cancelled while the output was under way
            finished = output.finish_reason is not None
            if finished:
                del requests[output.request_id]
            live.take(output)
            if finished:
                self._owner.ended(live)


class Dispatcher:
    """The live requests of one model, and the links to the engines that have them."""

    def __init__(
        self,
        placer: Placer,
        model: str,
        digests: PromptDigests,
        *,
        key: str,
        limits: MigrationLimits,
        on_placed: Callable[[str | None], None],
    ) -> None:
        """`on_placed` is told why a request got no place, or None once one has got a place."""
        self.migrations, self.reports = MigrationCounters(), Reports()
        self.num_broken = 0  # replicas that had requests and were lost
        self._placer, self._model, self._digests = placer, model, digests
        self._key, self._limits, self._on_placed = key, limits, on_placed
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None  # made by open()
        self._links: dict[str, EngineLink] = {}  # by address
        self._live: dict[str, LiveRequest] = {}

    def open(self) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))  # a link has two

    def close(self) -> None:
        for link in self._links.values():
            link.shut()
        self._links.clear()
        if self._context is not None:
            self._context.term()

    def submit(self, request: GenerationRequest) -> RequestStream:
        request_id = request.request_id
        if request_id in self._live:
            raise ValueError(f"request id {request_id!r} is in use")
        stream = RequestStream(request_id, self.abandon)
        live = LiveRequest(request, stream, self._digests.of(request))
        self._live[request_id] = live
        self._seek(live)
        return stream

    def abandon(self, request_id: str) -> LiveRequest | None:
        """Nothing of the request is left, in any state."""
        live = self._live.pop(request_id, None)
        if live is not None:
            live.withdraw()
            self._count(live)
        return live

    def fail_all(self, error: str) -> None:
        for live in list(self._live.values()):
            self._fail(live, EngineDied(error))

    # ---- finding a place ----

    def _seek(self, live: LiveRequest) -> None:
        live.asked_s = time.perf_counter()
        live.seating = asyncio.create_task(self._seat(live))

    async def _seat(self, live: LiveRequest) -> None:
        """Until an engine has the request, or its time is over."""
        try:
            place = await _find_place(self._placer, self._model, live)
            live.enter(place)
            self._link_to(place).submit(live, place)
        except NoPlace as no:
            live.seating = None
            self._on_placed(None if no.overloaded else no.message)
            kind = EngineOverloaded if no.overloaded else EngineDied
            self._fail(live, kind(no.message, retry_after_s=no.retry_after_s))
        except Exception:
            logger.exception("a request could not be placed")
            live.seating = None
            self._fail(live, EngineDied(_NOT_PLACED))
        else:
            live.seating = None
            self._on_placed(None)

    def _link_to(self, place: Place) -> EngineLink:
        link = self._links.get(place.address)
        if link is None:
            assert self._context is not None
            link = self._links[place.address] = EngineLink(self._context, place, self, self._key)
        return link

    # ---- losing one ----

    def refused(self, link: EngineLink, live: LiveRequest, message: str) -> None:
        """The engine is full."""
        live.fails_at(link.replica, link.heard_s)
        if live.misses > self._limits.max_refusals:
            self._fail(live, EngineOverloaded(message))
        else:
            self._seek(live)

    def link_closed(self, link: EngineLink, error: str | None, requests: list[LiveRequest]) -> None:
        """`requests` have ended there. Without an error, the link was idle for long."""
        del self._links[link.address]
        if error is None:
            self.reports.rest(link.address)
            return
        self.reports.end(link.address)
        logger.warning("%s: %s; %d requests go elsewhere", link.replica, error, len(requests))
        self.num_broken += link.broke
        for live in requests:
            live.fails_at(link.replica, link.heard_s)
            live.losses += link.broke
            live.moves += link.was_up
            self._migrate(live, link, error)

    def _migrate(self, live: LiveRequest, link: EngineLink, error: str) -> None:
        """From `link` to the next place, unless too many broke or it takes too long."""
        now = time.monotonic()
        if live.deadline_s is None:
            live.deadline_s = now + self._limits.timeout_s
        if live.losses > self._limits.max_losses:
            self._fail(live, EngineDied(f"{error}; {live.losses} engines broke while they had this request"))
        elif now > live.deadline_s:
            self._fail(live, EngineDied(_NOT_IN_TIME))
        else:
            self.migrations.migrations += link.was_up
            request, known = live.request, live.request.prompt_token_ids + live.generated
            live.digests = self._digests.extended(live.digests, known, request.cache_salt, request.adapter)
            self._seek(live)

    # ---- the end of a request ----

    def ended(self, live: LiveRequest) -> None:
        """Its last output has come."""
        del self._live[live.request.request_id]
        self._count(live)

    def _fail(self, live: LiveRequest, error: EngineError) -> None:
        del self._live[live.request.request_id]
        self.migrations.failures += live.moves > 0
        live.withdraw()
        self._count(live)
        live.stream.fail(error)

    def _count(self, live: LiveRequest) -> None:
        live.leave()
        self.migrations.pause_s += live.pause_s
        self.migrations.longest_pause_s = max(self.migrations.longest_pause_s, live.pause_s)


async def _find_place(placer: Placer, model: str, live: LiveRequest) -> Place:
    """Raises NoPlace: at once for a request that comes, in the end for one that has lost its engine."""
    if live.misses > 1:
        await asyncio.sleep(min(_SHORTEST_RETRY_S * live.misses, LONGEST_RETRY_S))
    if live.deadline_s is None:
        return await placer.place(live.placement(model))
    refusal = NoPlace(_NOT_IN_TIME, retry_after_s=LONGEST_RETRY_S, overloaded=False)
    try:
        async with asyncio.timeout(live.deadline_s - time.monotonic()):
            while True:
                try:
                    return await placer.place(live.placement(model))
                except NoPlace as no:
                    refusal = no
                except Exception:
                    logger.exception("a request could not be placed; it is tried again")
                    refusal = NoPlace(_NOT_PLACED, retry_after_s=LONGEST_RETRY_S, overloaded=False)
                await asyncio.sleep(retry_s(refusal))
    except TimeoutError:
        raise refusal from None


def retry_s(no: NoPlace) -> float:
    return min(max(no.retry_after_s, _SHORTEST_RETRY_S), LONGEST_RETRY_S)
