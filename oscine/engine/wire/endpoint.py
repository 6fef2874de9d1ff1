"""What an engine tells others of its pages, and the checks of what it is told."""

from msgspec import Struct

from oscine.kv_group import KVGroup
from oscine.types import RankMemory, Region, Transport

_ADDRESSES, _DEVICES = 1 << 64, 1 << 31


class KVEndpoint(Struct, frozen=True):
    """All that another engine must know to read this one's pages. Holds for one life of its process."""

    model: str  # name, weights and sizes: what makes equal tokens have equal keys and values
    groups: list[KVGroup]
    ranks: list[RankMemory]
    transport: Transport = Transport()


def check_endpoint(endpoint: KVEndpoint) -> None:
    """Raises ValueError for impossible addresses, or for ranks and regions that do not match."""
    fits = all(group.num_ranks == len(endpoint.ranks) for group in endpoint.groups)
    for rank in endpoint.ranks:
        fits &= 0 <= rank.device < _DEVICES and len(rank.regions) == len(endpoint.groups)
        fits &= all(map(_is_memory, rank.regions, endpoint.groups))
    if not fits:
        raise ValueError("the addresses of its pages are invalid")


def check_pages(pages: list[list[int]], endpoint: KVEndpoint, lengths: list[int]) -> None:
    """Raises ValueError for a wrong number of pages, or for pages outside the memory of `endpoint`.

    `lengths`: pages of the prompt, or of its last window, per group.
    """
    if len(pages) != len(lengths):
        raise ValueError(f"it has pages of {len(pages)} groups; there are {len(lengths)}")
    for place, (group, of_group, length) in enumerate(zip(endpoint.groups, pages, lengths, strict=True)):
        if len(of_group) != length:
            raise ValueError(f"it has {len(of_group)} {group.name} pages of the prompt; there are {length}")
        end = min(rank.regions[place].num_pages for rank in endpoint.ranks)
        if of_group and not 0 <= min(of_group) <= max(of_group) < end:
            raise ValueError(f"{group.name} pages must be between 0 and {end - 1}")


def _is_memory(region: Region, group: KVGroup) -> bool:
    end = region.address + region.num_pages * region.stride
    return region.address >= 0 and region.num_pages >= 0 and group.page_bytes <= region.stride and end < _ADDRESSES
