"""Adapters in the engine's loop: what is loaded, and which requests get a slot on the device.

An adapter that is unloaded takes no new requests. Its memory is freed when the last request that has it has ended.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from oscine.engine.core.extension import EngineExtension, LoopState, MakeExtension, Progress
from oscine.engine.core.request import Request
from oscine.engine.wire.messages import AdapterNews, LoadAdapter, UnloadAdapter
from oscine.executor.start.build import BuiltExecutor
from oscine.extensions.adapters.slots import AdapterSlots, WaitingRequests
from oscine.settings.adapters import AdapterOptions
from oscine.settings.config import EngineOptions
from oscine.settings.option import OptionError
from oscine.types import AdapterInfo, AdapterPlace, EngineInfo, EngineStats, GenerationRequest

Answer = Callable[[AdapterNews], None]


@dataclass(slots=True)
class _Adapter:
    """One that is loaded."""

    number: int
    info: AdapterInfo
    names: set[str] = field(default_factory=set)
    last_load: int = -1  # the last command that named it, by the number that its sender gave
    num_live: int = 0  # requests that have it, or wait for it
    leaves: bool = False


@dataclass(slots=True)
class _Load:
    """One that is being read."""

    number: int
    command: LoadAdapter
    answer: Answer
    reading: "Future[Any]"


class RuntimeAdapters(EngineExtension):
    def __init__(self, host: Any, options: AdapterOptions) -> None:
        """`host`: a HostAdapters, or what tells those of all ranks. Raises ValueError for one that cannot be loaded."""
        self._host, self._options = host, options
        self._by_identity: dict[str, _Adapter] = {}
        self._loads: list[_Load] = []
        self._num_loads = 0
        self._slots = AdapterSlots(options.max_loras)
        self._waiting = WaitingRequests(self._slots)
        self._waker = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._num_wakes = 0  # of the waker, still to come
        for name, path in options.modules:
            number = self._next_number()
            try:
                read = host.begin(number, path).result()
            except ValueError as error:
                raise OptionError("lora-modules", f"{name}: {error}") from None
            self._take(number, name, path, read)

    def _next_number(self) -> int:
        self._num_loads += 1
        return self._num_loads - 1

    def _take(self, number: int, name: str, path: str, read: Any) -> AdapterInfo:
        """An adapter has been read. One with the same contents may be there."""
        known = self._by_identity.get(read.identity)
        if known is not None:
            self._host.drop(number)
        else:
            info = AdapterInfo(name, path, read.identity, read.rank, read.targets, read.num_bytes)
            known = self._by_identity[read.identity] = _Adapter(number, info)
        known.leaves = False
        known.names.add(name)
        return replace(known.info, name=name, path=path)

    # ---- loading ----

    def command(self, command: Any, answer: Callable[[Any], None]) -> bool:
        match command:
            case LoadAdapter():
                self._load(command, answer)
            case UnloadAdapter():
                self._unload(command)
            case _:
                return False
        return True

    def _load(self, command: LoadAdapter, answer: Answer) -> None:
        most = self._options.max_cpu_loras
        if most is not None and len(self._by_identity) + len(self._loads) >= most:
            why = f"{most} adapters are loaded, as many as --max-cpu-loras allows"
            answer(AdapterNews(command.name, None, why, command.number))
            return
        number = self._next_number()
        reading = self._host.begin(number, command.path)
        self._loads.append(_Load(number, command, answer, reading))
        self._num_wakes += 1
        reading.add_done_callback(lambda _: os.eventfd_write(self._waker, 1))

    def _unload(self, command: UnloadAdapter) -> None:
        adapter = self._by_identity.get(command.identity)
        if adapter is not None and adapter.last_load not in command.unheard:
            adapter.leaves = True
            self._drop_if_unused(adapter)

    def _drop_if_unused(self, adapter: _Adapter) -> None:
        if adapter.leaves and not adapter.num_live:
            self._slots.forget(adapter.number)
            del self._by_identity[adapter.info.identity]
            self._host.drop(adapter.number)

    def _finish_loads(self) -> None:
        for load in [load for load in self._loads if load.reading.done()]:
            self._loads.remove(load)
            name, path = load.command.name, load.command.path
            try:
                info = self._take(load.number, name, path, load.reading.result())
            except Exception as error:
                self._host.drop(load.number)
                why = str(error) if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {error}"
                load.answer(AdapterNews(name, None, " ".join(why.split()), load.command.number))
            else:
                self._by_identity[info.identity].last_load = load.command.number
                load.answer(AdapterNews(name, info, number=load.command.number))

    # ---- requests ----

    def refusal(self, request: GenerationRequest) -> str | None:
        if not request.adapter or request.adapter in self._by_identity:
            return None
        return "the LoRA adapter of this request is not loaded"

    def admit(self, request: Request) -> bool:
        if not request.given.adapter:
            return False
        adapter = self._by_identity[request.given.adapter]
        adapter.num_live += 1
        slot = None if self._waiting.must_wait(adapter.number) else self._slots.take(adapter.number)
        if slot is None:
            self._waiting.add(request, adapter.number)
            return True
        self._waiting.overtaken()
        request.adapter = AdapterPlace(slot, adapter.number)
        return False

    def poll(self, progress: Progress) -> Sequence[Request]:
        self._finish_loads()
        if not self._waiting:
            return ()
        found = self._waiting.admitted()
        for request, number, slot in found:
            request.adapter = AdapterPlace(slot, number)
        return [request for request, _, _ in found]

    @property
    def requests(self) -> list[Request]:
        return list(self._waiting)

    def abandon(self, request: Request) -> bool:
        return self._waiting.remove(request)

    def ended(self, request: Request) -> None:
        if not request.given.adapter:
            return
        adapter = self._by_identity[request.given.adapter]
        adapter.num_live -= 1
        if request.adapter is not None:
            self._slots.leave(request.adapter.number)
            request.adapter = None
        self._drop_if_unused(adapter)

    @property
    def is_busy(self) -> bool:
        if self._num_wakes:
            with suppress(BlockingIOError):
                self._num_wakes -= os.eventfd_read(self._waker)
        return bool(self._loads) and any(load.reading.done() for load in self._loads)

    # ---- the engine's process ----

    def fileno(self) -> int | None:
        return self._waker

    def describe(self, info: EngineInfo) -> EngineInfo:
        loaded = [replace(one.info, name=name) for one in self._by_identity.values() for name in sorted(one.names)]
        return replace(info, adapters=tuple(loaded))

    def count(self, stats: EngineStats) -> None:
        stats.adapters_loaded = len(self._by_identity)
        stats.adapters_running = self._slots.num_used
        stats.adapters_waiting = len(self._waiting)


def of_engine(built: BuiltExecutor, options: EngineOptions) -> MakeExtension:
    def make(loop: LoopState) -> RuntimeAdapters:
        return RuntimeAdapters(built.adapters, options.adapters)

    return make
