"""The pages in the prefix cache of each replica, by their events.

Page addresses are any hashable values. The index is a belief: a page that is wrongly listed costs a prefill, never an
answer.

    holders    page -> bits of the replicas that have it    one look-up a page, for events and for all replicas at once
    beside     replica -> media of its pages                only of pages that are, or were, in host memory or in files

A replica may have a page in several media: in its cache, in host memory, in files. It has the page as long as any has.

Nothing lists the pages of one replica: that would take as much memory and time as `holders`. When a replica goes, its
bit is retired. Later events clear it in all pages, some pages with each event.
"""

from collections.abc import Collection, Hashable, Iterable
from itertools import repeat

CACHE, HOST, DISK = 1, 2, 4  # media, as bits
_SWEPT = 8  # pages looked at for retired bits, for each page of an event


class KVIndex:
    """Pages of all replicas of a model. The time of a look-up depends only on the number of pages of the prompt."""

    def __init__(self) -> None:
        self._holders: dict[Hashable, int] = {}
        self._beside: dict[str, dict[Hashable, int]] = {}
        self._num_pages: dict[str, int] = {}
        self._bits: dict[str, int] = {}  # replica -> its bit, 1 << i
        self._names: dict[int, str] = {}  # and back
        self._all = 0  # their bits
        self._retired = 0  # bits that pages may still have, and no replica
        self._unswept: list[Hashable] = []  # pages that may have these

    def add(self, replica: str) -> None:
        """A replica that has no page yet; nothing where it is known."""
        if replica in self._bits:
            return
        bit = 1
        while bit & (self._all | self._retired):
            bit <<= 1
        self._bits[replica], self._names[bit] = bit, replica
        self._num_pages[replica], self._beside[replica] = 0, {}
        self._all |= bit

    def drop(self, replica: str) -> None:
        """Forgets a replica; nothing where it is unknown."""
        if replica in self._bits:
            bit = self._bits.pop(replica)
            self._all ^= bit
            if self._num_pages[replica]:
                self._retired |= bit
                self._unswept = [*self._holders]
            del self._names[bit], self._num_pages[replica], self._beside[replica]

    def clear(self, replica: str) -> None:
        """The replica has no page any more."""
        if self._num_pages[replica]:
            self.drop(replica)
            self.add(replica)

    def store(self, replica: str, pages: Collection[Hashable], medium: int = CACHE) -> None:
        """A medium of the replica has these pages now."""
        holders, bit, beside = self._holders, self._bits[replica], self._beside[replica]
        if medium != CACHE:
            for page in pages:
                others = beside.get(page) or (CACHE if holders.get(page, 0) & bit else 0)
                beside[page] = others | medium
        elif beside:
            for page in pages:
                if page in beside:
                    beside[page] |= CACHE
        if len(pages) > 1 and holders.keys().isdisjoint(pages):  # they refer to one number: there is no object per page
            before = len(holders)
            holders.update(dict.fromkeys(pages, bit))
            self._num_pages[replica] += len(holders) - before
        else:
            for page in pages:
                held = holders.get(page, 0)
                if not held & bit:
                    holders[page] = held | bit
                    self._num_pages[replica] += 1
        if self._unswept:
            self._sweep(_SWEPT * len(pages))

    def remove(self, replica: str, pages: Collection[Hashable], medium: int = CACHE) -> None:
        """A medium of the replica has these pages no more; unknown ones are skipped."""
        holders, bit, beside, num_removed = self._holders, self._bits[replica], self._beside[replica], 0
        if beside or medium != CACHE:
            pages = [page for page in pages if _leaves(beside, page, medium)]
        for page in pages:
            if (held := holders.pop(page, 0)) == bit:
                num_removed += 1
            elif held:
                num_removed += bool(held & bit)
                if left := held & ~bit:
                    holders[page] = left
        self._num_pages[replica] -= num_removed
        if self._unswept:
            self._sweep(_SWEPT * len(pages))

    def num_pages(self, replica: str) -> int:
        return self._num_pages[replica]

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

    def _sweep(self, count: int) -> None:
        """Clears retired bits in so many pages more. They are free once none is left."""
        holders, kept = self._holders, ~self._retired
        some = self._unswept[-count:]
        del self._unswept[-count:]
        for page in some:
            if left := (held := holders.get(page, 0)) & kept:
                holders[page] = left
            elif held:
                del holders[page]
        if not self._unswept:
            self._retired = 0


def _leaves(beside: dict[Hashable, int], page: Hashable, medium: int) -> bool:
    """Whether no medium has the page once this one has it no more. Without a note, only the cache may have it."""
    if (media := beside.pop(page, CACHE) & ~medium) and media != CACHE:
        beside[page] = media
    return not media
