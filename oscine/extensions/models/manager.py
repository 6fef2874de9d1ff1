"""Loads models when requests name them, and takes them out of memory when they are idle or others need the room.

One change is made at a time, in the order in which it was wanted. A model that shall leave gets no further requests;
those that run end first. A model that was loaded serves the requests that waited for it before it can leave. With
--enable-sleep-mode a model that leaves falls asleep, so that it is back soon.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from dataclasses import dataclass, field

from oscine.api.common.asgi import Receive
from oscine.api.common.connection import result_while_connected
from oscine.api.common.errors import APIError, internal, unavailable
from oscine.api.serving.served_model import PullProgress, ServedModel
from oscine.api.serving.service import Service
from oscine.engine.process.client import EngineError
from oscine.extensions.models.engine import DemandEngine
from oscine.extensions.models.memory import ASLEEP_ON_GPU, Room
from oscine.extensions.models.pulls import Pulls
from oscine.extensions.models.sources import Source
from oscine.settings.models import FOREVER, seconds_of

logger = logging.getLogger(__name__)

_LOADED = ("starting", "ready", "restarting")  # states in which an engine has all of its memory
_MAX_ASLEEP = 3  # models for which a loaded one leaves room on the GPU


@dataclass(eq=False)
class Entry:
    """A model on demand."""

    served: ServedModel
    engine: DemandEngine
    source: Source
    keep_s: float
    pinned: bool = False
    weights: int | None = None  # bytes, once they are known
    running: int = 0  # uses of the loaded model
    waiting: list[asyncio.Future[None]] = field(default_factory=list)  # uses until it is loaded
    leaving: bool = False  # new uses wait until it is loaded again
    used_s: float = 0.0  # when it was last used, by time.monotonic
    loading: asyncio.Task[None] | None = None
    timer: asyncio.TimerHandle | None = None
    expires_at: float | None = None  # since 1970
    quiet: asyncio.Event = field(default_factory=asyncio.Event)  # set while `running` is 0

    def __post_init__(self) -> None:
        self.quiet.set()

    @property
    def is_loaded(self) -> bool:
        """Whether it takes a use now."""
        return self.engine.state == "ready" and not self.leaving

    @property
    def is_busy(self) -> bool:
        return bool(self.running or self.served.admission.sequences)

    def begin(self) -> None:
        self.running += 1
        self.quiet.clear()

    def end(self) -> None:
        self.running -= 1
        if not self.running:
            self.quiet.set()

    async def until_quiet(self) -> None:
        while self.is_busy:
            await self.quiet.wait()
            await self.served.admission.wait_empty()

    def settle(self, error: APIError | None = None) -> None:
        """The uses that wait begin, or fail."""
        waiting, self.waiting = self.waiting, []
        for one in waiting:
            if one.done():  # its client has left
                continue
            if error is None:
                self.begin()
                one.set_result(None)
            else:
                one.set_exception(error)


class Manager:
    """A Demand."""

    def __init__(self, service: Service, sources: Sequence[Source], room: Room) -> None:
        self._service, self._sources, self._room = service, sources, room
        self._options = service.config.models
        self._sleeps = service.config.engine.sleep_mode
        self._entries: dict[ServedModel, Entry] = {}
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pulls = Pulls(service.config, self._add)
        self._is_stopping = False

    def open(self) -> None:
        for source in self._sources:
            self._add(source)

    def load_pinned(self) -> None:
        for entry in self._entries.values():
            if entry.pinned:
                self._load_soon(entry)

    def drain(self) -> None:
        """Requests that wait for a model are refused, and none is loaded from now on."""
        self._is_stopping = True
        for entry in self._entries.values():
            entry.settle(unavailable("The server is stopping.", code="draining"))

    async def stop(self) -> None:
        self.drain()
        for entry in self._entries.values():
            _forget_timer(entry)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # ---- a Demand ----

    @asynccontextmanager
    async def use(self, model: ServedModel, receive: Receive | None) -> AsyncIterator[None]:
        entry = self._entries.get(model)
        if entry is None or model.draining:
            yield
            return
        _forget_timer(entry)
        try:
            await self._begin(entry, receive)
            try:
                yield
            finally:
                entry.end()
        finally:
            entry.used_s = time.monotonic()
            self._set_timer(entry)

    def keep(self, model: ServedModel, seconds: float) -> None:
        if (entry := self._entries.get(model)) is not None:
            entry.keep_s = seconds

    def expires_at(self, model: ServedModel) -> float | None:
        entry = self._entries.get(model)
        if entry is None or entry.pinned or entry.keep_s == FOREVER:
            return None
        return entry.expires_at if entry.timer is not None and entry.expires_at else time.time() + entry.keep_s

    async def unload(self, model: ServedModel) -> None:
        if (entry := self._entries.get(model)) is not None:
            async with self._changing:
                await self._put_away(entry, wholly=True)

    async def rest(self, model: ServedModel) -> None:
        """As at the end of its time: it sleeps, where models do."""
        if (entry := self._entries.get(model)) is not None:
            async with self._changing:
                await self._put_away(entry)

    def pull(self, name: str) -> AsyncIterator[PullProgress]:
        return self._pulls.pull(name, self._service.served.find)

    async def delete(self, model: ServedModel) -> None:
        entry = self._entries.get(model)
        source = None if entry is None else entry.source
        self._pulls.check_deletable(source)
        assert entry is not None
        assert source is not None
        async with self._changing:
            if model not in self._entries:
                raise unavailable("The model was deleted.", code="unloaded")
            await self._put_away(entry, wholly=True)
            del self._entries[model]
            _forget_timer(entry)
            entry.settle(unavailable("The model was deleted.", code="unloaded"))
            leaving = self._service.remove(model)
            await asyncio.to_thread(self._pulls.remove, source)
        await leaving

    # ---- loading ----

    def _add(self, source: Source) -> None:
        options = self._options
        engine = DemandEngine(source.options)
        served = self._service.add(engine, source.options, (source.name,))
        served.on_demand = True
        keep_s, pinned = seconds_of(options.keep_alive), source.name in options.pinned_models
        self._entries[served] = Entry(served, engine, source, keep_s, pinned)

    async def _begin(self, entry: Entry, receive: Receive | None) -> None:
        """Raises APIError or ClientLeftError."""
        if entry.is_loaded:
            entry.begin()
            return
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry.waiting.append(place)
        self._load_soon(entry)
        try:
            async with asyncio.timeout(self._options.load_timeout_s):
                await result_while_connected(receive, place)
        except BaseException as error:
            if place.done() and not place.cancelled() and place.exception() is None:
                entry.end()  # it had begun just then
            if isinstance(error, TimeoutError):
                message = f"The model is not loaded after {self._options.load_timeout_s:g} s; others are before it."
                raise unavailable(message, code="loading") from None
            raise

    def _load_soon(self, entry: Entry) -> None:
        if entry.loading is None and not self._is_stopping:
            entry.loading = self._run(self._load(entry))
        elif self._is_stopping:
            entry.settle(unavailable("The server is stopping.", code="draining"))

    async def _load(self, entry: Entry) -> None:
        error: APIError | None = None
        async with self._changing:
            try:
                if entry.pinned or any(not one.done() for one in entry.waiting):
                    await self._bring(entry)
            except (EngineError, ValueError, OSError) as why:
                logger.error("%s cannot be loaded: %s", entry.source.name, why)
                error = unavailable(f"The model cannot be loaded: {why}.", code="load_failed")
            except asyncio.CancelledError:
                error = unavailable("The server is stopping.", code="draining")
                raise
            except Exception:
                logger.exception("%s cannot be loaded", entry.source.name)
                error = internal()
            finally:
                entry.loading = None
                entry.settle(error)
                self._set_timer(entry)

    async def _bring(self, entry: Entry) -> None:
        """Raises EngineError, or ValueError for a model that cannot be served."""
        began_s, state = time.monotonic(), entry.engine.state
        if state in _LOADED:  # loaded again meanwhile, or an engine that died and is started again
            await entry.engine.wait_ready()
            return
        if entry.weights is None:
            entry.weights = await asyncio.to_thread(entry.source.num_bytes)
        await self._make_room(entry)
        if not (state == "asleep" and await self._is_woken(entry)):
            await self._start(entry)
        how = "awake" if state == "asleep" else "loaded"
        logger.info("%s is %s after %.1f s", entry.source.name, how, time.monotonic() - began_s)

    async def _make_room(self, entry: Entry) -> None:
        """Raises ValueError where pinned models leave none."""
        while others := [other for other in self._others(entry) if other.engine.state in _LOADED]:
            most = self._options.max_loaded_models
            gpus = [gpu for other in others for gpu in other.engine.gpus]
            if (most is None or len(others) < most) and self._room.fits(entry.weights, gpus):
                return
            free = [other for other in others if not other.pinned]
            if not free:
                raise ValueError("the models that are pinned leave no room for it")
            await self._put_away(min(free, key=lambda other: (other.is_busy, other.used_s)))

    async def _is_woken(self, entry: Entry) -> bool:
        """Other sleeping models give up what they still have of the GPU, if it is needed."""
        while True:
            try:
                await entry.engine.wake()
                return True
            except EngineError as error:
                if entry.engine.state != "asleep" or not await self._end_oldest_sleeper(entry):
                    logger.warning("%s does not wake up, and is loaded anew: %s", entry.source.name, error)
                    return False

    async def _start(self, entry: Entry) -> None:
        while self._sleeps and not self._room.fits_host(entry.weights) and await self._end_oldest_sleeper(entry):
            pass
        asleep = [other for other in self._others(entry) if other.engine.state == "unloaded"]
        may_sleep = min(len(asleep), _MAX_ASLEEP) if self._sleeps and self._room.on_gpu else 0
        entry.engine.left_bytes = may_sleep * ASLEEP_ON_GPU
        while True:
            try:
                await entry.served.start()
                return
            except (EngineError, ValueError):
                await entry.engine.stop()
                if not await self._end_oldest_sleeper(entry):  # whose memory may have been lacking
                    raise

    async def _end_oldest_sleeper(self, entry: Entry) -> bool:
        """False if no other model sleeps."""
        asleep = [other for other in self._others(entry) if other.engine.state == "asleep"]
        if not asleep:
            return False
        await min(asleep, key=lambda other: other.used_s).engine.stop()
        return True

    def _others(self, entry: Entry) -> list[Entry]:
        return [other for other in self._entries.values() if other is not entry]

    # ---- leaving ----

    async def _put_away(self, entry: Entry, *, wholly: bool = False) -> None:
        """Waits for its requests; new ones wait until it is loaded again. `wholly`: it does not sleep."""
        state = entry.engine.state
        if state == "unloaded" or (state == "asleep" and not wholly):
            return
        entry.leaving = True
        try:
            await entry.until_quiet()
            slept = False
            if self._sleeps and not wholly and entry.engine.state == "ready":
                with suppress(EngineError):
                    slept = await entry.engine.sleep()
            if not slept:
                await entry.engine.stop()
            logger.info("%s %s", entry.source.name, "sleeps" if slept else "is unloaded")
        finally:
            entry.leaving = False
            _forget_timer(entry)
        if any(not one.done() for one in entry.waiting):
            self._load_soon(entry)

    def _set_timer(self, entry: Entry) -> None:
        """From now on the model has the rest of its time, if it is idle."""
        _forget_timer(entry)
        idle = entry.engine.state in _LOADED and not entry.running and not entry.waiting and not entry.pinned
        if idle and entry.keep_s != FOREVER and not self._is_stopping:
            loop = asyncio.get_running_loop()
            entry.expires_at = time.time() + entry.keep_s
            entry.timer = loop.call_later(entry.keep_s, lambda: self._run(self._expire(entry)))

    async def _expire(self, entry: Entry) -> None:
        if entry.served.admission.sequences:  # a response in the background
            await entry.served.admission.wait_empty()
            self._set_timer(entry)
            return
        async with self._changing:
            if not (entry.running or entry.waiting):
                await self._put_away(entry)

    def _run(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work, context=Context())  # not that of the request that wants it
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _forget_timer(entry: Entry) -> None:
    if entry.timer is not None:
        entry.timer.cancel()
        entry.timer = None
