"""Cached pages on their way to host memory, before the cache evicts them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oscine.extensions.offload.disk_writer import DiskWriter
from oscine.extensions.offload.kept import Kept
from oscine.extensions.offload.page_files import Key
from oscine.extensions.offload.page_store import Job, SlotCopy

_AHEAD_STEPS = 4  # of the largest size, whose pages are saved before they are evicted
_IDLE_PAGES = 256  # that an idle engine looks at, at a time: a request may arrive


@dataclass(slots=True)
class _Saving:
    """Cached pages on their way to host memory. One that the cache gives away meanwhile is spoiled."""

    job: Job
    pages: list[tuple[Key, SlotCopy]]
    ahead: bool  # of eviction
    spoiled: set[tuple[int, int]] = field(default_factory=set)  # group and page


class Saver:
    def __init__(self, kept: Kept, writer: DiskWriter, step_pages: int) -> None:
        """`step_pages`: of the largest step."""
        self._kept, self._writer, self._step_pages = kept, writer, step_pages
        self._cache, self._store, self._host, self._disk = kept.cache, kept.store, kept.host, kept.disk
        self._saving: _Saving | None = None
        self._idle_pages: list[tuple[int, int]] | None = None  # group and page, to be saved while the engine is idle

    @property
    def is_saving(self) -> bool:
        return self._saving is not None

    @property
    def has_idle_pages(self) -> bool:
        """Whether an idle engine has more to save."""
        return bool(self._idle_pages)

    def note_step(self) -> None:
        """The cache may have other pages now."""
        self._idle_pages = None

    def save_next(self) -> None:
        """The pages that are evicted next."""
        found: list[tuple[int, int]] = []
        ahead = min(_AHEAD_STEPS * self._step_pages, self._store.num_slots // 2)
        for group, page in self._cache.pools.next_evicted(ahead):
            if not self._has(group, page, keep=True):
                found.append((group, page))
        if found:
            may_drop = self._writer.is_written if self._writer.can_write else _always
            self._save(found[: 2 * self._step_pages], may_drop, ahead=True)

    def save_all(self) -> None:
        """All cached pages, some at a time, as far as nothing is lost for them."""
        if self._idle_pages is None:
            self._idle_pages = [*self._cache.pools.next_evicted()]
        some = self._idle_pages[:_IDLE_PAGES]
        del self._idle_pages[: len(some)]
        wanted = [(group, page) for group, page in some if not self._has(group, page)]
        may_drop = self._disk.__contains__ if self._writer.has_room else _never
        if wanted and not self._save(wanted, may_drop, ahead=False):
            self._idle_pages = []

    def _has(self, group: int, page: int, keep: bool = False) -> bool:
        """Whether a tier has the page. `keep`: and drops it last. True also for a page that holds nothing."""
        digest = self._cache.index.digest(group, page)
        if digest is None:
            return True
        key = group, digest
        tier = self._host if key in self._host else self._disk if key in self._disk else None
        if tier is not None and keep:
            tier.touch(key)
            self._writer.let_write(key)
        return tier is not None

    def _save(self, wanted: Sequence[tuple[int, int]], may_drop: Callable[[Key], bool], *, ahead: bool) -> bool:
        """`ahead`: of eviction; else the cache will have the pages for a while. False if there is no slot for any."""
        slots, dropped = self._host.take(len(wanted), may_drop)
        for key in dropped:
            self._writer.forget(key)
            self._kept.told_lost([key], "CPU")
        pages: list[tuple[Key, SlotCopy]] = []
        for (group, page), slot in zip(wanted, slots, strict=False):
            digest = self._cache.index.digest(group, page)
            assert digest is not None
            pages.append(((group, digest), SlotCopy(group, page, slot)))
        if pages:
            self._saving = _Saving(self._store.save([copy for _, copy in pages]), pages, ahead)
        return bool(pages)

    def end(self) -> None:
        saving = self._saving
        if saving is None or saving.job.state == "running":
            return
        self._saving = None
        saved: list[Key] = []
        for key, copy in saving.pages:
            if saving.job.error is not None or (copy.group, copy.page) in saving.spoiled or key in self._host:
                self._host.give_back(copy.slot)
                continue
            self._host.put(key, copy.slot)
            if not saving.ahead:
                self._host.demote(key)
            saved.append(key)
            if saving.ahead or self._writer.has_room:
                self._writer.let_write(key)
        self._kept.counters.offload_saved_pages += len(saved)
        self._kept.counters.offload_save_s += saving.job.seconds
        self._kept.rates.host.assume(saving.job.seconds, saving.job.num_bytes)
        self._kept.tell(saved, "CPU")

    def spoil(self, group: int, page: int) -> None:
        """The cache is about to give a page away."""
        if self._saving is not None:
            self._saving.spoiled.add((group, page))
        digest = self._cache.index.digest(group, page)
        if group == 0 and digest is not None and (0, digest) not in self._host and (0, digest) not in self._disk:
            self._kept.counters.offload_lost_pages += 1


def _always(key: Key) -> bool:
    return True


def _never(key: Key) -> bool:
    return False
