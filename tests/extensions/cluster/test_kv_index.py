"""The index of cached pages against a naive model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscine.extensions.replicas.routing.kv_index import DISK, HOST, KVIndex

REPLICAS = [f"replica-{i}" for i in range(5)]
PAGES = list(range(12))

replicas = st.sampled_from(REPLICAS)
some_pages = st.lists(st.sampled_from(PAGES), max_size=6)
operations = st.one_of(
    st.tuples(st.just("store"), replicas, some_pages),
    st.tuples(st.just("remove"), replicas, some_pages),
    st.tuples(st.sampled_from(["clear", "drop"]), replicas, st.just([])),
)


def naive_overlap(cached: dict[str, set[int]], prompt: list[int]) -> dict[str, int]:
    overlap = {}
    for replica, pages in cached.items():
        leading = 0
        while leading < len(prompt) and prompt[leading] in pages:
            leading += 1
        if leading:
            overlap[replica] = leading
    return overlap


@pytest.mark.long
@settings(max_examples=300)
@given(st.lists(operations, max_size=30), st.lists(some_pages, min_size=1, max_size=4))
def test_it_is_the_naive_model(history: list[tuple[str, str, list[int]]], prompts: list[list[int]]) -> None:
    index = KVIndex()
    cached: dict[str, set[int]] = {}
    for operation, replica, pages in history:
        if operation == "drop":
            index.drop(replica)
            cached.pop(replica, None)
            continue
        index.add(replica)
        own = cached.setdefault(replica, set())
        if operation == "store":
            index.store(replica, pages)
            own.update(pages)
        elif operation == "remove":
            index.remove(replica, pages)
            own.difference_update(pages)
        else:
            index.clear(replica)
            own.clear()
    for replica, own in cached.items():
        assert index.num_pages(replica) == len(own)
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
