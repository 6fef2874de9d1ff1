"""Which prefixes are found, and when a missing page of any group makes them shorter."""

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscine.engine.core.prefix_index import PrefixIndex, extend_digests, root_of
from oscine.kv_group import KVGroup

SIZE = 4
WINDOW = 9  # eight keys back: exactly two pages at a page boundary


def new_index(*windows: int, seed: str = "") -> PrefixIndex:
    """Of full attention and these windows."""
    groups = [KVGroup(window, (i,), 1, SIZE, 2, "uint8") for i, window in enumerate([None, *windows])]
    return PrefixIndex(groups, root_of(seed), [100] * len(groups))


def index_of(tokens: list[int], *windows: int) -> tuple[PrefixIndex, list[bytes]]:
    """An index that knows every page of tokens; page i is 10 + i in group 0, full attention, 20 + i in group 1 ..."""
    windows = windows or (WINDOW,)
    index = new_index(*windows)
    digests: list[bytes] = []
    index.extend_digests(digests, tokens, len(tokens) // SIZE)
    for i, digest in enumerate(digests):
        for group in range(1 + len(windows)):
            index.register(group, [digest], [], [10 * (group + 1) + i], range(1))
    return index, digests


def test_a_hit_names_all_full_pages_and_only_the_last_window_of_sliding_ones() -> None:
    index, digests = index_of(list(range(20)))
    hit = index.find(digests)
    assert hit.num_pages == hit.branch_page == 5
    assert hit.pages == [[10, 11, 12, 13, 14], [-1, -1, -1, 23, 24]]
    assert hit.first_held == [0, 3]


def test_a_digest_covers_everything_before_it() -> None:
    index = new_index(WINDOW)
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
        new_index(WINDOW, seed=seed).extend_digests(digests, tokens, 2)
    assert found["ab12"] == without_index
    assert found["ab13"] != without_index
    again: list[bytes] = []
    new_index(WINDOW).extend_digests(again, tokens, 2)
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
    index.forget(0, [13])
    hit = index.find(digests)
    assert (hit.num_pages, hit.branch_page) == (3, 3)
    assert hit.pages[1] == [-1, 21, 22]


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
        index.forget(1, [page])
    hit = index.find(digests)
    assert (hit.num_pages, hit.branch_page) == (num_pages, 5)
    assert [len(pages) for pages in hit.pages] == [num_pages, num_pages]


def test_a_second_page_of_the_same_content_is_refused() -> None:
    index, digests = index_of(list(range(8)))
    assert not index.register(0, digests, [], [99], range(1))
    index.forget(0, [10])
    assert index.register(0, digests, [], [99], range(1)) == [99]
    assert index.find(digests).pages[0] == [99, 11]


@pytest.mark.long
@settings(max_examples=200)
@given(
    windows=st.lists(st.integers(1, 20), max_size=3),
    num_pages=st.integers(0, 8),
    lost_full=st.sets(st.integers(2, 7), max_size=2),
    lost=st.tuples(*[st.sets(st.integers(0, 7), max_size=4)] * 3),
)
def test_find_is_the_definition(
    windows: list[int], num_pages: int, lost_full: set[int], lost: tuple[set[int], ...]
) -> None:
    index, tokens = new_index(*windows), list(range(num_pages * SIZE))
    digests: list[bytes] = []
    index.extend_digests(digests, tokens, num_pages)
    missing = [lost_full, *lost][: 1 + len(windows)]
    for group, pages in enumerate(missing):
        for page in set(range(num_pages)) - pages:
            index.register(group, digests, [], [page], range(page, page + 1))

    def usable(count: int) -> bool:
        keys = [range(0 if w is None else max(0, count * SIZE - w + 1), count * SIZE) for w in (None, *windows)]
        return all(key // SIZE not in pages for seen, pages in zip(keys, missing, strict=True) for key in seen)

    hit = index.find(digests)
    assert hit.num_pages == max(count for count in range(num_pages + 1) if usable(count))
    assert hit.branch_page == max(count for count in range(num_pages + 1) if lost_full.isdisjoint(range(count)))
