"""Pages of host memory on their way to files, and the files of the disk."""

from collections import OrderedDict
from dataclasses import dataclass

from oscine.extensions.offload.kept import Kept
from oscine.extensions.offload.page_files import MAX_PAGES, Key, file_bytes
from oscine.extensions.offload.page_store import Job

_FILE_BYTES = 16 << 20  # of a file, at most
_LEAST_FILES = 4  # that the disk's limit has room for
_RETRY_S = 60.0  # after a failed write


@dataclass(slots=True)
class _Writing:
    job: Job
    number: int
    keys: list[Key]


class DiskWriter:
    def __init__(self, kept: Kept, disk_bytes: int) -> None:
        """`disk_bytes`: of all files. Raises ValueError if that is too little."""
        self._kept, self._disk_bytes = kept, disk_bytes
        self._store, self._host, self._disk = kept.store, kept.host, kept.disk
        self._writing: _Writing | None = None
        self._unwritten: OrderedDict[Key, None] = OrderedDict()  # in host memory, and to be in a file
        self._retry_s = 0.0  # when the disk is written to again
        if kept.store.has_files:
            self._open()

    @property
    def is_writing(self) -> bool:
        return self._writing is not None

    def forget(self, key: Key) -> None:
        """Host memory has it no longer."""
        self._unwritten.pop(key, None)

    @property
    def can_write(self) -> bool:
        """Whether what host memory has will be in files soon."""
        return self._store.has_files and self._kept.clock() >= self._retry_s

    @property
    def has_room(self) -> bool:
        """Whether a file more fits without the loss of another."""
        used = self._disk.num_bytes + self._store.leftover_bytes
        return self.can_write and used + self._disk_bytes // _LEAST_FILES <= self._disk_bytes

    def let_write(self, key: Key) -> None:
        if self._store.has_files and key not in self._disk:
            self._unwritten[key] = None

    def is_written(self, key: Key) -> bool:
        """To a file, unless it need not be."""
        return key not in self._unwritten

    def write(self, is_idle: bool) -> None:
        """The pages that were saved first. A busy engine waits until they fill a file."""
        most_bytes = max(self._store.slot_bytes, min(_FILE_BYTES, self._disk_bytes // _LEAST_FILES))
        most = min(MAX_PAGES, most_bytes // self._store.slot_bytes, max(1, self._store.num_slots // 4))
        if len(self._unwritten) < (1 if is_idle else most):
            return
        keys = [key for key, _ in zip(self._unwritten, range(most), strict=False)]
        size = file_bytes([self._store.page_bytes[group] for group, _ in keys])
        if not self._make_room(size):
            return
        self._host.pin(keys)
        number, job = self._store.write([(key, self._host.slot(key)) for key in keys])
        self._disk.begin(number, size)
        self._writing = _Writing(job, number, keys)

    def end(self) -> None:
        writing = self._writing
        if writing is None or writing.job.state == "running":
            return
        self._writing = None
        self._host.unpin(writing.keys)
        if writing.job.error is not None:
            self._disk.remove(writing.number)
            self._kept.counters.offload_disk_failures += 1
            self._retry_s = self._kept.clock() + _RETRY_S
            self._kept.report(f"KV offload: no page is written for {_RETRY_S:g} s: {writing.job.error}")
            return
        self._kept.rates.disk.assume(writing.job.seconds, writing.job.num_bytes)
        self._disk.complete(writing.number, writing.keys)
        self._kept.tell(writing.keys, "DISK")
        for key in writing.keys:
            del self._unwritten[key]

    def _make_room(self, num_bytes: int) -> bool:
        """Removes files until so many bytes fit the limit. False if those that are left are in use."""
        while self._disk.num_bytes + num_bytes + self._store.leftover_bytes > self._disk_bytes:
            if self._store.leftover_bytes:
                self._store.remove_leftover()
            elif (oldest := self._disk.oldest()) is not None:
                self.drop_file(oldest)
            else:
                return False
        return True

    def drop_file(self, number: int) -> None:
        self._kept.told_lost(self._disk.remove(number), "DISK")
        self._store.remove(number)

    def _open(self) -> None:
        least = file_bytes([self._store.slot_bytes]) * _LEAST_FILES
        if self._disk_bytes < least:
            raise ValueError(f"--kv-offload-disk-bytes must be at least {least} for this model, not {self._disk_bytes}")
        for file in self._store.found:
            self._disk.begin(file.number, file.num_bytes)
            self._disk.complete(file.number, file.keys)
        self._make_room(0)
