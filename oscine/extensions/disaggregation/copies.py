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
    """What brings a page to one rank of the target: one piece from a rank that has the same heads.

    Otherwise one piece per layer, kind (key or value) and rank with some of the heads. Of source ranks with the same
    heads one is read: not the same one for all targets. Raises ValueError if the groups are not compatible.
    """
    check_compatible(source, target)
    found: list[Copy] = []
    wanted = target.heads_of(target_rank)
    for source_rank in range(target_rank % source.holders, source.num_ranks, source.holders):
        held = source.heads_of(source_rank)
        if held == wanted:
            return [Copy(source_rank, 0, 0, target.page_bytes)]
        low, high = max(wanted.start, held.start), min(wanted.stop, held.stop)
        for block in range(2 * len(target.layers) if low < high else 0):
            found.append(
                Copy(
                    source_rank,
                    (block * source.heads_per_rank + low - held.start) * source.head_bytes,
                    (block * target.heads_per_rank + low - wanted.start) * target.head_bytes,
                    (high - low) * target.head_bytes,
                )
            )
    return found
