"""Pages outside the KV cache: numbered slots of host memory, and numbered files. It obeys, and decides nothing.

Orders are carried out by threads of its own, in the order in which they were given, reading before saving and writing.
What a slot or a file holds is known to the caller alone (oscine.extensions.offload).
"""

import mmap
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from oscine.extensions.offload.page_files import Key, PageFiles
from oscine.extensions.offload.page_memory import Bytes, PageBytes, PageMemory
from oscine.kv_group import KVGroup
from oscine.settings.config import EngineOptions
from oscine.types import TransferState

LOADING_THREADS, SAVING_THREADS = 2, 1
_CHUNK_BYTES = 32 << 20  # that one thread copies before another may take its turn


class SlotCopy(NamedTuple):
    """A page of the device, and a slot of host memory."""

    group: int
    page: int
    slot: int


class FileCopy(NamedTuple):
    """A page of the device, and a place in a file."""

    group: int
    page: int
    file: int
    position: int


class Job:
    """Copies that are under way. Slots, files and pages of it must stay what they are until it has ended."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.seconds = 0.0  # of all threads together
        self.error: str | None = None
        self.bad_file: int | None = None  # that was found damaged
        self._parts: list[Future[None]] = []
        self._cancelled = threading.Event()

    @property
    def state(self) -> TransferState:
        if not all(part.done() for part in self._parts):
            return "running"
        return "done" if self.error is None else "failed"

    def cancel(self) -> None:
        """Ends as failed as soon as nothing is being written any more."""
        self._cancelled.set()

    def run(self, pool: ThreadPoolExecutor, part: Callable[[], None], file: int | None = None) -> None:
        self._parts.append(pool.submit(self._run, part, file))

    def _run(self, part: Callable[[], None], file: int | None) -> None:
        if self._cancelled.is_set():
            self.error = self.error or "it was cancelled"
            return
        started_s = time.perf_counter()
        try:
            part()
        except Exception as error:  # whatever it was, the copy must not count as done
            self.error, self.bad_file = f"{type(error).__name__}: {error}", file
            self.cancel()
        self.seconds += time.perf_counter() - started_s


class PageStore:
    """Slots in host memory, and files if there is a folder."""

    def __init__(
        self, groups: Sequence[KVGroup], memory: PageMemory, num_bytes: int, files: PageFiles | None = None
    ) -> None:
        """`num_bytes`: of host memory. Raises ValueError if it holds no page."""
        self.page_bytes = [group.page_bytes for group in groups]
        self.slot_bytes = max(self.page_bytes)
        self.num_slots = num_bytes // self.slot_bytes
        if not self.num_slots:
            raise ValueError(f"--kv-offload-bytes must hold a page of {self.slot_bytes} bytes, not {num_bytes}")
        self._memory, self._files = memory, files
        self._slots = _pinned(memory, self.num_slots, self.slot_bytes)
        self._chunk = max(1, _CHUNK_BYTES // self.slot_bytes)  # pages
        self._buffers: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        for _ in range(0 if files is None else LOADING_THREADS):
            self._buffers.put(_pinned(memory, self._chunk, self.slot_bytes))
        self._loading = ThreadPoolExecutor(LOADING_THREADS, "offload-load")
        self._saving = ThreadPoolExecutor(SAVING_THREADS, "offload-save")
        self._writing = ThreadPoolExecutor(1, "offload-write")
        self.found = [] if files is None else files.scan()
        self._next_file = 1 if files is None else files.next_number

    @property
    def has_files(self) -> bool:
        return self._files is not None

    @property
    def leftover_bytes(self) -> int:
        """Of files of engines that are gone."""
        return 0 if self._files is None else self._files.leftovers.num_bytes

    def save(self, copies: Sequence[SlotCopy]) -> Job:
        """From the device to slots."""
        job = Job(sum(self.page_bytes[copy.group] for copy in copies))
        for some in self._chunks(copies):
            job.run(self._saving, lambda some=some: self._memory.save(self._in_slots(some)))  # type: ignore[misc]
        return job

    def load_slots(self, copies: Sequence[SlotCopy]) -> Job:
        """From slots to the device."""
        job = Job(sum(self.page_bytes[copy.group] for copy in copies))
        for some in self._chunks(copies):
            job.run(self._loading, lambda some=some: self._memory.load(self._in_slots(some)))  # type: ignore[misc]
        return job

    def load_files(self, copies: Sequence[FileCopy]) -> Job:
        """From files to the device."""
        job = Job(sum(self.page_bytes[copy.group] for copy in copies))
        for number in dict.fromkeys(copy.file for copy in copies):
            some = [copy for copy in copies if copy.file == number]
            job.run(self._loading, lambda number=number, some=some: self._load(number, some), number)  # type: ignore[misc]
        return job

    def write(self, pages: Sequence[tuple[Key, int]]) -> tuple[int, Job]:
        """Slots to a new file. Returns its number."""
        files, number = self._files, self._next_file
        assert files is not None
        self._next_file += 1
        content = [(key, self._slots[slot, : self.page_bytes[key[0]]]) for key, slot in pages]
        job = Job(sum(len(data) for _, data in content))
        job.run(self._writing, lambda: files.write(number, content), number)
        return number, job

    def remove(self, number: int) -> None:
        """A file that no job reads."""
        assert self._files is not None
        self._writing.submit(self._files.remove, number)

    def remove_leftover(self) -> None:
        """The oldest folder of an engine that is gone."""
        assert self._files is not None
        self._writing.submit(self._files.leftovers.take_oldest())

    def close(self) -> None:
        """Waits for what has begun, and for files; other copies are dropped."""
        for pool in (self._loading, self._saving):
            pool.shutdown(cancel_futures=True)
        self._writing.shutdown()
        if self._files is not None:
            self._files.close()

    def _load(self, number: int, copies: Sequence[FileCopy]) -> None:
        """Through memory that is allocated once: new memory would cost as much time as the copy."""
        assert self._files is not None
        buffer = self._buffers.get()
        try:
            for some in (copies[i : i + len(buffer)] for i in range(0, len(copies), len(buffer))):
                pages = [
                    PageBytes(copy.group, copy.page, data[: self.page_bytes[copy.group]])
                    for copy, data in zip(some, buffer, strict=False)
                ]
                self._files.read(number, [(copy.position, page.data) for copy, page in zip(some, pages, strict=True)])
                self._memory.load(pages)
        finally:
            self._buffers.put(buffer)

    def _in_slots(self, copies: Sequence[SlotCopy]) -> list[PageBytes]:
        return [PageBytes(group, page, self._slots[slot, : self.page_bytes[group]]) for group, page, slot in copies]

    def _chunks(self, copies: Sequence[SlotCopy]) -> list[Sequence[SlotCopy]]:
        return [copies[i : i + self._chunk] for i in range(0, len(copies), self._chunk)]


def _pinned(memory: PageMemory, count: int, size: int) -> Bytes:
    """[count, size], in huge pages where the system has them."""
    pages = mmap.mmap(-1, count * size)
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(pages, np.uint8).reshape(count, size)
    memory.pin(array)
    return array


def open_store(options: EngineOptions, groups: Sequence[KVGroup], memory: PageMemory, model: str) -> PageStore:
    """The store that the options describe. `model`: what makes equal tokens have equal keys and values.

    The root of the digests belongs to the identity of files: with another one, none of them would ever be found.
    """
    cache, files = options.cache, None
    if cache.kv_offload_dir is not None:
        identity = f"{model} {options.peers.prefix_seed} {[*map(str, groups)]}"
        files = PageFiles(Path(cache.kv_offload_dir), identity)
    assert cache.kv_offload_bytes
    return PageStore(groups, memory, cache.kv_offload_bytes, files)
