"""The index of cached pages against a naive model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscine.extensions.replicas.routing.kv_index import CACHE, DISK, HOST, KVIndex

REPLICAS = [f"replica-{i}" for i in range(5)]
PAGES = list(range(12))

replicas = st.sampled_from(REPLICAS)
some_pages = st.lists(st.sampled_from(PAGES), max_size=6)
media = st.sampled_from([CACHE, CACHE, HOST, DISK])
operations = st.one_of(
    st.tuples(st.sampled_from(["store", "remove"]), replicas, some_pages, media),
    st.tuples(st.sampled_from(["clear", "drop"]), replicas, st.just([]), media),
)


def naive_overlap(cached: dict[str, set[tuple[int, int]]], prompt: list[int]) -> dict[str, int]:
    """`cached`: replica -> pages with a medium each."""
    overlap = {}
    for replica, own in cached.items():
        pages = {page for page, _ in own}
        leading = 0
        while leading < len(prompt) and prompt[leading] in pages:
            leading += 1
        if leading:
            overlap[replica] = leading
    return overlap


@pytest.mark.long
@settings(max_examples=300)
@given(st.lists(operations, max_size=30), st.lists(some_pages, min_size=1, max_size=4))
def test_it_is_the_naive_model(history: list[tuple[str, str, list[int], int]], prompts: list[list[int]]) -> None:
    index = KVIndex()
    cached: dict[str, set[tuple[int, int]]] = {}
    for operation, replica, pages, medium in history:
        if operation == "drop":
            index.drop(replica)
            cached.pop(replica, None)
            continue
        index.add(replica)
        own = cached.setdefault(replica, set())
        if operation == "store":
            index.store(replica, pages, medium)
            own.update((page, medium) for page in pages)
        elif operation == "remove":
            index.remove(replica, pages, medium)
            own.difference_update((page, medium) for page in pages)
        else:
            index.clear(replica)
            own.clear()
    for replica, own in cached.items():
        assert index.num_pages(replica) == len({page for page, _ in own})
    for prompt in [*prompts, PAGES]:
        assert index.overlap(prompt) == naive_overlap(cached, prompt)


def test_a_place_in_the_index_is_used_again() -> None:
    index = KVIndex()
    for life in range(200):  # a replica that comes back has a new name
        index.add(f"life-{life}")
        index.store(f"life-{life}", [1, 2])
        assert index.overlap([1, 2, 3]) == {f"life-{life}": 2}
        index.drop(f"life-{life}")
    assert index.overlap([1]) == {}


def test_pages_of_replicas_that_are_gone_are_forgotten_with_later_events() -> None:
    index = KVIndex()
    for replica in ("gone", "cleared", "there"):
        index.add(replica)
        index.store(replica, list(range(1000)))
    index.drop("gone")
    index.clear("cleared")
    assert (index.overlap(range(1000)), index.num_pages("cleared")) == ({"there": 1000}, 0)
    index.store("cleared", [0, 1])
    for page in range(1000):
        index.remove("there", [page])
    assert (index.overlap([0, 1, 2]), len(index._holders), index._retired) == ({"cleared": 2}, 2, 0)


def test_a_replica_has_a_page_as_long_as_any_of_its_media() -> None:
    index = KVIndex()
    index.add("a")
    index.store("a", [1, 2, 3])
    index.store("a", [1, 2], HOST)
    index.remove("a", [1, 2, 3])
    assert index.overlap([1, 2, 3]) == {"a": 2}
    index.store("a", [2], DISK)
    index.remove("a", [1, 2], HOST)
    assert (index.overlap([1]), index.overlap([2]), index.num_pages("a")) == ({}, {"a": 1}, 1)
    index.remove("a", [2], HOST)
    index.remove("a", [2], DISK)
    assert index.num_pages("a") == 0
