"""Tokens that are only counted: a request of a simulation has a number of tokens, and the addresses of its pages."""

from collections.abc import Callable
from typing import SupportsIndex, cast, overload

from oscine.engine.core.prefix_index import PrefixIndex
from oscine.engine.core.request import Request

Addresses = Callable[
    [int, int], list[bytes]
]  # of the pages from one place up to another; equal prefixes, equal address


def no_addresses(first: int, end: int) -> list[bytes]:
    raise AssertionError("tokens without pages")


class TokenRun:
    """Stands for a list of token ids in the scheduler and the cache, which ask only for its length and its pages."""

    __slots__ = ("addresses", "count")

    def __init__(self, count: int, addresses: Addresses = no_addresses) -> None:
        self.count, self.addresses = count, addresses

    def __len__(self) -> int:
        return self.count

    def append(self, token: int) -> None:
        self.count += 1

    def __add__(self, other: "TokenRun | list[int]") -> "TokenRun":
        return TokenRun(self.count + len(other), self.addresses)

    @overload
    def __getitem__(self, key: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, key: slice) -> "TokenRun": ...
    def __getitem__(self, key: SupportsIndex | slice) -> "TokenRun | int":
        return TokenRun(len(range(*key.indices(self.count))), self.addresses) if isinstance(key, slice) else 0


def tokens(count: int, addresses: Addresses = no_addresses) -> list[int]:
    """A run of tokens, as the records of requests have it."""
    return cast(list[int], TokenRun(count, addresses))


def set_length(request: Request, count: int) -> None:
    """The request, whose tokens are a run, has so many now."""
    cast(TokenRun, request.token_ids).count = count


class AddressedIndex(PrefixIndex):
    """Takes the addresses of pages from the run of tokens, in place of hashing token ids."""

    def extend_digests(
        self, digests: list[bytes], token_ids: list[int], num_pages: int, salt: str = "", adapter: str = ""
    ) -> None:
        if len(digests) < num_pages:
            digests += cast(TokenRun, token_ids).addresses(len(digests), num_pages)
