"""The holders of each page, and the memory that page groups share: free slots, cached pages, and the order of eviction.

An arena is divided into slots of equal size. A slot has pages of one group at a time: one page, or several of a group
with smaller pages. Which group gets how many slots is decided by the load. A page is in exactly one of three states:

    held     by one request or, after a prefix hit, by several
    cached   not held, but the prefix index has its content: it can be taken again, or evicted
    free     not held, content worthless

A slot without held pages is open: it can be given to any group of its arena. The open slots whose pages were all
released as cold are evicted first, then the others, least recently released first.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

from oscine.kv_group import Slots


class Usage(NamedTuple):
    """Numbers of slots of an arena."""

    held: int
    cached: int  # without held pages, with cached pages that are not cold
    total: int


class Pools:
    """The pools of all groups, by their places."""

    def __init__(self, memory: Sequence[Slots], forget: Callable[[int, Sequence[int]], None]) -> None:
        """`forget` is called with the group and cached pages when these are given away to hold something else."""
        self._arenas = [(slots.groups, Arena(slots.count, slots.per_slot)) for slots in memory]
        found = {group: pool for groups, arena in self._arenas for group, pool in zip(groups, arena.pools, strict=True)}
        self._pools = [found[group] for group in range(len(found))]
        self._are_plain = all(isinstance(pool, PlainPool) for pool in self._pools)
        self._are_apart = len(self._arenas) == len(self._pools)  # each has slots of its own
        for group, pool in enumerate(self._pools):
            pool.forget = partial(forget, group)

    def __getitem__(self, group: int) -> "PagePool":
        return self._pools[group]

    def __iter__(self) -> Iterator["PagePool"]:
        return iter(self._pools)

    def __len__(self) -> int:
        return len(self._pools)

    @property
    def usage(self) -> Usage:
        """The usage of the arena with the largest share of held slots."""
        return max(self._arenas, key=_held_share)[1].usage

    def have_room(
        self,
        wanted: Sequence[int],
        retained: Sequence[Sequence[int]] | None = None,
        released: Sequence[Sequence[int]] | None = None,
    ) -> bool:
        """As can_allocate(), with one more page for each running sequence that may need it."""
        if not retained and not released and len(self._arenas) == 1:
            arena, num_more = self._arenas[0][1], sum(wanted)
            for pool in self._pools:
                num_more += pool.num_growing
            if arena.num_open >= num_more:
                return True  # a page takes a slot at most
        return self.can_allocate(
            [want + pool.num_growing for want, pool in zip(wanted, self, strict=True)], retained, released
        )

    def can_allocate(
        self,
        wanted: Sequence[int],
        retained: Sequence[Sequence[int]] | None = None,
        released: Sequence[Sequence[int]] | None = None,
    ) -> bool:
        """Whether all groups have room for `wanted` more pages at once, after `retained` pages got a holder and
        `released` ones lost one.

        Each argument has one entry per group. A page is in `released` once per holder that it loses.
        """
        is_simple = not retained and not released
        for groups, arena in self._arenas:
            num_open = arena.num_open
            if is_simple and num_open >= sum([wanted[group] for group in groups]):
                continue  # a page takes a slot at most
            for group in groups:
                known = retained[group] if retained else ()
                num_open -= self._pools[group].slots_for(wanted[group], known, released[group] if released else ())
            if num_open < 0:
                return False
        return True

    def allocate(self, counts: Sequence[int]) -> list[list[int]]:
        """`counts` pages of each group; there must be room. Each pool leaves the open slots that the next ones need."""
        if self._are_plain:
            return [pool.allocate(count, count) for pool, count in zip(self._pools, counts, strict=True)]
        found: dict[int, list[int]] = {}
        for groups, arena in self._arenas:
            needed = [self._pools[group].slots_for(counts[group]) for group in groups]
            for place, group in enumerate(groups):
                most_opened = arena.num_open - sum(needed[place + 1 :])
                found[group] = self._pools[group].allocate(counts[group], most_opened)
        return [found[group] for group in range(len(found))]

    def have_slots(self, count: int) -> bool:
        """Whether `count` more pages of each group find an open slot each."""
        return all(arena.num_open >= count * len(groups) for groups, arena in self._arenas)

    def allocate_each(self, count: int) -> list[list[int]]:
        """As allocate() of one page of each group, `count` times. Returns the pages of each group, in this order."""
        if self._are_apart:
            return self.allocate([count] * len(self))
        found: dict[int, list[int]] = {}
        if not self._are_plain:
            rows = [self.allocate([1] * len(self)) for _ in range(count)]
            return [[page for row in rows for page in row[group]] for group in range(len(self))]
        for groups, arena in self._arenas:
            slots = arena.open_some(count * len(groups))
            for place, group in enumerate(groups):
                found[group] = slots[place :: len(groups)]
                self._pools[group].hold_new(found[group])
        return [found[group] for group in range(len(found))]

    def clear(self) -> None:
        """Evicts every cached page. No page may be held."""
        for _, arena in self._arenas:
            arena.clear()

    def next_evicted(self, count: int | None = None) -> Iterator[tuple[int, int]]:
        """(group, page) of the cached pages that the next `count` slots of each arena would evict; None: all slots.

        Cold pages are left out.
        """
        for groups, arena in self._arenas:
            for place, page in arena.next_evicted(arena.num_slots if count is None else count):
                yield groups[place], page


def _held_share(arena: tuple[Sequence[int], "Arena"]) -> float:
    """Of the slots of an arena."""
    return (arena[1].num_slots - arena[1].num_open) / max(arena[1].num_slots, 1)


class _EvictionQueue:
    """Slots, first the one to evict next. A linked list in two arrays: a slot is added or removed in constant time."""

    __slots__ = ("_after", "_before", "_end", "count")

    def __init__(self, num_slots: int) -> None:
        self.count = 0
        self._end = num_slots  # a place after the last slot and before the first one
        self._after = [num_slots] * (num_slots + 1)
        self._before = [num_slots] * (num_slots + 1)

    def __iter__(self) -> Iterator[int]:
        return iter(self.first(self.count))

    def first(self, count: int) -> list[int]:
        """The first ones; there must be as many."""
        assert count <= self.count, "more slots than are in the queue"
        after, slot = self._after, self._end
        return [slot := after[slot] for _ in range(count)]

    def add(self, slots: Sequence[int]) -> None:
        """At the end, in this order."""
        after, before, end = self._after, self._before, self._end
        last = before[end]
        for slot in slots:
            after[last] = slot
            before[slot] = last
            last = slot
        after[last] = end
        before[end] = last
        self.count += len(slots)

    def remove(self, slot: int) -> None:
        before, after = self._before[slot], self._after[slot]
        self._after[before] = after
        self._before[after] = before
        self.count -= 1

    def take_first(self) -> int:
        """As take(1)."""
        assert self.count, "no slot is in the queue"
        slot = self._after[self._end]
        self.remove(slot)
        return slot

    def take(self, count: int) -> list[int]:
        """As first(), and removes them."""
        if not count:
            return []
        found, end = self.first(count), self._end
        self._after[end] = slot = self._after[found[-1]]
        self._before[slot] = end
        self.count -= count
        return found


class Arena:
    """Slots 0 .. num_slots - 1, and a pool of pages for each of its groups."""

    def __init__(self, num_slots: int, per_slot: Sequence[int]) -> None:
        """`per_slot`: pages that a slot has, for each group."""
        self.num_slots = num_slots
        self.pools = tuple(PlainPool(self) if count == 1 else PagePool(self, count) for count in per_slot)
        self._free = list(range(num_slots - 1, -1, -1))
        # Open slots with cached pages:
        self._cold, self._kept = _EvictionQueue(num_slots), _EvictionQueue(num_slots)
        # Of each slot, if it is open and has cached pages: the queue it is in, and whose pages they are.
        self._places: list[tuple[_EvictionQueue, PagePool] | None] = [None] * num_slots

    @property
    def num_open(self) -> int:
        return len(self._free) + self._cold.count + self._kept.count

    @property
    def usage(self) -> Usage:
        return Usage(self.num_slots - self.num_open, self._kept.count, self.num_slots)

    def next_evicted(self, count: int) -> Iterator[tuple[int, int]]:
        """(pool, page) of each cached page that the next `count` slots would evict; not cold ones."""
        num_kept = min(count - len(self._free) - self._cold.count, self._kept.count)
        for slot in self._kept.first(num_kept):
            _, pool = self._places[slot]  # type: ignore[misc]
            place = self.pools.index(pool)
            yield from ((place, page) for page in pool.cached_in(slot))

    def open(self) -> int:
        """An open slot, for the pool that calls. Its cached pages are evicted."""
        if self._free:
            return self._free.pop()
        slot = (self._cold if self._cold.count else self._kept).take_first()
        place = self._places[slot]
        assert place is not None
        self._places[slot] = None
        place[1].evict([slot])
        return slot

    def open_some(self, count: int) -> list[int]:
        """As open(), several times."""
        if count == 1:
            return [self.open()]
        free = self._free
        slots = free[: -count - 1 : -1]
        del free[len(free) - len(slots) :]
        for oldest in (self._cold, self._kept):
            if num_evicted := min(count - len(slots), oldest.count):
                evicted = oldest.take(num_evicted)
                self._evict(evicted)
                slots += evicted
        assert len(slots) == count, "more slots than are open"
        return slots

    def clear(self) -> None:
        """Evicts every cached page. No page may be held."""
        assert self.num_open == self.num_slots, "a page is held"
        self._free += self.open_some(self.num_slots)[::-1]

    def take(self, slot: int) -> None:
        """A page of this slot is held now."""
        if (place := self._places[slot]) is not None:
            place[0].remove(slot)
            self._places[slot] = None

    def take_some(self, slots: Iterable[int]) -> None:
        """As take() of each."""
        places = self._places
        for slot in slots:
            if (place := places[slot]) is not None:
                place[0].remove(slot)
                places[slot] = None

    def _evict(self, slots: Sequence[int]) -> None:
        """The cached pages of these slots, which are in no queue any more."""
        places = self._places
        if len(self.pools) == 1:
            self.pools[0].evict(slots)
        else:
            for place, run in groupby(slots, places.__getitem__):
                assert place is not None
                place[1].evict([*run])
        for slot in slots:
            places[slot] = None

    def give_back(self, slot: int, pool: "PagePool", *, cached: bool, cold: bool) -> None:
        """No page of this slot is held any more. `cached`: some are. `cold`: all cached ones were released so."""
        self.give_back_some([] if cached else [slot], [slot] if cached else [], pool, cold=cold)

    def give_back_some(self, free: list[int], cached: list[int], pool: "PagePool", *, cold: bool) -> None:
        """As give_back(), for slots without and with cached pages."""
        self._free += free
        if cached:
            queue, places = self._cold if cold else self._kept, self._places
            place = queue, pool
            for slot in cached:
                places[slot] = place
            queue.add(cached)


class PagePool:
    """Pages 0 .. num_pages - 1 of one group. Slot s has the pages from s * per_slot on."""

    def __init__(self, arena: Arena, per_slot: int) -> None:
        self.per_slot = per_slot
        self.num_pages = arena.num_slots * per_slot
        self.num_used = 0  # pages held
        self.num_growing = 0  # running sequences that may need one page more than they hold
        # Called with cached pages that are given away.
        self.forget: Callable[[Sequence[int]], None] = lambda pages: None
        self._arena = arena
        self._holders = [0] * self.num_pages
        self._indexed = bytearray(self.num_pages)  # whether the prefix index knows the page
        self._is_cold = bytearray(self.num_pages)  # of cached pages
        self._held = [0] * arena.num_slots  # pages held, per slot
        # Of slots with held pages:
        self._loose: OrderedDict[int, None] = OrderedDict()  # free pages; a dict's first is slow to find
        self._stranded: OrderedDict[int, None] = OrderedDict()  # cached pages; oldest first

    def slots_for(self, count: int, retained: Sequence[int] = (), released: Sequence[int] = ()) -> int:
        """The fewest open slots that `count` more pages take, after `retained` pages got a holder and `released` ones
        lost one each time that they are named. If it is negative, more slots are open than before."""
        unheld = [page for page in retained if not self._holders[page]]
        num_taken = len({slot for page in unheld if not self._held[slot := page // self.per_slot]})
        num_beside = len(self._loose) + len(self._stranded) - len(unheld)
        if released:
            times = Counter(released)
            freed = [page for page in times.keys() - retained if times[page] == self._holders[page]]
            left = Counter(page // self.per_slot for page in freed)
            kept = {page // self.per_slot for page in unheld}
            num_taken -= sum(n == self._held[slot] for slot, n in left.items() if slot not in kept)
            num_beside += len(freed)
        num_beside += num_taken * self.per_slot
        return num_taken - min(0, num_beside - max(0, count)) // self.per_slot

    def cached_in(self, slot: int) -> list[int]:
        """Those of its pages that are cached."""
        return [page for page in self._pages_of(slot) if self._indexed[page] and not self._holders[page]]

    def allocate(self, count: int, most_opened: int) -> list[int]:
        """`count` pages for one holder, for which it may take so many open slots. There must be room."""
        pages: list[int] = []
        for _ in range(count):
            if self._loose:
                page = next(iter(self._loose))
            elif most_opened > 0:
                most_opened -= 1
                page = self._arena.open() * self.per_slot
            else:
                page = next(iter(self._stranded))
                self._lose([page])
            self._hold(page)
            pages.append(page)
        return pages

    def hold_new(self, pages: Sequence[int]) -> None:
        """Free pages, in slots that were opened for this pool, have a holder each."""
        for page in pages:
            self._hold(page)

    def retain(self, page: int) -> None:
        """One more holder of a held or cached page."""
        if self._holders[page]:
            self._holders[page] += 1
            return
        assert self._indexed[page], "a free page holds nothing to share"
        self._hold(page)

    def retain_some(self, pages: Iterable[int]) -> None:
        """As retain() of each."""
        for page in pages:
            self.retain(page)

    def release(self, page: int, *, cold: bool = False) -> None:
        """One holder fewer. The last one leaves the page cached if it is indexed (cold: to be evicted early)."""
        assert self._holders[page] > 0, "released more often than held"
        self._holders[page] -= 1
        if self._holders[page]:
            return
        self.num_used -= 1
        self._is_cold[page] = cold
        slot = page // self.per_slot
        self._held[slot] -= 1
        if self._held[slot]:
            self._set_aside(page)
            return
        for other in self._pages_of(slot):
            self._loose.pop(other, None)
            self._stranded.pop(other, None)
        cached = self.cached_in(slot)
        cold = all(self._is_cold[page] for page in cached)
        self._arena.give_back(slot, self, cached=bool(cached), cold=cold)

    def release_some(self, pages: Iterable[int], *, cold: bool = False) -> None:
        """As release() of each, in this order."""
        for page in pages:
            self.release(page, cold=cold)

    def mark_indexed(self, pages: Iterable[int]) -> None:
        """The prefix index now knows the content of these held pages."""
        indexed = self._indexed
        for page in pages:
            indexed[page] = True

    def evict(self, slots: Sequence[int]) -> None:
        """All pages of these open slots are free from now on, and the slots are given to a pool."""
        self._lose([page for slot in slots for page in self.cached_in(slot)])

    def _hold(self, page: int) -> None:
        """The first holder of a page."""
        self._holders[page] = 1
        self.num_used += 1
        self._loose.pop(page, None)
        self._stranded.pop(page, None)
        slot = page // self.per_slot
        self._held[slot] += 1
        if self._held[slot] == 1:
            self._arena.take(slot)
            for other in self._pages_of(slot):
                if other != page:
                    self._set_aside(other)

    def _set_aside(self, page: int) -> None:
        """A page that is not held, beside pages that are."""
        if self._indexed[page]:
            self._stranded[page] = None
        else:
            self._loose[page] = None

    def _lose(self, pages: Sequence[int]) -> None:
        indexed = self._indexed
        for page in pages:
            indexed[page] = False
        self.forget(pages)

    def _pages_of(self, slot: int) -> range:
        return range(slot * self.per_slot, (slot + 1) * self.per_slot)


class PlainPool(PagePool):
    """Does what its parent does where a slot has one page, without a look at other pages of the slot."""

    def __init__(self, arena: Arena) -> None:
        super().__init__(arena, 1)

    def slots_for(self, count: int, retained: Sequence[int] = (), released: Sequence[int] = ()) -> int:
        holders = self._holders
        num_slots = max(0, count) + sum([not holders[page] for page in retained])
        if released:
            times = Counter(released)
            num_slots -= sum([times[page] == holders[page] for page in times.keys() - retained])
        return num_slots

    def allocate(self, count: int, most_opened: int) -> list[int]:
        pages = self._arena.open_some(count)
        self.hold_new(pages)
        return pages

    def hold_new(self, pages: Sequence[int]) -> None:
        holders = self._holders
        for page in pages:
            holders[page] = 1
        self.num_used += len(pages)

    def retain_some(self, pages: Iterable[int]) -> None:
        holders, indexed, new = self._holders, self._indexed, list[int]()
        for page in pages:
            if not holders[page]:
                assert indexed[page], "a free page holds nothing to share"
                new.append(page)
            holders[page] += 1
        self.num_used += len(new)
        self._arena.take_some(new)

    def release(self, page: int, *, cold: bool = False) -> None:
        holders = self._holders
        assert holders[page] > 0, "released more often than held"
        holders[page] -= 1
        if not holders[page]:
            self.num_used -= 1
            self._arena.give_back(page, self, cached=bool(self._indexed[page]), cold=cold)

    def release_some(self, pages: Iterable[int], *, cold: bool = False) -> None:
        holders, indexed = self._holders, self._indexed
        free: list[int] = []
        cached: list[int] = []
        for page in pages:
            holders[page] = left = holders[page] - 1
            if not left:
                (cached if indexed[page] else free).append(page)
            assert left >= 0, "released more often than held"
        self.num_used -= len(free) + len(cached)
        self._arena.give_back_some(free, cached, self, cold=cold)

    def cached_in(self, slot: int) -> list[int]:
        return [slot] if self._indexed[slot] and not self._holders[slot] else []

    def evict(self, slots: Sequence[int]) -> None:
        self._lose(slots)  # a slot with other pages is free

    def _hold(self, page: int) -> None:
        self._holders[page] = 1
        self.num_used += 1
        self._arena.take(page)
