"""A store of evicted pages in host memory whose copies only take time."""

from collections.abc import Sequence

from oscine.extensions.offload.page_files import Key
from oscine.extensions.offload.page_store import FileCopy, SlotCopy
from oscine.extensions.plan.clock.agenda import NS, Clock, ns_of
from oscine.kv_group import KVGroup
from oscine.types import TransferState


class HostJob:
    """Stands for a Job. It ends at its time, whatever becomes of the request."""

    bad_file: int | None = None

    def __init__(self, clock: Clock, begin_ns: int, end_ns: int, num_bytes: int) -> None:
        self.num_bytes, self.seconds = num_bytes, (end_ns - begin_ns) * NS
        self.error: str | None = None
        self._clock, self._end_ns = clock, end_ns

    @property
    def state(self) -> TransferState:
        if self._clock.ns < self._end_ns:
            return "running"
        return "done" if self.error is None else "failed"

    def cancel(self) -> None:
        self.error = self.error or "it was cancelled"


class HostStore:
    """Stands for a PageStore without files. Copies in one direction follow each other."""

    has_files = False
    leftover_bytes = 0

    def __init__(self, groups: Sequence[KVGroup], num_bytes: int, clock: Clock, bytes_per_s: float) -> None:
        """`num_bytes`: of host memory, for the pages of all ranks. Raises ValueError if it holds no page."""
        self.page_bytes = [group.page_bytes for group in groups]
        self.slot_bytes = max(self.page_bytes)
        self.num_slots = num_bytes // self.slot_bytes
        if not self.num_slots:
            raise ValueError(f"--kv-offload-bytes must hold a page of {self.slot_bytes} bytes, not {num_bytes}")
        self.found: list[tuple[int, Sequence[Key], int]] = []
        self._clock, self._bytes_per_s = clock, bytes_per_s
        self._free_ns = {"save": 0, "load": 0}  # when the copies of a direction have ended

    def save(self, copies: Sequence[SlotCopy]) -> HostJob:
        return self._job("save", copies)

    def load_slots(self, copies: Sequence[SlotCopy]) -> HostJob:
        return self._job("load", copies)

    def load_files(self, copies: Sequence[FileCopy]) -> HostJob:
        assert not copies, "there are no files"
        return self._job("load", ())

    def close(self) -> None:
        """Nothing is open."""

    def _job(self, way: str, copies: Sequence[SlotCopy]) -> HostJob:
        num_bytes = sum(self.page_bytes[copy.group] for copy in copies)
        begin_ns = max(self._clock.ns, self._free_ns[way]) if copies else self._clock.ns
        end_ns = begin_ns + ns_of(num_bytes / self._bytes_per_s)
        if copies:
            self._free_ns[way] = end_ns
        return HostJob(self._clock, begin_ns, end_ns, num_bytes)
