"""Requests that wait for pages, and these pages on their way back to the cache."""

from dataclasses import dataclass

from oscine.engine.core.arrivals import Arrival, Arrivals
from oscine.engine.core.request import Request
from oscine.extensions.offload.disk_writer import DiskWriter
from oscine.extensions.offload.kept import Kept
from oscine.extensions.offload.page_files import Key
from oscine.extensions.offload.page_store import FileCopy, Job, SlotCopy
from oscine.extensions.offload.worth import Found, Worth
from oscine.types import TransferState


@dataclass(slots=True)
class _Loading:
    """Pages on their way back."""

    host: Job
    disk: Job
    host_keys: list[Key]
    files: list[int]
    num_host: int = 0  # pages
    num_disk: int = 0

    @property
    def state(self) -> TransferState:
        states = {self.host.state, self.disk.state}
        if "failed" in states:
            self.cancel()
        return "running" if "running" in states else "failed" if "failed" in states else "done"

    def cancel(self) -> None:
        self.host.cancel()
        self.disk.cancel()

    def note(self, kept: Kept) -> None:
        """The pages have come: counts them, and learns how long they took."""
        counters = kept.counters
        counters.offload_host_hits += self.num_host
        counters.offload_host_s += self.host.seconds
        counters.offload_disk_hits += self.num_disk
        counters.offload_disk_s += self.disk.seconds
        for rate, job in ((kept.rates.host, self.host), (kept.rates.disk, self.disk)):
            if job.num_bytes:
                rate.note(job.seconds, job.num_bytes)


@dataclass(slots=True, eq=False)
class _Return:
    """A request and its pages."""

    found: Found
    loading: _Loading | None = None

    @property
    def arrival(self) -> Arrival:
        return self.found.arrival

    @property
    def request(self) -> Request:
        return self.arrival.request


class Loader:
    def __init__(self, kept: Kept, writer: DiskWriter) -> None:
        self._kept, self._writer = kept, writer
        self._cache, self._store, self._host, self._disk = kept.cache, kept.store, kept.host, kept.disk
        self._arrivals, self._worth = Arrivals(kept.cache), Worth(kept)
        self._returns: list[_Return] = []
        self._ready: list[Request] = []

    @property
    def is_draining(self) -> bool:
        """Whether copies of requests that ended still run."""
        return self._arrivals.is_draining

    @property
    def is_busy(self) -> bool:
        """Whether a request waits for pages."""
        return bool(self._returns)

    def poll(self, num_ended: int, fence: int) -> None:
        """`num_ended`: steps; `fence`: steps that have been launched."""
        if self._arrivals.is_draining:
            self._arrivals.drain()
        if self._returns:
            self._bring_back(num_ended, fence)

    def take_ready(self) -> list[Request]:
        """Requests that can be queued."""
        ready, self._ready = self._ready, []
        return ready

    @property
    def requests(self) -> list[Request]:
        """Those that are here."""
        return [*(one.request for one in self._returns), *self._ready]

    def admit(self, request: Request) -> bool:
        """Whether a request that has just arrived waits for pages. If not, it lacks none, or is better computed."""
        cache = self._cache
        if not cache.looks_up(request) or not (len(self._host) or len(self._disk)):
            return False
        num_cached = cache.find(request).num_pages
        waiting_s = sum(one.found.estimate_s for one in self._returns)
        found = self._worth.best(request, num_cached, waiting_s)
        if found is None:
            return False
        self._returns.append(_Return(found))
        for _, key in self._worth.lacking(found.arrival):
            if key in self._host:
                self._host.touch(key)
        return True

    def abandon(self, request: Request) -> bool:
        """A request ends. False if it is not here."""
        if request in self._ready:
            self._ready.remove(request)
            return True
        for one in self._returns:
            if one.request is request:
                self._give_up(one)
                return True
        return False

    def _bring_back(self, num_ended: int, fence: int) -> None:
        has_room = True
        for one in sorted(self._returns, key=lambda one: one.request.order):
            arrival = one.arrival
            if one.loading is not None:
                self._look(one, one.loading)
                continue
            if self._kept.clock() > one.found.end_s:
                self._fail(one)
                continue
            if arrival.hold is None and has_room and not self._arrivals.is_coming(arrival):
                has_room = self._arrivals.take_pages(arrival, fence)
            if arrival.hold is not None and num_ended >= arrival.fence:
                self._load(one)

    def _load(self, one: _Return) -> None:
        """Begins to copy. What was dropped since the request arrived is computed after all."""
        arrival = one.arrival
        assert arrival.hold is not None
        keys = [(group, arrival.digests[i], i) for group, places in enumerate(arrival.lacking) for i in places]
        slots, files, host_keys = list[SlotCopy](), list[FileCopy](), list[Key]()
        for group, digest, i in keys:
            key, page = (group, digest), arrival.hold[group][i]
            if key in self._host:
                slots.append(SlotCopy(group, page, self._host.slot(key)))
                host_keys.append(key)
            elif key in self._disk:
                files.append(FileCopy(group, page, *self._disk.place(key)))
                self._disk.touch(key)
            else:
                self._fail(one)
                return
        numbers = list({copy.file for copy in files})
        self._host.pin(host_keys)
        self._disk.pin(numbers)
        one.loading = _Loading(
            self._store.load_slots(slots),
            self._store.load_files(files),
            host_keys,
            numbers,
            len(slots),
            len(files),
        )

    def _look(self, one: _Return, loading: _Loading) -> None:
        state = loading.state
        if state == "running":
            if self._kept.clock() > one.found.end_s:
                self._miss(one, loading)
            return
        if state == "failed":
            self._fail(one)
            bad_file = loading.disk.bad_file
            if bad_file is not None and bad_file in self._disk.files:  # else another request found it first
                self._kept.report(f"KV offload: {loading.disk.error}; the file is removed")
                self._kept.counters.offload_disk_failures += 1
                self._writer.drop_file(bad_file)
            return
        self._unpin(loading)
        self._arrivals.finish(one.arrival)
        self._returns.remove(one)
        self._ready.append(one.request)
        loading.note(self._kept)
        for key in loading.host_keys:
            if key in self._host:
                self._host.demote(key)

    def _miss(self, one: _Return, loading: _Loading) -> None:
        """The copy has taken as long as the tokens would have: computing them now costs at most as much again."""
        took_s = self._kept.clock() - one.found.asked_s
        for rate, job in ((self._kept.rates.host, loading.host), (self._kept.rates.disk, loading.disk)):
            if job.num_bytes and job.state == "running":
                rate.note(took_s, job.num_bytes)
        self._kept.counters.offload_declined += 1
        self._fail(one)

    def _fail(self, one: _Return) -> None:
        self._give_up(one)
        self._ready.append(one.request)

    def _give_up(self, one: _Return) -> None:
        self._returns.remove(one)
        if one.loading is not None:
            self._unpin(one.loading)  # if it still runs, what its slots get next is read in vain
        self._arrivals.give_up(one.arrival, one.loading)

    def _unpin(self, loading: _Loading) -> None:
        self._host.unpin(loading.host_keys)
        self._disk.unpin(loading.files)
