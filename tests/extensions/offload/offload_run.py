"""A loop on a PagedExecutor with a real PageStore, whose copies are made one per step, when the test says so.

A copy reads and writes pages when it is made, not when it is ordered. So a page that is reused too early has the wrong
content, which a PagedExecutor notices.
"""

import struct
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oscine.engine.core.extension import LoopState
from oscine.engine.core.prefix_index import Medium
from oscine.extensions.offload.manager import Offload
from oscine.extensions.offload.page_files import PageFiles
from oscine.extensions.offload.page_memory import Bytes, PageBytes
from oscine.extensions.offload.page_store import PageStore
from oscine.types import GenerationRequest, SamplingParams
from tests.engine.harness import PAGE, Run
from tests.engine.pool_check import num_available
from tests.extensions.disaggregation.engine_pair import check_pages

PAGE_BYTES = 8 * PAGE
STEP_S = 0.001  # by the clock of copies; by that of the loop a step takes a second


class LatePool:
    """A ThreadPoolExecutor without threads."""

    def __init__(self, tasks: deque[Callable[[], None]]) -> None:
        self._tasks = tasks

    def submit(self, function: Callable[..., None], *arguments: Any) -> "Future[None]":
        future: Future[None] = Future()

        def run() -> None:
            function(*arguments)
            future.set_result(None)

        self._tasks.append(run)
        return future

    def shutdown(self, *, cancel_futures: bool = True) -> None:
        self._tasks.clear()


@dataclass
class PagedMemory:
    """The pages of a PagedExecutor as bytes."""

    run: Run

    def pin(self, memory: Bytes) -> None:
        pass

    def save(self, pages: Sequence[PageBytes]) -> None:
        for group, page, data in pages:
            data[:] = list(struct.pack(f"{PAGE}q", *self.run.executor.memory[group][page]))

    def load(self, pages: Sequence[PageBytes]) -> None:
        for group, page, data in pages:
            self.run.executor.memory[group][page] = list(struct.unpack(f"{PAGE}q", data.tobytes()))


@dataclass
class Events:
    """What a router believes, by medium."""

    known: dict[str, set[bytes]] = field(default_factory=lambda: {"GPU": set(), "CPU": set(), "DISK": set()})

    def stored(self, digests: list[bytes], token_ids: list[int], places: Sequence[int]) -> None:
        self.known["GPU"].update(digests[i] for i in places)

    def removed(self, digests: list[bytes], medium: Medium = "GPU") -> None:
        for digest in digests:
            self.known[medium].remove(digest)

    def offloaded(self, digests: list[bytes], medium: Medium) -> None:
        assert self.known[medium].isdisjoint(digests)
        self.known[medium].update(digests)


@dataclass
class OffloadRun(Run):
    slots: int = 200  # of host memory
    folder: Path | None = None
    disk_bytes: int = 1 << 20
    identity: str = "m"

    def __post_init__(self) -> None:
        self.tasks: deque[Callable[[], None]] = deque()
        self.said: list[str] = []
        files = None if self.folder is None else PageFiles(self.folder, self.identity)
        groups = [replace(group, head_dim=4) for group in self.setting.groups]
        assert groups[0].page_bytes == PAGE_BYTES
        self.store = PageStore(groups, PagedMemory(self), self.slots * PAGE_BYTES, files)
        self.store._loading = self.store._saving = self.store._writing = LatePool(self.tasks)  # type: ignore[assignment]
        self.extensions = [self._offload]
        super().__post_init__()
        (self.offload,) = (one for one in self.loop.extensions if isinstance(one, Offload))
        self.loop.cache.index._root = b"the same in each run"
        self.events = self.loop.cache.index.events = Events()
        self.offload.announce()

    def _offload(self, loop: LoopState) -> Offload:
        return Offload(
            loop,
            self.store,
            step_tokens=self.setting.max_num_batched_tokens,
            disk_bytes=self.disk_bytes,
            report=self.said.append,
            clock=lambda: self.now * STEP_S,
        )

    def step(self) -> None:
        if self.tasks:
            self.tasks.popleft()()
        super().step()

    def ask(self, name: str, prompt: list[int], max_tokens: int = 4, **given: Any) -> int:
        """Runs one request to its end, until nothing is left to do. Returns the tokens of it that were cached."""
        self.submit(GenerationRequest(name, prompt, SamplingParams(max_tokens=max_tokens), **given))
        self.finish()
        return self.cached(name)

    def finish(self) -> None:
        super().finish()
        cache, offload = self.cache, self.offload
        assert cache.holds.num_holds == 0
        assert not offload.loader._arrivals._coming
        assert not offload.kept.host._pins
        assert not offload.kept.disk._pins
        assert len(offload.kept.host) + len(offload.kept.host._free) == self.slots
        known = self.events.known
        assert known["GPU"] == set(cache.index._pages[0])
        assert known["CPU"] == {digest for group, digest in offload.kept.host._slots if group == 0}
        assert known["DISK"] == {digest for group, digest in offload.kept.disk._places if group == 0}

    def check_pages(self) -> None:
        offload = self.offload
        holds = [one.arrival.hold for one in offload.loader._returns if one.arrival.hold is not None]
        holds += [hold for hold, _ in offload.loader._arrivals._draining] + list(self.cache.holds._waiting.values())
        check_pages(self, holds)

    def evict(self) -> None:
        """Everything that is cached."""
        for pool in self.cache.pools:
            for page in pool.allocate(num_available(pool), num_available(pool)):
                pool.release(page)

    def files(self) -> list[Path]:
        assert self.store._files is not None
        return sorted(self.store._files.folder.glob("*.pages"))

    def end(self) -> None:
        """As after kill -9: what was ordered is not done, and the kernel frees the lock."""
        self.tasks.clear()
        self.store.close()
