"""Which prefixes are found, and when a missing page of either group makes them shorter."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscine.engine.core.prefix_index import PrefixIndex, extend_digests, root_of

SIZE = 4
WINDOW = 9  # eight keys back: exactly two pages at a page boundary


def index_of(tokens: list[int], *, window: int = WINDOW) -> tuple[PrefixIndex, list[bytes]]:
    """An index that knows every page of tokens; page i is 10 + i in the full group and 20 + i in the sliding one."""
    index = PrefixIndex(SIZE, window, root_of(""))
    digests: list[bytes] = []
    index.extend_digests(digests, tokens, len(tokens) // SIZE)
    for i, digest in enumerate(digests):
        assert index.insert("full", digest, 10 + i)
        assert index.insert("sliding", digest, 20 + i)
    return index, digests


def test_a_hit_names_all_full_pages_and_only_the_last_window_of_sliding_ones() -> None:
    index, digests = index_of(list(range(20)))
    hit = index.find(digests)
    assert hit.num_pages == hit.branch_page == 5
    assert hit.full_pages == [10, 11, 12, 13, 14]
    assert hit.sliding_pages == [-1, -1, -1, 23, 24]
    assert hit.first_sliding == 3


def test_a_digest_covers_everything_before_it() -> None:
    index = PrefixIndex(SIZE, WINDOW, root_of(""))
    one: list[bytes] = []
    two: list[bytes] = []
    index.extend_digests(one, [1, 2, 3, 4, 5, 6, 7, 8], 2)
    index.extend_digests(two, [0, 2, 3, 4, 5, 6, 7, 8], 2)
    assert set(one).isdisjoint(two)
    grown = one[:1]
    index.extend_digests(grown, [1, 2, 3, 4, 5, 6, 7, 8], 2)
    assert grown == one


def test_a_seed_makes_addresses_equal_and_no_seed_makes_them_unlike_any_other() -> None:
    tokens = list(range(2 * SIZE))
    without_index: list[bytes] = []
    extend_digests(without_index, tokens, 2, page_size=SIZE, root=root_of("ab12"))
    found: dict[str, list[bytes]] = {"ab12": [], "ab13": [], "": []}
    for seed, digests in found.items():
        PrefixIndex(SIZE, WINDOW, root_of(seed)).extend_digests(digests, tokens, 2)
    assert found["ab12"] == without_index
    assert found["ab13"] != without_index
    again: list[bytes] = []
    PrefixIndex(SIZE, WINDOW, root_of("")).extend_digests(again, tokens, 2)
    assert again != found[""]


def test_prefixes_are_shared_within_a_salt_alone() -> None:
    index, plain = index_of(list(range(20)))
    salts: dict[str, list[bytes]] = {"": [], "mine": [], "yours": []}
    for salt, digests in salts.items():
        index.extend_digests(digests, list(range(8)), 2, salt)
        index.extend_digests(digests, list(range(20)), 5, salt)
    assert salts[""] == plain
    assert len({digest for digests in salts.values() for digest in digests}) == 15
    assert index.find(salts["mine"]).num_pages == 0
    first_page = array("q", range(SIZE)).tobytes().decode()  # a salt that a client could send
    spelled: list[bytes] = []
    index.extend_digests(spelled, list(range(SIZE, 20)), 4, first_page)
    assert set(spelled).isdisjoint(plain)


def test_without_a_full_page_the_prefix_ends_before_it() -> None:
    index, digests = index_of(list(range(20)))
    index.forget("full", 13)
    hit = index.find(digests)
    assert (hit.num_pages, hit.branch_page) == (3, 3)
    assert hit.sliding_pages == [-1, 21, 22]


@pytest.mark.parametrize(
    ("lost", "num_pages"),
    [
        ([20], 5),  # long out of reach
        ([22], 5),
        ([23], 3),  # in the last window: 4 and 5 pages need it
        ([24], 4),
        ([23, 21], 1),
        ([20, 22, 24], 0),
    ],
)
def test_without_a_sliding_page_the_longest_prefix_with_a_whole_window_is_used(lost: list[int], num_pages: int) -> None:
    index, digests = index_of(list(range(20)))
    for page in lost:
        index.forget("sliding", page)
    hit = index.find(digests)
    assert (hit.num_pages, hit.branch_page) == (num_pages, 5)
    assert len(hit.full_pages) == len(hit.sliding_pages) == num_pages


def test_a_second_page_of_the_same_content_is_refused() -> None:
    index, digests = index_of(list(range(8)))
    assert not index.insert("full", digests[0], 99)
    index.forget("full", 10)
    assert index.insert("full", digests[0], 99)
    assert index.find(digests).full_pages == [99, 11]


@settings(max_examples=100, deadline=None)
@given(
    window=st.integers(1, 20),
    num_pages=st.integers(0, 8),
    lost_full=st.sets(st.integers(2, 7), max_size=2),
    lost_sliding=st.sets(st.integers(0, 7), max_size=4),
)
def test_find_is_the_definition(window: int, num_pages: int, lost_full: set[int], lost_sliding: set[int]) -> None:
    index, digests = index_of(list(range(num_pages * SIZE)), window=window)
    for page in range(num_pages):
        if page in lost_full:
            index.forget("full", 10 + page)
        if page in lost_sliding:
            index.forget("sliding", 20 + page)

    def usable(count: int) -> bool:
        keys = range(max(0, count * SIZE - window + 1), count * SIZE)  # what the token after the prefix attends to
        return lost_full.isdisjoint(range(count)) and all(key // SIZE not in lost_sliding for key in keys)

    hit = index.find(digests)
    assert hit.num_pages == max(count for count in range(num_pages + 1) if usable(count))
    assert hit.branch_page == max(count for count in range(num_pages + 1) if lost_full.isdisjoint(range(count)))
