"""Which pages hold which prefix of tokens: content addresses of whole pages, one table for each page group.

A page is addressed by a digest of all tokens up to its end, so equal addresses mean equal content. Each group forgets
pages on its own.
"""

import hashlib
import os
from array import array
from collections.abc import Container, Iterable, Sequence
from itertools import takewhile
from typing import Literal, NamedTuple, Protocol

from oscine.kv_group import KVGroup


def root_of(seed: str) -> bytes:
    """The address of the empty prefix. Engines with the same seed (hex) have the same addresses. Without one, addresses
    cannot be predicted."""
    return bytes.fromhex(seed) or os.urandom(16)


def salted(root: bytes, salt: str, adapter: str = "") -> bytes:
    """The root of requests with this salt and adapter, which share prefixes only with each other; `root` without both.

    No choice of a salt makes this equal to the address of a page, or to a root of other requests.
    """
    if adapter:
        root = hashlib.blake2b(root + adapter.encode(), digest_size=16, person=b"adapter").digest()
    return hashlib.blake2b(root + salt.encode(), digest_size=16, person=b"salt").digest() if salt else root


def extend_digests(digests: list[bytes], token_ids: list[int], num_pages: int, *, page_size: int, root: bytes) -> None:
    """Makes `digests`, of 16 bytes each, cover the first `num_pages` pages of token_ids."""
    parent = digests[-1] if digests else root
    for page in range(len(digests), num_pages):
        packed = array("q", token_ids[page * page_size : (page + 1) * page_size]).tobytes()
        parent = hashlib.blake2b(parent + packed, digest_size=16).digest()
        digests.append(parent)


class PrefixHit(NamedTuple):
    """The longest usable prefix: `num_pages` pages of tokens."""

    num_pages: int
    branch_page: int  # pages of the longest prefix known in the first group; more than num_pages if windows are missing
    pages: list[list[int]]  # per group; -1 where the page is out of the window
    first_held: list[int]  # per group: where its window begins, pages before this index are -1


def usable_pages(groups: Sequence[KVGroup], known: Sequence[Container[bytes]], digests: list[bytes]) -> tuple[int, int]:
    """The longest prefix, in pages, of which every group knows what the next token, or a later one, reads; and the
    longest that the first group knows. `known`: digests per group."""
    full = known[0]
    num_pages = num_known = len([*takewhile(full.__contains__, digests)])
    windowed = list(zip(groups, known, strict=True))[1:]
    while (lost := _last_lost(windowed, digests, num_pages)) is not None:
        num_pages = lost
    return num_pages, num_known


def _last_lost(
    windowed: Sequence[tuple[KVGroup, Container[bytes]]], digests: list[bytes], num_pages: int
) -> int | None:
    """A page of a window after `num_pages` pages that its group does not know, the last one of that group. A usable
    prefix ends before it."""
    for group, known in windowed:
        for i in range(num_pages - 1, group.first_needed(num_pages) - 1, -1):
            if digests[i] not in known:
                return i
    return None


Offer = tuple[list[bytes], list[int], list[int], range]  # digests and tokens of a prefix; pages; their places in it
Medium = Literal["GPU", "CPU", "DISK"]  # the memory of the model on any device, host memory beside it, files


class PageEvents(Protocol):
    """Hears what becomes of pages of the first group."""

    def stored(self, digests: list[bytes], token_ids: list[int], places: Sequence[int]) -> None:
        """Pages of a prefix, by their places in it, are known now; it has these digests and tokens, or more."""
        ...

    def removed(self, digests: list[bytes], medium: Medium = "GPU") -> None:
        """Pages are known no more."""
        ...

    def offloaded(self, digests: list[bytes], medium: Medium) -> None:
        """Pages are in another medium as well."""
        ...


class PrefixIndex:
    """Digest of a prefix of whole pages -> the page that holds its last page_size tokens. Groups go by their places."""

    def __init__(self, groups: Sequence[KVGroup], root: bytes, num_pages: Sequence[int]) -> None:
        """`root`: address of the empty prefix. `num_pages`: of each group."""
        self.page_size = groups[0].page_size
        self._groups = groups
        self._root = root
        self.events: PageEvents | None = None
        self._pages: list[dict[bytes, int]] = [{} for _ in groups]
        # By page: its digest, unless `_pages` has another page for that, or none. A list is smaller than a dictionary
        # whose keys come and go.
        self._digests: list[list[bytes]] = [[b""] * count for count in num_pages]

    def extend_digests(
        self, digests: list[bytes], token_ids: list[int], num_pages: int, salt: str = "", adapter: str = ""
    ) -> None:
        """As the function of this name, with the page size and the root of this index."""
        if len(digests) >= num_pages:
            return
        root = self._root if digests else salted(self._root, salt, adapter)
        extend_digests(digests, token_ids, num_pages, page_size=self.page_size, root=root)

    def page(self, group: int, digest: bytes) -> int | None:
        """The page that holds the last tokens of this prefix, if there is one."""
        return self._pages[group].get(digest)

    def digest(self, group: int, page: int) -> bytes | None:
        """The prefix whose last tokens this page holds, if it holds any."""
        digest = self._digests[group][page]
        return digest if self._pages[group].get(digest) == page else None

    def digests(self, group: int) -> Container[bytes]:
        """Of all prefixes whose last page the group has."""
        return self._pages[group]

    def forget(self, group: int, pages: Sequence[int]) -> None:
        """The pages are about to hold something else."""
        known, digest_of = self._pages[group], self._digests[group]
        digests = [digest_of[page] for page in pages]
        for digest in digests:
            del known[digest]
        if group == 0 and self.events is not None:
            self.events.removed(digests)

    def register(
        self, group: int, digests: list[bytes], token_ids: list[int], pages: list[int], places: range
    ) -> list[int]:
        """Offers the pages at these places of a prefix of these tokens, or more; no two have the same digest. Returns
        those that are new here."""
        return self.register_each(group, [(digests, token_ids, pages, places)])

    def register_each(self, group: int, offers: Iterable[Offer]) -> list[int]:
        """As register() of each."""
        known, digest_of, new = self._pages[group], self._digests[group], list[int]()
        events = self.events if group == 0 else None
        for digests, token_ids, pages, places in offers:
            learnt: Sequence[int] = places
            if len(pages) > 1 and known.keys().isdisjoint(offered := digests[places.start : places.stop]):
                known.update(zip(offered, pages, strict=True))
                for page, digest in zip(pages, offered, strict=True):
                    digest_of[page] = digest
                new += pages
            else:
                learnt = []
                for i, page in enumerate(pages, places.start):
                    if (digest := digests[i]) not in known:
                        known[digest] = page
                        digest_of[page] = digest
                        learnt.append(i)
                        new.append(page)
            if learnt and events is not None:
                events.stored(digests, token_ids, learnt)
        return new

    def find(self, digests: list[bytes]) -> PrefixHit:
        """The longest prefix of which every group knows all pages that the next token, or a later one, reads."""
        num_pages, num_known = usable_pages(self._groups, self._pages, digests)
        first_held = [group.first_needed(num_pages) for group in self._groups]
        return PrefixHit(
            num_pages,
            branch_page=num_known,
            pages=[
                [-1] * first + [*map(pages.__getitem__, digests[first:num_pages])]
                for pages, first in zip(self._pages, first_held, strict=True)
            ],
            first_held=first_held,
        )
