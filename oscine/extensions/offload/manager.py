"""Keeps what the cache evicts in host memory and on disk, and brings it back for requests that need it.

Decides only; PageStore copies. Everything is called by the loop, on its thread, and nothing here waits. Decision 24 has
the reasons. Saver, DiskWriter and Loader each have a way of a page: to host memory, to files, and back.

A request stays here from its arrival until its pages are back. Then it is queued like any other, and finds an ordinary
prefix hit. If anything fails, it is queued too, and computed.
"""

import sys
import time
from collections.abc import Callable

from oscine.engine.core.extension import EngineExtension, LoopState, MakeExtension, Progress
from oscine.engine.core.request import Request
from oscine.executor.start.build import BuiltExecutor
from oscine.extensions.offload.disk_writer import DiskWriter
from oscine.extensions.offload.kept import Kept, Report
from oscine.extensions.offload.loader import Loader
from oscine.extensions.offload.page_store import PageStore
from oscine.extensions.offload.saver import Saver
from oscine.settings.config import EngineOptions
from oscine.types import EngineStats, StepPlan

_LOOK_S = 0.001  # between looks while an engine that stops saves the rest


class Offload(EngineExtension):
    """Not thread-safe."""

    def __init__(
        self,
        loop: LoopState,
        store: PageStore,
        *,
        step_tokens: int,
        disk_bytes: int = 0,
        report: Report = print,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`step_tokens`: most tokens of a step. `disk_bytes`: of all files. Raises ValueError if that is too little."""
        self.kept = Kept(loop, store, report, clock)
        self.writer = DiskWriter(self.kept, disk_bytes)
        self.saver = Saver(self.kept, self.writer, loop.cache.num_pages(step_tokens))
        self.loader = Loader(self.kept, self.writer)
        self._is_settled = False  # nothing is left to do while the engine is idle
        loop.cache.on_evict = self.saver.spoil

    @property
    def requests(self) -> list[Request]:
        """Those that are here."""
        return self.loader.requests

    @property
    def is_busy(self) -> bool:
        """Whether poll() must be called though there is no request."""
        return self.loader.is_draining or not self._is_settled

    def announce(self) -> None:
        """Tells the readers of events what is on the disk."""
        self.kept.tell(self.kept.disk.keys, "DISK")

    def count(self, stats: EngineStats) -> None:
        host, disk = self.kept.host, self.kept.disk
        stats.offload_host_pages, stats.offload_host_bytes = len(host), len(host) * self.kept.store.slot_bytes
        stats.offload_disk_pages, stats.offload_disk_bytes = len(disk), disk.num_bytes

    def after_step(self, plan: StepPlan, num_drafted: int, seconds: float, *, in_vain: bool) -> None:
        self.kept.rates.note_step(plan, seconds)
        self.saver.note_step()
        self._is_settled = False

    def admit(self, request: Request) -> bool:
        """Whether a request that has just arrived waits for pages. If not, it lacks none, or is better computed."""
        is_here = self.loader.admit(request)
        self._is_settled = self._is_settled and not is_here
        return is_here

    def abandon(self, request: Request) -> bool:
        """A request ends. False if it is not here."""
        return self.loader.abandon(request)

    def poll(self, progress: Progress) -> list[Request]:
        """Goes on wherever something can be done. Returns requests that can be queued."""
        num_ended, num_launched, num_running, num_waiting = progress
        self.loader.poll(num_ended, num_ended + num_launched)
        is_idle = not (num_launched or num_running or num_waiting or self.loader.is_busy)
        self.saver.end()
        self.writer.end()
        if not self.saver.is_saving:
            if is_idle:
                self.saver.save_all()
            else:
                self.saver.save_next()
        if not self.writer.is_writing and self.writer.can_write:
            self.writer.write(is_idle)
        busy = self.saver.is_saving or self.writer.is_writing or self.saver.has_idle_pages
        self._is_settled = is_idle and not busy
        return self.loader.take_ready()

    def flush(self, limit_s: float) -> None:
        """Saves what an idle engine would, for so long at most, and ends."""
        end_s = time.monotonic() + limit_s
        self._is_settled = not self.kept.store.has_files
        while self.is_busy and time.monotonic() < end_s:
            self.poll(Progress(0, 0, 0, 0))
            time.sleep(_LOOK_S)
        self.kept.store.close()


def of_engine(built: BuiltExecutor, options: EngineOptions) -> MakeExtension:
    """Where the options want evicted pages kept. Raises ValueError for a limit of the disk that no file fits."""

    def report(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    store, tokens = built.store, options.scheduler.max_num_batched_tokens
    assert store is not None
    disk_bytes = options.cache.kv_offload_disk_bytes
    return lambda loop: Offload(loop, store, step_tokens=tokens, disk_bytes=disk_bytes, report=report)
