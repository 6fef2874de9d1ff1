"""Whether pages should come back, or be computed: the prefix whose return saves most."""

from collections.abc import Container, Iterator, Sequence
from typing import Any, NamedTuple

from oscine.engine.core.arrivals import Arrival
from oscine.engine.core.prefix_index import usable_pages
from oscine.engine.core.request import Request
from oscine.extensions.offload.kept import Kept
from oscine.extensions.offload.page_files import Key
from oscine.extensions.offload.tiers import DiskTier, HostTier


class Found(NamedTuple):
    """A prefix that should come back."""

    arrival: Arrival
    estimate_s: float
    asked_s: float
    end_s: float  # when it would have been computed, had it been queued at once


class Worth:
    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._cache, self._store, self._host, self._disk = kept.cache, kept.store, kept.host, kept.disk

    def best(self, request: Request, num_cached: int, waiting_s: float) -> Found | None:
        """The prefix whose return saves most, if any does: of what host memory has, or of what both tiers have.

        `num_cached`: pages. `waiting_s`: until what others wait for has come.
        """
        groups, index = self._cache.groups, self._cache.index
        num_pages = (len(request.token_ids) - 1) // self._cache.page_size
        found: list[tuple[float, Found]] = []
        longest, now_s = num_cached, self._kept.clock()
        for tiers in ((self._host,), (self._host, self._disk)):
            known = [_Known(index.digests(group), group, tiers) for group in range(len(groups))]
            length, _ = usable_pages(groups, known, request.digests[:num_pages])
            if length > longest:
                longest, arrival = length, Arrival(request, request.digests[:length])
                load_s = self._kept.rates.load_s(*self._bytes(arrival))
                compute_s = self._kept.rates.compute_s((length - num_cached) * self._cache.page_size)
                one = Found(arrival, load_s, now_s, now_s + compute_s)
                found.append((compute_s - waiting_s - load_s, one))
        gain_s, best = max(found, key=lambda one: one[0], default=(0.0, None))
        if gain_s > 0:
            return best
        self._kept.counters.offload_declined += bool(found)
        for _, one in found:
            self._refuse(one.arrival)
        return None

    def lacking(self, arrival: Arrival) -> Iterator[tuple[int, Key]]:
        """Place and key of each page that the cache lacks."""
        for group, places in enumerate(self._cache.holds.lacking(arrival.digests)):
            for i in places:
                yield i, (group, arrival.digests[i])

    def _refuse(self, arrival: Arrival) -> None:
        host_bytes, disk_bytes = self._bytes(arrival)
        if host_bytes:
            self._kept.rates.host.discount()
        if disk_bytes:
            self._kept.rates.disk.discount()

    def _bytes(self, arrival: Arrival) -> tuple[int, int]:
        """To be copied from host memory, and from files."""
        sizes, of_host, of_disk = self._store.page_bytes, 0, 0
        for _, key in self.lacking(arrival):
            if key in self._host:
                of_host += sizes[key[0]]
            else:
                of_disk += sizes[key[0]]
        return of_host, of_disk


class _Known:
    """The pages of one group that the cache or a tier has, by digest."""

    def __init__(self, cached: Container[bytes], group: int, tiers: Sequence[HostTier | DiskTier]) -> None:
        self._cached, self._group, self._tiers = cached, group, tiers

    def __contains__(self, digest: Any) -> bool:
        return digest in self._cached or any((self._group, digest) in tier for tier in self._tiers)
