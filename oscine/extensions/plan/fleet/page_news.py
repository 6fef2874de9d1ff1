"""Events of an engine's prefix cache, on their way to the router's index."""

from collections.abc import Iterable

from oscine.engine.core.prefix_index import Medium
from oscine.extensions.kv_events.publisher import page_hash
from oscine.extensions.replicas.routing.kv_index import CACHE, DISK, HOST, KVIndex

_BITS: dict[Medium, int] = {"GPU": CACHE, "CPU": HOST, "DISK": DISK}


class PageNews:
    """Implements PageEvents. Collects events while a step is made and committed, as KVEvents does."""

    def __init__(self, index: KVIndex, replica: str) -> None:
        self._index, self._replica = index, replica
        self._events: list[tuple[bool, int, list[bytes]]] = []  # stored or removed, medium, pages

    def stored(self, digests: list[bytes], token_ids: list[int], pages: list[int]) -> None:
        self._add(True, CACHE, (digests[page] for page in pages))

    def removed(self, digest: bytes, medium: Medium = "GPU") -> None:
        self._add(False, _BITS[medium], (digest,))

    def offloaded(self, digests: list[bytes], medium: Medium) -> None:
        self._add(True, _BITS[medium], digests)

    def flush(self) -> None:
        """The router's index gets the events, in their order."""
        events, self._events = self._events, []
        for is_stored, medium, pages in events:
            change = self._index.store if is_stored else self._index.remove
            change(self._replica, map(page_hash, pages), medium)

    def _add(self, is_stored: bool, medium: int, pages: Iterable[bytes]) -> None:
        last = self._events[-1] if self._events else None
        if last is not None and last[:2] == (is_stored, medium):
            last[2].extend(pages)
        else:
            self._events.append((is_stored, medium, [*pages]))
