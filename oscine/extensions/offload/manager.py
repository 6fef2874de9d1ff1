"""Keeps what the cache evicts in host memory and on disk, and brings it back for requests that need it.

Decides only; PageStore copies. Everything is called by the loop, on its thread, and nothing here waits. Decision 24 has
the reasons.

A request stays here from its arrival until its pages are back. Then it is queued like any other, and finds an ordinary
prefix hit. If anything fails, it is queued too, and computed.
"""

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from oscine.engine.core.arrivals import Arrival, Arrivals
from oscine.engine.core.extension import EngineExtension, LoopState, MakeExtension, Progress
from oscine.engine.core.prefix_index import Medium, usable_pages
from oscine.engine.core.request import Request
from oscine.executor.start.build import BuiltExecutor
from oscine.extensions.offload.page_files import MOST_PAGES, Key, file_bytes
from oscine.extensions.offload.page_store import FileCopy, Job, PageStore, SlotCopy
from oscine.extensions.offload.rates import Rates
from oscine.extensions.offload.tiers import DiskTier, HostTier
from oscine.settings.config import EngineOptions
from oscine.types import EngineStats, StepPlan, TransferState

_AHEAD_STEPS = 4  # of the largest size, whose pages are saved before they are evicted
_FILE_BYTES = 16 << 20  # of a file, at most
_LEAST_FILES = 4  # that the disk's limit has room for
_IDLE_PAGES = 256  # that an idle engine looks at, at a time: a request may arrive
_RETRY_S = 60.0  # after a failed write
_LOOK_S = 0.001  # between looks while an engine that stops saves the rest

Report = Callable[[str], None]


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


@dataclass(slots=True, eq=False)
class _Return:
    """A request and its pages."""

    arrival: Arrival
    estimate_s: float
    asked_s: float
    end_s: float  # when it would have been computed, had it been queued at once
    loading: _Loading | None = None

    @property
    def request(self) -> Request:
        return self.arrival.request


@dataclass(slots=True)
class _Saving:
    """Cached pages on their way to host memory. One that the cache gives away meanwhile is spoiled."""

    job: Job
    pages: list[tuple[Key, SlotCopy]]
    ahead: bool  # of eviction
    spoiled: set[tuple[int, int]] = field(default_factory=set)  # group and page


