"""What clients send: sessions of turns, each with a number of tokens and the addresses of its pages."""

from collections.abc import Sequence
from dataclasses import dataclass

from oscine.extensions.plan.engine.tokens import Addresses


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session."""

    prompt_tokens: int  # the turns before it included
    max_tokens: int  # to generate
    addresses: Addresses  # of the pages of prompt and answer


_PAGE_BITS, _OWNER_BITS = 24, 39  # the router looks at 8 bytes of an address
MAX_OWNER = (1 << _OWNER_BITS) - 1
_ALONE = 1 << _OWNER_BITS


def pages(owner: int, first: int, end: int, *, alone: bool = False) -> list[bytes]:
    """Addresses of pages. `alone`: no other request has such pages, so the owner is another one."""
    base = ((_ALONE if alone else 0) | owner) << _PAGE_BITS
    return [(base + page).to_bytes(8, "big") for page in range(first, end)]


@dataclass(frozen=True, slots=True)
class Pages:
    """Addresses: first those of pages that others may have too, then those of the owner alone."""

    shared: Sequence[bytes]
    owner: int

    def __call__(self, first: int, end: int) -> list[bytes]:
        num_shared = len(self.shared)
        if first >= num_shared:
            return pages(self.owner, first, end, alone=True)
        shared = [*self.shared[first:end]]
        return shared + pages(self.owner, max(first, num_shared), end, alone=True) if end > num_shared else shared


Session = tuple[Turn, ...]  # each turn follows the answer to the one before it
