"""The pages in the prefix cache of each replica, by their events.

Page addresses are any hashable values. The index is a belief: a page that is wrongly listed costs a prefill, never an
answer.

    holders    page -> bits of the replicas that have it    asked for each request: one look-up a page for all replicas
    pages      replica -> its pages with bits of media      asked when a medium loses a page, and when a replica goes

A replica may have a page in several media: in its cache, in host memory, in files. It has the page as long as any has.
"""

from collections.abc import Hashable, Iterable
from itertools import repeat

CACHE, HOST, DISK = 1, 2, 4  # media, as bits


class KVIndex:
    """Pages of all replicas of a model. The time of a look-up depends only on the number of pages of the prompt."""

    def __init__(self) -> None:
        self._holders: dict[Hashable, int] = {}
        self._pages: dict[str, dict[Hashable, int]] = {}
        self._bits: dict[str, int] = {}  # replica -> its bit, 1 << i
        self._names: dict[int, str] = {}  # and back
        self._all = 0  # their bits

    def add(self, replica: str) -> None:
        """A replica that has no page yet; nothing where it is known."""
        if replica in self._bits:
            return
        bit = 1
        while bit in self._names:
            bit <<= 1
        self._bits[replica], self._names[bit], self._pages[replica] = bit, replica, {}
        self._all |= bit

    def drop(self, replica: str) -> None:
        """Forgets a replica; nothing where it is unknown."""
        if replica in self._bits:
            self.clear(replica)
            bit = self._bits.pop(replica)
            self._all ^= bit
            del self._names[bit], self._pages[replica]

    def clear(self, replica: str) -> None:
        """The replica has no page any more."""
        self.remove(replica, list(self._pages[replica]), CACHE | HOST | DISK)

    def store(self, replica: str, pages: Iterable[Hashable], medium: int = CACHE) -> None:
        """A medium of the replica has these pages now."""
        own, holders, bit = self._pages[replica], self._holders, self._bits[replica]
        pages = [*pages]
        # Mostly no medium has them yet. A page of one replica refers to the replica's own number, so there is no object
        # per page.
        for known, value in ((own, medium), (holders, bit)):
            if known.keys().isdisjoint(pages):
                known.update(dict.fromkeys(pages, value))
            else:
                for page in pages:
                    known[page] = known[page] | value if page in known else value

    def remove(self, replica: str, pages: Iterable[Hashable], medium: int = CACHE) -> None:
        """A medium of the replica has these pages no more; unknown ones are skipped."""
        own, bit, kept = self._pages[replica], self._bits[replica], ~medium
        holders = self._holders
        for page in pages:
            had = own.pop(page, 0)
            if left := had & kept:
                own[page] = left
            elif had:
                held = holders.pop(page)
                if held != bit:
                    holders[page] = held ^ bit

    def num_pages(self, replica: str) -> int:
        return len(self._pages[replica])

    def overlap(self, pages: Iterable[Hashable]) -> dict[str, int]:
        """Replica -> how many leading pages of a prompt it has; replicas without the first one are left out."""
        holders, overlap = self._holders, dict[str, int]()
        having, count = self._all, 0
        if not having:
            return overlap
        for held in map(holders.get, pages, repeat(0)):
            held &= having
            if held != having:
                self._note(overlap, having ^ held, count)
                having = held
                if not having:
                    return overlap
            count += 1
        self._note(overlap, having, count)
        return overlap

    def _note(self, overlap: dict[str, int], bits: int, num_pages: int) -> None:
        while bits and num_pages:
            bit = bits & -bits
            overlap[self._names[bit]] = num_pages
            bits ^= bit
