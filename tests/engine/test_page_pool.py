"""Holders, the free list and the order of eviction."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from oscine.engine.core.page_pool import PagePool


def pool_with_cached(num_pages: int, *, cold: list[int], kept: list[int]) -> tuple[PagePool, list[int]]:
    """A pool whose pages are all taken, then left cached in the given order; and the list of what it forgets."""
    forgotten: list[int] = []
    pool = PagePool(num_pages, forgotten.append)
    for page in pool.allocate(num_pages):
        pool.mark_indexed([page])
    for page in kept:
        pool.release(page)
    for page in cold:
        pool.release(page, cold=True)
    return pool, forgotten


def test_cold_pages_are_evicted_before_kept_ones_and_the_oldest_first() -> None:
    pool, forgotten = pool_with_cached(6, kept=[3, 1], cold=[5, 0])
    assert pool.num_available == 4
    assert pool.allocate(4) == [5, 0, 3, 1] == forgotten


def test_free_pages_are_given_before_cached_ones() -> None:
    pool, forgotten = pool_with_cached(2, kept=[0], cold=[])
    pool.allocate(1)
    assert forgotten == [0]
    pool.release(0)  # its content was never indexed again
    assert pool.allocate(1) == [0]
    assert forgotten == [0]


def test_a_page_taken_again_is_not_evicted_and_returns_as_the_youngest() -> None:
    pool, forgotten = pool_with_cached(3, kept=[0, 1, 2], cold=[])
    pool.retain(0)
    assert pool.num_available == 2
    pool.release(0)
    assert pool.allocate(3) == [1, 2, 0] == forgotten


def test_a_shared_page_is_cached_only_after_its_last_holder() -> None:
    pool, _ = pool_with_cached(1, kept=[], cold=[])
    pool.retain(0)
    pool.release(0)
    assert (pool.num_used, pool.num_available, pool.num_unheld([0])) == (1, 0, 0)
    pool.release(0)
    assert (pool.num_used, pool.num_available, pool.num_unheld([0])) == (0, 1, 1)


def test_misuse_is_noticed() -> None:
    pool = PagePool(2, lambda page: None)
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(0)
    with pytest.raises(AssertionError, match="nothing to share"):
        pool.retain(0)


class PagePoolMachine(RuleBasedStateMachine):
    """Against a model that keeps sets."""

    @initialize(num_pages=st.integers(1, 6))
    def start(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages, self.forget)
        self.num_pages = num_pages
        self.held: list[int] = []  # one entry a holder
        self.indexed: set[int] = set()

    def forget(self, page: int) -> None:
        assert page not in self.held
        self.indexed.remove(page)

    @precondition(lambda self: self.pool.num_available)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        pages = self.pool.allocate(data.draw(st.integers(1, self.pool.num_available)))
        assert set(pages).isdisjoint(self.held)
        assert set(pages).isdisjoint(self.indexed)
        self.held += pages

    @precondition(lambda self: self.held)
    @rule(data=st.data(), cold=st.booleans())
    def release(self, data: st.DataObject, cold: bool) -> None:
        page = data.draw(st.sampled_from(self.held))
        self.held.remove(page)
        self.pool.release(page, cold=cold)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def index(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(self.held))
        self.pool.mark_indexed([page])
        self.indexed.add(page)

    @precondition(lambda self: self.indexed)
    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.indexed)))
        self.pool.retain(page)
        self.held.append(page)

    @invariant()
    def counts_add_up(self) -> None:
        assert self.pool.num_used == len(set(self.held))
        assert self.pool.num_available == self.num_pages - len(set(self.held))


TestPagePool = PagePoolMachine.TestCase
TestPagePool.settings = settings(max_examples=40, stateful_step_count=30)
