"""Which pages hold which prefix of tokens: content addresses of full pages, one table for each page group.

Knows nothing of holders or requests. A page is addressed by a digest of all tokens up to its end, so equal addresses
mean equal content. Each group forgets pages on its own.
"""

import hashlib
import os
from array import array
from typing import NamedTuple, Protocol

from oscine.types import PageGroup


def root_of(seed: str) -> bytes:
    """The address of the empty prefix. A seed (hex) makes those of several engines equal; without one, nobody outside
    can predict an address."""
    return bytes.fromhex(seed) or os.urandom(16)


def salted(root: bytes, salt: str) -> bytes:
    """The root of requests with this salt, which share prefixes only with each other; `root` without a salt.

    No choice of a salt makes this equal to the address of a page.
    """
    return hashlib.blake2b(root + salt.encode(), digest_size=16, person=b"salt").digest() if salt else root


def extend_digests(digests: list[bytes], token_ids: list[int], num_pages: int, *, page_size: int, root: bytes) -> None:
    """Makes `digests`, of 16 bytes each, cover the first `num_pages` pages of token_ids."""
    parent = digests[-1] if digests else root
    for page in range(len(digests), num_pages):
        packed = array("q", token_ids[page * page_size : (page + 1) * page_size]).tobytes()
        parent = hashlib.blake2b(parent + packed, digest_size=16).digest()
        digests.append(parent)


class PrefixHit(NamedTuple):
    """The longest usable prefix: `num_pages` pages of tokens; holes of the sliding group are -1."""

    num_pages: int
    branch_page: int  # pages of the longest prefix known in the full group; more than num_pages if windows are missing
    full_pages: list[int]
    sliding_pages: list[int]
    first_sliding: int  # sliding_pages before this index are holes


class PageEvents(Protocol):
    """Hears what becomes of pages of the full group."""

    def stored(self, digests: list[bytes], token_ids: list[int], pages: list[int]) -> None:
        """Pages of a prefix, by their places in it, are known now; it has these digests and tokens, or more."""
        ...

    def removed(self, digest: bytes) -> None:
        """A page is known no more."""
        ...


class PrefixIndex:
    """Digest of a prefix of whole pages -> the page that holds its last page_size tokens."""

    def __init__(self, page_size: int, sliding_window: int, root: bytes) -> None:
        self.page_size = page_size
        self._reach = sliding_window - 1  # how far back of its own position a token looks
        self._root = root  # address of the empty prefix
        self.events: PageEvents | None = None
        self._pages: dict[PageGroup, dict[bytes, int]] = {"full": {}, "sliding": {}}
        self._digests: dict[PageGroup, dict[int, bytes]] = {"full": {}, "sliding": {}}

    def first_needed(self, num_pages: int) -> int:
        """The first sliding page that the token after `num_pages` pages, or any later one, reads."""
        return max(0, num_pages * self.page_size - self._reach) // self.page_size

    def extend_digests(self, digests: list[bytes], token_ids: list[int], num_pages: int, salt: str = "") -> None:
        """As the function of this name, with the page size and the root of this index."""
        if len(digests) >= num_pages:
            return
        root = self._root if digests else salted(self._root, salt)
        extend_digests(digests, token_ids, num_pages, page_size=self.page_size, root=root)

    def page(self, group: PageGroup, digest: bytes) -> int | None:
        """The page that holds the last tokens of this prefix, if there is one."""
        return self._pages[group].get(digest)

    def insert(self, group: PageGroup, digest: bytes, page: int) -> bool:
        """Offers a page. False if another page of this content is known already."""
        if digest in self._pages[group]:
            return False
        self._pages[group][digest] = page
        self._digests[group][page] = digest
        return True

    def forget(self, group: PageGroup, page: int) -> None:
        """The page is about to hold something else."""
        digest = self._digests[group].pop(page)
        del self._pages[group][digest]
        if group == "full" and self.events is not None:
            self.events.removed(digest)

    def announce(self, digests: list[bytes], token_ids: list[int], places: list[int]) -> None:
        """Tells who listens of pages of the full group that were just inserted."""
        if places and self.events is not None:
            self.events.stored(digests, token_ids, places)

    def find(self, digests: list[bytes]) -> PrefixHit:
        """The longest prefix whose full pages are all known and whose last window is known in the sliding group."""
        full, sliding = self._pages["full"], self._pages["sliding"]
        known = 0  # leading pages known in the full group
        run = 0  # pages known in the sliding group in a row, up to here
        best = 0
        for digest in digests:
            if digest not in full:
                break
            known += 1
            run = run + 1 if digest in sliding else 0
            if run >= known - self.first_needed(known):
                best = known
        first = self.first_needed(best)
        return PrefixHit(
            num_pages=best,
            branch_page=known,
            full_pages=[full[digest] for digest in digests[:best]],
            sliding_pages=[-1] * first + [sliding[digest] for digest in digests[first:best]],
            first_sliding=first,
        )