@dataclass(slots=True)
class _Writing:
    job: Job
    number: int
    keys: list[Key]


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
        self._cache, self._counters, self._store = loop.cache, loop.counters, store
        self._report, self._clock = report, clock
        self._step_pages = loop.cache.num_pages(step_tokens)
        self._disk_bytes = disk_bytes
        self.host, self.disk, self.rates = HostTier(store.num_slots), DiskTier(), Rates()
        self._arrivals = Arrivals(loop.cache)
        self._returns: list[_Return] = []
        self._ready: list[Request] = []
        self._saving: _Saving | None = None
        self._writing: _Writing | None = None
        self._unwritten: OrderedDict[Key, None] = OrderedDict()  # in host memory, and to be in a file
        self._retry_s = 0.0  # when the disk is written to again
        self._idle_pages: list[tuple[int, int]] | None = None  # group and page, to be saved while the engine is idle
        self._is_settled = False  # nothing is left to do while the engine is idle
        loop.cache.on_evict = self._evicted
        if store.has_files:
            self._open_disk()

    def _open_disk(self) -> None:
        least = file_bytes([self._store.slot_bytes]) * _LEAST_FILES
        if self._disk_bytes < least:
            raise ValueError(f"--kv-offload-disk-bytes must be at least {least} for this model, not {self._disk_bytes}")
        for file in self._store.found:
            self.disk.begin(file.number, file.num_bytes)
            self.disk.complete(file.number, file.keys)
        self._make_room(0)

    @property
    def requests(self) -> list[Request]:
        """Those that are here."""
        return [*(one.request for one in self._returns), *self._ready]

    @property
    def is_busy(self) -> bool:
        """Whether poll() must be called though there is no request."""
        return self._arrivals.is_draining or not self._is_settled

    def announce(self) -> None:
        """Tells the readers of events what is on the disk."""
        self._tell(self.disk.keys, "DISK")

    def count(self, stats: EngineStats) -> None:
        stats.offload_host_pages, stats.offload_host_bytes = len(self.host), len(self.host) * self._store.slot_bytes
        stats.offload_disk_pages, stats.offload_disk_bytes = len(self.disk), self.disk.num_bytes

    def after_step(self, plan: StepPlan, num_drafted: int, seconds: float, *, in_vain: bool) -> None:
        self.rates.note_step(plan, seconds)
        self._is_settled, self._idle_pages = False, None

    # ---- requests ----

    def admit(self, request: Request) -> bool:
        """Whether a request that has just arrived waits for pages. If not, it lacks none, or is better computed."""
        cache = self._cache
        if not cache.looks_up(request) or not (len(self.host) or len(self.disk)):
            return False
        num_cached = cache.find(request).num_pages
        found = self._best_prefix(request, num_cached)
        if found is None:
            return False
        self._returns.append(found)
        self._is_settled = False
        for _, key in self._lacking(found.arrival):
            if key in self.host:
                self.host.touch(key)
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

    def _best_prefix(self, request: Request, num_cached: int) -> _Return | None:
        """The prefix whose return saves most, if any does: of what host memory has, or of what both tiers have."""
        groups, index = self._cache.groups, self._cache.index
        num_pages = (len(request.token_ids) - 1) // self._cache.page_size
        waiting_s = sum(one.estimate_s for one in self._returns)
        found: list[tuple[float, _Return]] = []
        longest, now_s = num_cached, self._clock()
        for tiers in ((self.host,), (self.host, self.disk)):
            known = [_Known(index.digests(group), group, tiers) for group in range(len(groups))]
            length, _ = usable_pages(groups, known, request.digests[:num_pages])
            if length > longest:
                longest, arrival = length, Arrival(request, request.digests[:length])
                load_s = self.rates.load_s(*self._bytes(arrival))
                compute_s = self.rates.compute_s((length - num_cached) * self._cache.page_size)
                one = _Return(arrival, load_s, now_s, now_s + compute_s)
                found.append((compute_s - waiting_s - load_s, one))
        gain_s, best = max(found, key=lambda one: one[0], default=(0.0, None))
        if gain_s > 0:
            return best
        self._counters.offload_declined += bool(found)
        for _, one in found:
            self._refuse(one.arrival)
        return None

    def _refuse(self, arrival: Arrival) -> None:
        host_bytes, disk_bytes = self._bytes(arrival)
        if host_bytes:
            self.rates.host.discount()
        if disk_bytes:
            self.rates.disk.discount()

    def _lacking(self, arrival: Arrival) -> Iterator[tuple[int, Key]]:
        """Place and key of each page that the cache lacks."""
        for group, places in enumerate(self._cache.holds.lacking(arrival.digests)):
            for i in places:
                yield i, (group, arrival.digests[i])

    def _bytes(self, arrival: Arrival) -> tuple[int, int]:
        """To be copied from host memory, and from files."""
        sizes, of_host, of_disk = self._store.page_bytes, 0, 0
        for _, key in self._lacking(arrival):
            if key in self.host:
                of_host += sizes[key[0]]
            else:
                of_disk += sizes[key[0]]
        return of_host, of_disk

    # ---- every step ----

    def poll(self, progress: Progress) -> list[Request]:
        """Goes on wherever something can be done. Returns requests that can be queued."""
        num_ended, num_launched, num_running, num_waiting = progress
        if self._arrivals.is_draining:
            self._arrivals.drain()
        if self._returns:
            self._bring_back(num_ended, num_ended + num_launched)
        is_idle = not (num_launched or num_running or num_waiting or self._returns)
        self._end_saving()
        self._end_writing()
        if self._saving is None:
            if is_idle:
                self._save_all()
            else:
                self._save_next()
        if self._writing is None and self._can_write:
            self._write(is_idle)
        self._is_settled = is_idle and self._saving is None and self._writing is None and not self._idle_pages
        ready, self._ready = self._ready, []
        return ready

    @property
    def _can_write(self) -> bool:
        """Whether what host memory has will be in files soon."""
        return self._store.has_files and self._clock() >= self._retry_s

    @property
    def _disk_has_room(self) -> bool:
        """Whether a file more fits without the loss of another."""
        used = self.disk.num_bytes + self._store.leftover_bytes
        return self._can_write and used + self._disk_bytes // _LEAST_FILES <= self._disk_bytes

    def flush(self, limit_s: float) -> None:
        """Saves what an idle engine would, for so long at most, and ends."""
        end_s = time.monotonic() + limit_s
        self._is_settled = not self._store.has_files
        while self.is_busy and time.monotonic() < end_s:
            self.poll(Progress(0, 0, 0, 0))
            time.sleep(_LOOK_S)
        self._store.close()

    # ---- back to the cache ----

    def _bring_back(self, num_ended: int, fence: int) -> None:
        has_room = True
        for one in sorted(self._returns, key=lambda one: one.request.order):
            arrival = one.arrival
            if one.loading is not None:
                self._look(one, one.loading)
                continue
            if self._clock() > one.end_s:
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
            if key in self.host:
                slots.append(SlotCopy(group, page, self.host.slot(key)))
                host_keys.append(key)
            elif key in self.disk:
                files.append(FileCopy(group, page, *self.disk.place(key)))
                self.disk.touch(key)
            else:
                self._fail(one)
                return
        numbers = list({copy.file for copy in files})
        self.host.pin(host_keys)
        self.disk.pin(numbers)
        one.loading = _Loading(
            self._store.load_slots(slots), self._store.load_files(files), host_keys, numbers, len(slots), len(files)
        )

    def _look(self, one: _Return, loading: _Loading) -> None:
        state = loading.state
        if state == "running":
            if self._clock() > one.end_s:
                self._miss(one, loading)
            return
        if state == "failed":
            self._fail(one)
            bad_file = loading.disk.bad_file
            if bad_file is not None and bad_file in self.disk.files:  # else another request found it first
                self._report(f"KV offload: {loading.disk.error}; the file is removed")
                self._counters.offload_disk_failures += 1
                self._drop_file(bad_file)
            return
        self._unpin(loading)
        self._arrivals.finish(one.arrival)
        self._returns.remove(one)
        self._ready.append(one.request)
        self._count(loading)
        for key in loading.host_keys:
            if key in self.host:
                self.host.demote(key)

    def _miss(self, one: _Return, loading: _Loading) -> None:
        """The copy has taken as long as the tokens would have: computing them now costs at most as much again."""
        took_s = self._clock() - one.asked_s
        for rate, job in ((self.rates.host, loading.host), (self.rates.disk, loading.disk)):
            if job.num_bytes and job.state == "running":
                rate.note(took_s, job.num_bytes)
        self._counters.offload_declined += 1
        self._fail(one)

    def _count(self, loading: _Loading) -> None:
        counters = self._counters
        counters.offload_host_hits += loading.num_host
        counters.offload_host_s += loading.host.seconds
        counters.offload_disk_hits += loading.num_disk
        counters.offload_disk_s += loading.disk.seconds
        for rate, job in ((self.rates.host, loading.host), (self.rates.disk, loading.disk)):
            if job.num_bytes:
                rate.note(job.seconds, job.num_bytes)

    def _fail(self, one: _Return) -> None:
        self._give_up(one)
        self._ready.append(one.request)

    def _give_up(self, one: _Return) -> None:
        self._returns.remove(one)
        if one.loading is not None:
            self._unpin(one.loading)  # if it still runs, what its slots get next is read in vain
        self._arrivals.give_up(one.arrival, one.loading)

    def _unpin(self, loading: _Loading) -> None:
        self.host.unpin(loading.host_keys)
        self.disk.unpin(loading.files)

    # ---- to host memory ----

    def _save_next(self) -> None:
        """The pages that are evicted next."""
        found: list[tuple[int, int]] = []
        ahead = min(_AHEAD_STEPS * self._step_pages, self._store.num_slots // 2)
        for group, page in self._cache.pools.next_evicted(ahead):
            if not self._has(group, page, keep=True):
                found.append((group, page))
        if found:
            may_drop = self._is_written if self._can_write else _always
            self._save(found[: 2 * self._step_pages], may_drop, ahead=True)

    def _save_all(self) -> None:
        """All cached pages, some at a time, as far as nothing is lost for them."""
        if self._idle_pages is None:
            self._idle_pages = [*self._cache.pools.next_evicted()]
        some = self._idle_pages[:_IDLE_PAGES]
        del self._idle_pages[: len(some)]
        wanted = [(group, page) for group, page in some if not self._has(group, page)]
        may_drop = self.disk.__contains__ if self._disk_has_room else _never
        if wanted and not self._save(wanted, may_drop, ahead=False):
            self._idle_pages = []

    def _has(self, group: int, page: int, keep: bool = False) -> bool:
        """Whether a tier has the page. `keep`: and drops it last. True also for a page that holds nothing."""
        digest = self._cache.index.digest(group, page)
        if digest is None:
            return True
        key = group, digest
        tier = self.host if key in self.host else self.disk if key in self.disk else None
        if tier is not None and keep:
            tier.touch(key)
            self._let_write(key)
        return tier is not None

    def _let_write(self, key: Key) -> None:
        if self._store.has_files and key not in self.disk:
            self._unwritten[key] = None

    def _is_written(self, key: Key) -> bool:
        """To a file, unless it need not be."""
        return key not in self._unwritten

    def _save(self, wanted: Sequence[tuple[int, int]], may_drop: Callable[[Key], bool], *, ahead: bool) -> bool:
        """`ahead`: of eviction; else the cache will have the pages for a while. False if there is no slot for any."""
        slots, dropped = self.host.take(len(wanted), may_drop)
        for key in dropped:
            self._unwritten.pop(key, None)
            self._told_lost([key], "CPU")
        pages: list[tuple[Key, SlotCopy]] = []
        for (group, page), slot in zip(wanted, slots, strict=False):
            digest = self._cache.index.digest(group, page)
            assert digest is not None
            pages.append(((group, digest), SlotCopy(group, page, slot)))
        if pages:
            self._saving = _Saving(self._store.save([copy for _, copy in pages]), pages, ahead)
        return bool(pages)

    def _end_saving(self) -> None:
        saving = self._saving
        if saving is None or saving.job.state == "running":
            return
        self._saving = None
        saved: list[Key] = []
        for key, copy in saving.pages:
            if saving.job.error is not None or (copy.group, copy.page) in saving.spoiled or key in self.host:
                self.host.give_back(copy.slot)
                continue
            self.host.put(key, copy.slot)
            if not saving.ahead:
                self.host.demote(key)
            saved.append(key)
            if saving.ahead or self._disk_has_room:
                self._let_write(key)
        self._counters.offload_saved_pages += len(saved)
        self._counters.offload_save_s += saving.job.seconds
        self.rates.host.assume(saving.job.seconds, saving.job.num_bytes)
        self._tell(saved, "CPU")

    def _evicted(self, group: int, page: int) -> None:
        """The cache is about to give a page away."""
        if self._saving is not None:
            self._saving.spoiled.add((group, page))
        digest = self._cache.index.digest(group, page)
        if group == 0 and digest is not None and (0, digest) not in self.host and (0, digest) not in self.disk:
            self._counters.offload_lost_pages += 1

    # ---- to files ----

    def _write(self, is_idle: bool) -> None:
        """The pages that were saved first. A busy engine waits until they fill a file."""
        most_bytes = max(self._store.slot_bytes, min(_FILE_BYTES, self._disk_bytes // _LEAST_FILES))
        most = min(MOST_PAGES, most_bytes // self._store.slot_bytes, max(1, self._store.num_slots // 4))
        if len(self._unwritten) < (1 if is_idle else most):
            return
        keys = [key for key, _ in zip(self._unwritten, range(most), strict=False)]
        size = file_bytes([self._store.page_bytes[group] for group, _ in keys])
        if not self._make_room(size):
            return
        self.host.pin(keys)
        number, job = self._store.write([(key, self.host.slot(key)) for key in keys])
        self.disk.begin(number, size)
        self._writing = _Writing(job, number, keys)

    def _make_room(self, num_bytes: int) -> bool:
        """Removes files until so many bytes fit the limit. False if those that are left are in use."""
        while self.disk.num_bytes + num_bytes + self._store.leftover_bytes > self._disk_bytes:
            if self._store.leftover_bytes:
                self._store.remove_leftover()
            elif (oldest := self.disk.oldest()) is not None:
                self._drop_file(oldest)
            else:
                return False
        return True

    def _end_writing(self) -> None:
        writing = self._writing
        if writing is None or writing.job.state == "running":
            return
        self._writing = None
        self.host.unpin(writing.keys)
        if writing.job.error is not None:
            self.disk.remove(writing.number)
            self._counters.offload_disk_failures += 1
            self._retry_s = self._clock() + _RETRY_S
            self._report(f"KV offload: no page is written for {_RETRY_S:g} s: {writing.job.error}")
            return
        self.rates.disk.assume(writing.job.seconds, writing.job.num_bytes)
        self.disk.complete(writing.number, writing.keys)
        self._tell(writing.keys, "DISK")
        for key in writing.keys:
            del self._unwritten[key]

    def _drop_file(self, number: int) -> None:
        self._told_lost(self.disk.remove(number), "DISK")
        self._store.remove(number)

    # ---- events ----

    def _tell(self, keys: Sequence[Key], medium: Medium) -> None:
        events = self._cache.index.events
        if events is not None:
            events.offloaded([digest for group, digest in keys if group == 0], medium)

    def _told_lost(self, keys: Sequence[Key], medium: Medium) -> None:
        events = self._cache.index.events
        if events is not None:
            for group, digest in keys:
                if group == 0:
                    events.removed(digest, medium)


def _always(key: Key) -> bool:
    return True


def _never(key: Key) -> bool:
    return False


class _Known:
    """The pages of one group that the cache or a tier has, by digest."""

    def __init__(self, cached: Container[bytes], group: int, tiers: Sequence[HostTier | DiskTier]) -> None:
        self._cached, self._group, self._tiers = cached, group, tiers

    def __contains__(self, digest: Any) -> bool:
        return digest in self._cached or any((self._group, digest) in tier for tier in self._tiers)


def of_engine(built: BuiltExecutor, options: EngineOptions) -> MakeExtension:
    """Where the options want evicted pages kept. Raises ValueError for a limit of the disk that no file fits."""

    def report(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    store, tokens = built.store, options.scheduler.max_num_batched_tokens
    assert store is not None
    disk_bytes = options.cache.kv_offload_disk_bytes
    return lambda loop: Offload(loop, store, step_tokens=tokens, disk_bytes=disk_bytes, report=report)
