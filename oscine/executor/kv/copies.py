"""Which bytes move a page from one engine to another.

Arithmetic only: no memory, no transport; nothing here depends on where the bytes are.
"""

from typing import NamedTuple

from oscine.kv_group import KVGroup, check_compatible


class Copy(NamedTuple):
    """Bytes of a page that move in one piece; offsets count from the start of the page on its rank."""

    source_rank: int
    source_offset: int
    target_offset: int
    length: int


def copies(source: KVGroup, target: KVGroup, target_rank: int) -> list[Copy]:
    """What brings a page to one rank of the target: one piece if both have the same number of ranks.

    Otherwise one piece per layer, kind (key or value) and rank with some of the heads. Raises ValueError if the groups
    are not compatible.
    """
    check_compatible(source, target)
    if source.num_ranks == target.num_ranks:
        return [Copy(target_rank, 0, 0, target.page_bytes)]
    first = target_rank * target.heads_per_rank
    found: list[Copy] = []
    for source_rank in range(source.num_ranks):
        source_first = source_rank * source.heads_per_rank
        low = max(first, source_first)
        high = min(first + target.heads_per_rank, source_first + source.heads_per_rank)
        for block in range(2 * len(target.layers) if low < high else 0):
            found.append(
                Copy(
                    source_rank,
                    (block * source.heads_per_rank + low - source_first) * source.head_bytes,
                    (block * target.heads_per_rank + low - first) * target.head_bytes,
                    (high - low) * target.head_bytes,
                )
            )
    return found
