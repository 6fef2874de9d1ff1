"""Holders, the free list and the order of eviction."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from oscine.engine.core.page_pool import PagePool, Pools, _EvictionQueue
from oscine.kv_group import Slots, apart

from .pool_check import check_pools, num_available


def pool_with_cached(num_pages: int, *, cold: list[int], kept: list[int]) -> tuple[PagePool, list[int]]:
    """A pool whose pages are all taken, then left cached in the given order; and the list of what it forgets."""
    forgotten: list[int] = []
    (pool,) = Pools([Slots((0,), (1,), num_pages)], lambda _, pages: forgotten.extend(pages))
    for page in pool.allocate(num_pages, num_pages):
        pool.mark_indexed([page])
    for page in kept:
        pool.release(page)
    for page in cold:
        pool.release(page, cold=True)
    return pool, forgotten


def test_cold_pages_are_evicted_before_kept_ones_and_the_oldest_first() -> None:
    pool, forgotten = pool_with_cached(6, kept=[3, 1], cold=[5, 0])
    assert num_available(pool) == 4
    assert pool.allocate(4, 4) == [5, 0, 3, 1] == forgotten


def test_free_pages_are_given_before_cached_ones() -> None:
    pool, forgotten = pool_with_cached(2, kept=[0], cold=[])
    pool.allocate(1, 1)
    assert forgotten == [0]
    pool.release(0)  # its content was never indexed again
    assert pool.allocate(1, 1) == [0]
    assert forgotten == [0]


def test_a_page_taken_again_is_not_evicted_and_returns_as_the_youngest() -> None:
    pool, forgotten = pool_with_cached(3, kept=[0, 1, 2], cold=[])
    pool.retain(0)
    assert num_available(pool) == 2
    pool.release(0)
    assert pool.allocate(3, 3) == [1, 2, 0] == forgotten


def test_a_shared_page_is_cached_only_after_its_last_holder() -> None:
    pool, _ = pool_with_cached(1, kept=[], cold=[])
    pool.retain(0)
    pool.release(0)
    assert (pool.num_used, num_available(pool), pool.slots_for(0, [0])) == (1, 0, 0)
    pool.release(0)
    assert (pool.num_used, num_available(pool), pool.slots_for(0, [0])) == (0, 1, 1)


def test_misuse_is_noticed() -> None:
    (pool,) = Pools(apart([2]), lambda group, pages: None)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(0)
    with pytest.raises(AssertionError, match="nothing to share"):
        pool.retain(0)


@pytest.mark.parametrize("cold", [False, True])
def test_pages_are_released_and_evicted_together_as_one_after_the_other(cold: bool) -> None:
    orders: list[list[int]] = []
    for is_together in (False, True):
        pool, forgotten = pool_with_cached(8, kept=[6, 2], cold=[7])  # 0, 1, 3, 4 and 5 are held
        pool.retain(2)
        pool.retain(0)
        if is_together:
            pool.release_some([4, 0, 2, 5], cold=cold)
            pages = pool.allocate(4, 4)
        else:
            for page in (4, 0, 2, 5):
                pool.release(page, cold=cold)
            pages = [page for _ in range(4) for page in pool.allocate(1, 1)]
        assert pages == forgotten
        assert (pool.num_used, num_available(pool)) == (7, 1)
        orders.append(pages)
    assert orders[0] == orders[1] == ([7, 4, 2, 5] if cold else [7, 6, 4, 2])


PER_SLOT = [(1, 1), (2, 1), (1, 2, 3)]


class PoolsMachine(RuleBasedStateMachine):
    """Against a model that keeps sets."""

    @initialize(num_slots=st.integers(1, 6), per_slot=st.sampled_from(PER_SLOT))
    def start(self, num_slots: int, per_slot: tuple[int, ...]) -> None:
        self.places = range(len(per_slot))
        self.pools = Pools([Slots(tuple(self.places), per_slot, num_slots)], self.forget)
        self.held: list[Counter[int]] = [Counter() for _ in per_slot]
        self.indexed: list[set[int]] = [set() for _ in per_slot]

    def forget(self, group: int, pages: Sequence[int]) -> None:
        for page in pages:
            assert not self.held[group][page]
            self.indexed[group].remove(page)

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        """As many pages of several groups as are said to fit."""
        wanted = [data.draw(st.integers(0, 4)) for _ in self.places]
        if not self.pools.can_allocate(wanted):
            return
        for group, pages in enumerate(self.pools.allocate(wanted)):
            assert len(pages) == wanted[group]
            assert self.indexed[group].isdisjoint(pages)
            assert not any(self.held[group][page] for page in pages)
            self.held[group].update(pages)

    @rule(data=st.data())
    def retain_and_allocate(self, data: st.DataObject) -> None:
        wanted = [data.draw(st.integers(0, 2)) for _ in self.places]
        known = [sorted(pages) for pages in self.indexed]
        retained = [data.draw(st.lists(st.sampled_from(pages), unique=True)) if pages else [] for pages in known]
        if not self.pools.can_allocate(wanted, retained):
            return
        for group in self.places:
            for page in retained[group]:
                self.pools[group].retain(page)
            self.held[group].update(retained[group])
        for group, pages in enumerate(self.pools.allocate(wanted)):
            self.held[group].update(pages)

    @rule(data=st.data())
    def release_several(self, data: st.DataObject) -> None:
        """What would fit after pages are released, and cached ones retained, is known before."""
        wanted = [data.draw(st.integers(0, 6)) for _ in self.places]
        elements = [sorted(pages.elements()) for pages in self.held]
        released = [data.draw(st.permutations(pages))[: data.draw(st.integers(0, 4))] for pages in elements]
        known = [sorted(pages) for pages in self.indexed]
        retained = [data.draw(st.lists(st.sampled_from(pages), unique=True)) if pages else [] for pages in known]
        expected = self.pools.can_allocate(wanted, retained, released)
        for group in self.places:
            self.pools[group].release_some(released[group])
            self.held[group] -= Counter(released[group])
        assert self.pools.can_allocate(wanted, retained) == expected

    @rule(data=st.data(), cold=st.booleans())
    def release(self, data: st.DataObject, cold: bool) -> None:
        found = [(group, page) for group in self.places for page in sorted(self.held[group].elements())]
        if found:
            group, page = data.draw(st.sampled_from(found))
            self.held[group] -= Counter([page])
            self.pools[group].release(page, cold=cold)

    @rule(data=st.data())
    def index(self, data: st.DataObject) -> None:
        found = [(group, page) for group in self.places for page in sorted(self.held[group])]
        if found:
            group, page = data.draw(st.sampled_from(found))
            self.pools[group].mark_indexed([page])
            self.indexed[group].add(page)

    @precondition(lambda self: not any(pages.total() for pages in self.held))
    @rule()
    def clear(self) -> None:
        self.pools.clear()
        assert not any(self.indexed)

    @rule(clear=st.booleans())
    def release_all(self, clear: bool) -> None:
        for group in self.places:
            for page in sorted(self.held[group].elements()):
                self.pools[group].release(page)
            self.held[group] = Counter()
        if clear:
            self.clear()

    @invariant()
    def counts_add_up(self) -> None:
        check_pools(self.pools, self.held)
        for group, pool in enumerate(self.pools):
            assert {page for page in range(pool.num_pages) if pool._indexed[page]} == self.indexed[group]
            wanted = [0] * len(self.pools)
            wanted[group] = num_available(pool)
            assert self.pools.can_allocate(wanted)
            wanted[group] += 1
            assert not self.pools.can_allocate(wanted)


TestPools = PoolsMachine.TestCase
TestPools.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.parametrize("memory", [apart([5, 7]), [Slots((0, 1), (1, 1), 12)], [Slots((0, 1), (1, 3), 12)]])
def test_pages_allocated_for_several_sequences_are_those_of_one_after_the_other(memory: list[Slots]) -> None:
    def pools() -> tuple[Pools, list[tuple[int, list[int]]]]:
        """Some pages are cached, in two groups, and some are held."""
        forgotten: list[tuple[int, list[int]]] = []
        made = Pools(memory, lambda group, pages: forgotten.append((group, [*pages])))
        for pool, pages in zip(made, made.allocate([4, 5]), strict=True):
            pool.mark_indexed(pages[1:])
            pool.release_some(pages[3::-1], cold=len(pages) == 4)
        return made, forgotten

    one, forgotten = pools()
    each, also_forgotten = pools()
    assert each.have_slots(3)
    rows = [one.allocate([1, 1]) for _ in range(3)]
    assert each.allocate_each(3) == [[page for row in rows for page in row[group]] for group in range(2)]
    assert [(group, page) for group, pages in forgotten for page in pages if group == 0] == [
        (group, page) for group, pages in also_forgotten for page in pages if group == 0
    ]
    assert [pool.num_used for pool in one] == [pool.num_used for pool in each]
    while one.can_allocate([1, 1]):
        assert one.allocate([1, 1]) == each.allocate([1, 1])
    assert not each.have_slots(1)


def test_slots_are_evicted_in_the_order_of_an_ordered_dictionary() -> None:
    random, queue, expected = Random(0), _EvictionQueue(30), OrderedDict[int, None]()
    for _ in range(2000):
        match random.randrange(3):
            case 0:
                out = [slot for slot in range(30) if slot not in expected]
                slots = random.sample(out, random.randint(0, len(out)))
                queue.add(slots)
                expected.update(dict.fromkeys(slots))
            case 1 if expected:
                slot = random.choice([*expected])
                queue.remove(slot)
                del expected[slot]
            case _:
                count = random.randint(0, len(expected) // 4)
                assert queue.take(count) == [expected.popitem(last=False)[0] for _ in range(count)]
        assert queue.count == len(expected)
        assert queue.first(queue.count) == [*expected]
