"""Slots that page groups share: their size, and what sequences take of them."""

from dataclasses import replace
from itertools import count, product

import pytest

from oscine.kv_dtype import KVDtype
from oscine.kv_group import KVGroup, Slots, apart, most_pages, shared, slots_of

HEAD = 64 * 64 * 2  # bytes of the keys of a head and layer in a page, bfloat16
HEAD_FP8 = 65 * 64  # a row of scales beside 64 tokens


def groups(
    full: str = "bfloat16", layers: tuple[int, ...] = (18, 18), windows: tuple[int, ...] = (128,), ranks: int = 1
) -> list[KVGroup]:
    """gpt-oss-120b where nothing else is said. `layers`: of each group."""
    kinds = zip((None, *windows), layers, strict=True)
    return [
        KVGroup(window, tuple(range(num)), 8, 64, 64, full if window is None else "bfloat16", ranks)
        for window, num in kinds
    ]


@pytest.mark.parametrize(
    ("given", "per_slot", "slot_bytes"),
    [
        (groups(), (1, 1), 18 * 2 * 8 * HEAD),
        (groups(ranks=8), (1, 1), 18 * 2 * HEAD),
        (groups(KVDtype.FP8), (2, 1), 2 * 18 * 2 * 8 * HEAD_FP8),
        (groups(KVDtype.FP8, ranks=8), (2, 1), 2 * 18 * 2 * HEAD_FP8),
        (groups(layers=(19, 18)), (1, 1), 19 * 2 * 8 * HEAD),  # the draft head is one more layer
        (groups(KVDtype.FP8, layers=(19, 18)), (2, 1), 2 * 19 * 2 * 8 * HEAD_FP8),
        (groups(layers=(12, 6, 6), windows=(8192, 128)), (1, 2, 2), 12 * 2 * 8 * HEAD),
        (groups(layers=(9, 9, 9), windows=(128, 256)), (1, 1, 1), 9 * 2 * 8 * HEAD),
        (groups(layers=(24,), windows=()), (1,), 24 * 2 * 8 * HEAD),
    ],
)
def test_the_slots_of_models(given: list[KVGroup], per_slot: tuple[int, ...], slot_bytes: int) -> None:
    slots = shared(given, 7)
    assert slots == Slots(tuple(range(len(given))), per_slot, 7, slot_bytes)
    for place, group in enumerate(given):
        lost = 1 - group.page_bytes / slots.stride(place)
        assert lost <= 1 - 18 * 128 / (19 * 130), "no more than of a window beside FP8 and a layer of a draft head"


def test_pages_are_aligned_and_have_their_bytes() -> None:
    """Also where no size is a multiple of another, and pages are small."""
    for full, size, heads, layers in product(
        (KVDtype.FP8, "bfloat16"), (1, 3, 64), (1, 5), product(range(1, 8), repeat=2)
    ):
        given = [
            KVGroup(None, tuple(range(layers[0])), heads, size, 24, full),
            KVGroup(128, tuple(range(layers[1])), heads, size, 24, "bfloat16"),
        ]
        slots = shared(given)
        sizes = [group.page_bytes for group in given]
        assert min(slots.per_slot) == 1, "a slot is no larger than it must be"
        for place, page_bytes in enumerate(sizes):
            stride = slots.stride(place)
            assert stride % 128 == 0
            assert stride * slots.per_slot[place] == slots.slot_bytes
            assert page_bytes <= stride
        if min(sizes) >= 1 << 12:
            lost = sum(1 - page_bytes / slots.stride(place) for place, page_bytes in enumerate(sizes))
            assert lost < 0.5, "the larger page alone would do better"


def brute_force(given: list[KVGroup], slots: Slots, num_seqs: int, num_pages: int, drafts: bool) -> int:
    """Slots that are taken one by one: a page of a group opens one when those of the group are full."""
    taken = 0
    for group, each in zip(given, slots.per_slot, strict=True):
        room = 0
        for _ in range(num_seqs):
            held = num_pages if group.window is None else min(num_pages, group.decode_pages(drafts))
            for _ in range(held):
                if not room:
                    taken, room = taken + 1, each
                room -= 1
    return taken


SHARED = [
    (groups(), 12),
    (groups(KVDtype.FP8), 12),
    (groups(layers=(12, 6, 6), windows=(1024, 128)), 40),
    (groups(layers=(6, 12), windows=(129,)), 15),
]


@pytest.mark.parametrize(("given", "num_slots"), SHARED)
def test_slots_of_sequences_and_the_longest_one(given: list[KVGroup], num_slots: int) -> None:
    slots = shared(given, num_slots)
    for drafts, num_seqs, num_pages in product((False, True), (1, 2, 5), range(1, 24)):
        found = slots_of(given, slots, num_seqs, num_pages, drafts=drafts)
        assert found == brute_force(given, slots, num_seqs, num_pages, drafts)
    longest = most_pages(given, [slots])
    assert longest == next(n - 1 for n in count(1) if brute_force(given, slots, 1, n, drafts=True) > num_slots)
    assert longest > 0


def test_numbers_of_a_lone_sequence() -> None:
    assert most_pages(groups(), [shared(groups(), 12)]) == 12 - 4, "3 pages that the window touches, and the next"
    assert most_pages(groups(KVDtype.FP8), [shared(groups(KVDtype.FP8), 12)]) == 2 * (12 - 4)
    assert most_pages(groups(), [shared(groups(), 1)]) == 0, "a page of each group is the least"
    assert most_pages(groups(), [shared(groups(), 2)]) == 1
    assert most_pages(groups(), apart([9, 5], groups())) == 9, "memory of its own"
    assert slots_of(groups(), replace(shared(groups()), count=0), 10, 24, drafts=False) == 10 * 27
