"""All replicas of one model as one engine: places each request, and moves it when the replica that had it is gone."""

import asyncio
import logging
import time
from dataclasses import dataclass

import zmq

from oscine.engine.core.prefix_index import extend_digests, root_of, salted
from oscine.engine.process.client import EngineState
from oscine.engine.wire import messages as wire
from oscine.engine.wire.links import Link
from oscine.engine.wire.stream import EngineDied, EngineError, EngineOverloaded, RequestStream
from oscine.extensions.replicas.client.live_request import LiveRequest
from oscine.extensions.replicas.client.reports import Reports
from oscine.extensions.replicas.spec.placement import NoPlace, Place, Placer
from oscine.statistic import counter, seconds, statistic
from oscine.types import EngineInfo, EngineStats, GenerationOutput, GenerationRequest

logger = logging.getLogger(__name__)

_REFRESH_S = 10.0  # between two looks at what is served: a rolling update may have changed it
_SHORTEST_RETRY_S, _LONGEST_RETRY_S = 0.1, 1.0  # between two tries to find a place, or what can be served

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
        self, context: zmq.Context[zmq.Socket[bytes]], place: Place, owner: "ClusterEngine", key: str = ""
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
                    self._owner.reported(self, message.stats)
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


class ClusterEngine:
    """Implements oscine.engine.process.client.Engine.

    Ready as soon as the model can be served, even where no replica runs just now. An engine that breaks, is full or
    goes away costs its streams a pause: they go on elsewhere from the tokens that they have.
    """

    def __init__(
        self,
        placer: Placer,
        model: str,
        *,
        prefix_seed: str = "",
        key: str = "",
        limits: MigrationLimits | None = None,
    ) -> None:
        """`model`: its name for the placer. `prefix_seed`, `key`: the same as those of its engines."""
        self.state: EngineState = "starting"
        self.error: str | None = None
        self.info: EngineInfo | None = None
        self.migrations = MigrationCounters()
        self._placer, self._model = placer, model
        self._root = root_of(prefix_seed) if prefix_seed else None
        self._key = key
        self._limits = limits or MigrationLimits()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None  # made by start()
        self._links: dict[str, EngineLink] = {}  # by address
        self._live: dict[str, LiveRequest] = {}
        self._reports = Reports()
        # The last prompt, its length, its salt and its digests: choices share theirs.
        self._prompt: tuple[list[int], int, str, list[bytes]] = ([], 0, "", [])
        self._num_broken = 0  # replicas that had requests and were lost
        self._discovering: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # set once the state is not "starting" any more

    @property
    def restarts(self) -> int:
        """Replicas that were lost."""
        return self._num_broken

    @property
    def gpus(self) -> tuple[str, ...]:
        """None: the replicas may be on other machines."""
        return ()

    @property
    def stats(self) -> EngineStats:
        """Of all replicas that this ingress has a link to, added up."""
        return self._reports.total()

    async def start(self) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))  # a link has two
        self._discovering = asyncio.create_task(self._discover())

    async def stop(self) -> None:
        if self.state == "stopped":
            return
        self._end("stopped", "the engine was stopped")
        for link in self._links.values():
            link.shut()
        self._links.clear()
        if self._context is not None:
            self._context.term()

    def give_up(self, error: str) -> None:
        """No engine will ever serve again."""
        if self.state not in ("stopped", "failed"):
            self._end("failed", error)

    def _end(self, state: EngineState, error: str) -> None:
        self._enter(state, error)
        if self._discovering is not None:
            self._discovering.cancel()
        for live in list(self._live.values()):
            self._fail(live, EngineDied(error))

    async def wait_ready(self) -> EngineInfo:
        await self._changed.wait()
        if self.info is None or self.state != "ready":
            raise EngineError(self.error)
        return self.info

    def submit(self, request: GenerationRequest) -> RequestStream:
        if self.state != "ready":
            raise EngineDied(self.error or "the cluster is starting")
        request_id = request.request_id
        if request_id in self._live:
            raise ValueError(f"request id {request_id!r} is in use")
        stream = RequestStream(request_id, self._abandon)
        live = LiveRequest(request, stream, self._digests(request))
        self._live[request_id] = live
        self._seek(live)
        return stream

    def cancel(self, request_id: str) -> None:
        live = self._abandon(request_id)
        if live is not None:
            live.stream.put(GenerationOutput(request_id, finish_reason="cancelled"))

    async def _discover(self) -> None:
        while True:
            await asyncio.sleep(await self._describe())

    async def _describe(self) -> float:
        """Returns the seconds until another look; until then what was known before is true enough."""
        try:
            info = await self._placer.describe(self._model)
        except NoPlace as no:
            if self.state == "starting":
                self.error = no.message
                return _retry_s(no)
        except Exception:
            logger.exception("it is not known what %s is", self._model)
            if self.state == "starting":
                return _LONGEST_RETRY_S
        else:
            self.info, self._prompt = info, ([], 0, "", [])
            if self.state == "starting":
                self._enter("ready", None)
        return _REFRESH_S

    def _enter(self, state: EngineState, error: str | None) -> None:
        self.state, self.error = state, error
        self._changed.set()

    def _digests(self, request: GenerationRequest) -> list[bytes]:
        prompt, salt = request.prompt_token_ids, request.cache_salt
        known, length, known_salt, _ = self._prompt
        if prompt is not known or (len(prompt), salt) != (length, known_salt):
            self._prompt = (prompt, len(prompt), salt, self._extended([], prompt, salt))
        return self._prompt[3]

    def _extended(self, digests: list[bytes], tokens: list[int], salt: str) -> list[bytes]:
        """The digests of all whole pages of `tokens`, of which `digests` has some."""
        assert self.info is not None
        longer = digests.copy()
        if self._root is not None:
            size, root = self.info.page_size, salted(self._root, salt)
            extend_digests(longer, tokens, len(tokens) // size, page_size=size, root=root)
        return longer

    # ---- finding a place ----

    def _seek(self, live: LiveRequest) -> None:
        live.asked_s = time.perf_counter()
        live.seating = asyncio.create_task(self._seat(live))

    async def _seat(self, live: LiveRequest) -> None:
        """Until an engine has the request, or its time is over."""
        try:
            place = await self._find_place(live)
            live.enter(place)
            self._link_to(place).submit(live, place)
        except NoPlace as no:
            live.seating = None
            self.error = None if no.overloaded else no.message
            kind = EngineOverloaded if no.overloaded else EngineDied
            self._fail(live, kind(no.message, retry_after_s=no.retry_after_s))
        except Exception:
            logger.exception("a request could not be placed")
            live.seating = None
            self._fail(live, EngineDied(_NOT_PLACED))
        else:
            self.error = live.seating = None

    async def _find_place(self, live: LiveRequest) -> Place:
        """Raises NoPlace: at once for a request that comes, in the end for one that has lost its engine."""
        if live.misses > 1:
            await asyncio.sleep(min(_SHORTEST_RETRY_S * live.misses, _LONGEST_RETRY_S))
        if live.deadline_s is None:
            return await self._placer.place(live.placement(self._model))
        refusal = NoPlace(_NOT_IN_TIME, retry_after_s=_LONGEST_RETRY_S, overloaded=False)
        try:
            async with asyncio.timeout(live.deadline_s - time.monotonic()):
                while True:
                    try:
                        return await self._placer.place(live.placement(self._model))
                    except NoPlace as no:
                        refusal = no
                    except Exception:
                        logger.exception("a request could not be placed; it is tried again")
                        refusal = NoPlace(_NOT_PLACED, retry_after_s=_LONGEST_RETRY_S, overloaded=False)
                    await asyncio.sleep(_retry_s(refusal))
        except TimeoutError:
            raise refusal from None

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

    def reported(self, link: EngineLink, stats: EngineStats) -> None:
        self._reports.take(link.address, stats)

    def link_closed(self, link: EngineLink, error: str | None, requests: list[LiveRequest]) -> None:
        """`requests` have ended there. Without an error, the link was idle for long."""
        del self._links[link.address]
        if error is None:
            self._reports.rest(link.address)
            return
        self._reports.end(link.address)
        logger.warning("%s: %s; %d requests go elsewhere", link.replica, error, len(requests))
        self._num_broken += link.broke
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
            if self._root is not None:
                known, salt = live.request.prompt_token_ids + live.generated, live.request.cache_salt
                live.digests = self._extended(live.digests, known, salt)
            self._seek(live)

    # ---- the end of a request ----

    def ended(self, live: LiveRequest) -> None:
        """Its last output has come."""
        del self._live[live.request.request_id]
        self._count(live)

    def _abandon(self, request_id: str) -> LiveRequest | None:
        """Nothing of the request is left, in any state."""
        live = self._live.pop(request_id, None)
        if live is not None:
            self._leave(live)
            self._count(live)
        return live

    def _leave(self, live: LiveRequest) -> None:
        if live.seating is not None:
            live.seating.cancel()
        if live.link is not None:
            live.link.cancel(live)

    def _fail(self, live: LiveRequest, error: EngineError) -> None:
        del self._live[live.request.request_id]
        self.migrations.failures += live.moves > 0
        self._leave(live)
        self._count(live)
        live.stream.fail(error)

    def _count(self, live: LiveRequest) -> None:
        live.leave()
        self.migrations.pause_s += live.pause_s
        self.migrations.longest_pause_s = max(self.migrations.longest_pause_s, live.pause_s)


def _retry_s(no: NoPlace) -> float:
    return min(max(no.retry_after_s, _SHORTEST_RETRY_S), _LONGEST_RETRY_S)
