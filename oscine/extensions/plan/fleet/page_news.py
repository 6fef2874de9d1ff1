"""Events of an engine's prefix cache, on their way to the router's index."""

from collections.abc import Sequence

from oscine.engine.core.prefix_index import Medium
from oscine.extensions.replicas.routing.kv_index import CACHE, DISK, HOST, KVIndex

_NONE = (False, 0), list[bytes]()
_STORED = True, CACHE
_BITS: dict[Medium, int] = {"GPU": CACHE, "CPU": HOST, "DISK": DISK}


class PageNews:
    """Implements PageEvents. Collects events while a step is made and committed, as KVEvents does.

    It passes digests on as they are. Converting them to integers would take time, and the digests of a simulation
    already have the 8 bytes of a page hash.
    """

    def __init__(self, index: KVIndex, replica: str) -> None:
        self._index, self._replica = index, replica
        self._events: list[tuple[tuple[bool, int], list[bytes]]] = []  # stored or removed, and the medium; pages
        self._last: tuple[tuple[bool, int], list[bytes]] = _NONE  # of these

    def stored(self, digests: list[bytes], token_ids: list[int], places: Sequence[int]) -> None:
        if isinstance(places, range):  # of most calls
            self._add(_STORED, digests[places.start : places.stop])
        else:
            self._add(_STORED, [digests[i] for i in places])

    def removed(self, digests: list[bytes], medium: Medium = "GPU") -> None:
        self._add((False, _BITS[medium]), [*digests])

    def offloaded(self, digests: list[bytes], medium: Medium) -> None:
        self._add((True, _BITS[medium]), [*digests])

    def flush(self) -> None:
        """The router's index gets the events, in their order."""
        if not self._events:
            return
        events, self._events = self._events, []
        self._last = _NONE
        for (is_stored, medium), pages in events:
            change = self._index.store if is_stored else self._index.remove
            change(self._replica, pages, medium)

    def _add(self, kind: tuple[bool, int], pages: list[bytes]) -> None:
        if self._last[0] == kind:
            self._last[1].extend(pages)
        else:
            self._last = kind, pages
            self._events.append(self._last)
