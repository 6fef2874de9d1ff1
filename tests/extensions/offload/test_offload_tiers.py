"""What host memory and the disk drop first, and when pages come back."""

from math import inf

import pytest

from oscine.engine.core.rates import Rate
from oscine.extensions.offload.rates import Rates
from oscine.extensions.offload.tiers import DiskTier, HostTier
from oscine.types import ScheduledSequence, StepPlan

A, B, C, D = ((0, bytes([i])) for i in range(4))


def always(key: object) -> bool:
    return True


def test_host_memory_drops_what_was_used_least_recently() -> None:
    tier = HostTier(3)
    slots, dropped = tier.take(5, always)
    assert (sorted(slots), dropped) == ([0, 1, 2], [])
    for key, slot in zip((A, B, C), slots, strict=True):
        tier.put(key, slot)
    tier.touch(A)
    assert tier.take(1, always) == ([slots[1]], [B])
    tier.put(D, slots[1])
    tier.demote(D)
    tier.pin([D])
    assert tier.take(1, always) == ([slots[2]], [C])
    tier.give_back(slots[2])
    assert tier.take(3, lambda key: key != A) == ([slots[2]], [])
    tier.unpin([D])
    assert tier.take(3, always) == ([slots[1], slots[0]], [D, A])
    assert len(tier) == 0


def test_the_disk_drops_the_file_that_was_used_least_recently() -> None:
    tier = DiskTier()
    for number, keys in ((1, [A, B]), (2, [C]), (3, [])):
        tier.begin(number, 100 * number)
        if keys:
            tier.complete(number, keys)
    assert (tier.num_bytes, len(tier)) == (600, 3)
    assert (tier.place(B), tier.oldest()) == ((1, 1), 1)
    tier.touch(A)
    assert tier.oldest() == 2
    tier.pin([2])
    assert tier.oldest() == 1
    assert tier.remove(1) == [A, B]
    assert A not in tier
    assert tier.oldest() is None  # one is in use, one is being written
    tier.unpin([2])
    tier.complete(3, [C, D])  # a second copy
    assert tier.remove(2) == []
    assert tier.place(C) == (3, 0)
    assert tier.num_bytes == 300
    tier.begin(4, 100)
    tier.complete(4, [C])
    assert tier.remove(4) == [C]
    assert tier.remove(3) == [D]


def plan(*tokens: int) -> StepPlan:
    return StepPlan(0, [], [ScheduledSequence(i, 0, count, True, []) for i, count in enumerate(tokens)])


def test_rates_say_how_long_copies_and_tokens_take() -> None:
    rates = Rates()
    assert rates.compute_s(64) == inf
    rates.note_step(plan(1, 1, 1), 9.0)  # decode says nothing about prompts
    rates.note_step(plan(10, *[1] * 20), 9.0)
    assert rates.token.per_unit == 0
    rates.note_step(plan(990, *[1] * 10), 1.0)
    assert rates.token.per_unit == pytest.approx(1e-3)
    rates.host.note(1.0, 1e6)
    rates.disk.note(1.0, 1e5)
    assert rates.compute_s(100) == pytest.approx(0.1)
    assert rates.load_s(50_000, 0) == pytest.approx(0.05, abs=0.002)
    assert rates.load_s(50_000, 10_000) == pytest.approx(0.15, abs=0.002)


def test_a_rate_follows_recent_measurements() -> None:
    rate = Rate()
    assert rate.per_unit == 0
    rate.assume(3.0, 1.0)
    assert rate.per_unit == 3.0
    rate.note(10.0, 1.0)
    rate.assume(3.0, 1.0)
    assert rate.per_unit == 10.0
    for _ in range(40):
        rate.note(1.0, 1.0)
    assert rate.per_unit == pytest.approx(1.0, rel=0.01)
