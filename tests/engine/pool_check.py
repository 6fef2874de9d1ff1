"""What holds of the pools of pages at any time, counted anew."""

from collections import Counter
from collections.abc import Sequence

from oscine.engine.core.page_pool import Arena, PagePool, Pools


def check_pools(pools: Pools, held: Sequence[Counter[int]]) -> None:
    """Each page is held, cached or free, once, and each slot has pages of one group. `held`: holders of the pages of
    each group."""
    for groups, arena in pools._arenas:
        _check_arena(arena, [held[group] for group in groups])


def _check_arena(arena: Arena, held: Sequence[Counter[int]]) -> None:
    owners: dict[int, int] = {}  # of slots with pages that are held or cached
    busy: set[int] = set()  # slots with pages that are held
    for place, (pool, of_pool) in enumerate(zip(arena.pools, held, strict=True)):
        each, indexed = pool.per_slot, {page for page in range(pool.num_pages) if pool._indexed[page]}
        assert {page: n for page, n in enumerate(pool._holders) if n} == dict(of_pool)
        cached = indexed - set(of_pool)
        own, used = {page // each for page in indexed | set(of_pool)}, {page // each for page in of_pool}
        assert owners.keys().isdisjoint(own), "a slot has pages of two groups"
        owners |= dict.fromkeys(own, place)
        busy |= used
        assert set(pool._stranded) == {page for page in cached if page // each in used}
        others = {page for slot in used for page in range(slot * each, (slot + 1) * each)}
        assert set(pool._loose) == others - indexed - set(of_pool)
        assert pool.num_used == len(of_pool)
    lines = [(line, [*line]) for line in (arena._cold, arena._kept)]
    assert [line.count for line, _ in lines] == [len(slots) for _, slots in lines]
    in_line = [(slot, line) for line, slots in lines for slot in slots]
    places = {slot: place for slot, place in enumerate(arena._places) if place is not None}
    opened = {slot: pool for slot, (_, pool) in places.items()}
    assert sorted(slot for slot, _ in in_line) == sorted(opened)
    assert all(places[slot][0] is line for slot, line in in_line)
    assert opened == {slot: arena.pools[place] for slot, place in owners.items() if slot not in busy}
    assert sorted([*arena._free, *owners]) == list(range(arena.num_slots))
    assert arena.num_open == arena.num_slots - len(busy)


def num_available(pool: PagePool) -> int:
    """Pages that the pool can give, if it is the only one that is asked."""
    return len(pool._loose) + len(pool._stranded) + pool._arena.num_open * pool.per_slot
