"""The order of the queue, its estimates and its refusals, with a clock that the test moves."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscine.extensions.replicas.routing.fair_queue import FairQueue, Ticket
from oscine.extensions.replicas.spec.deployment import QueueLimits
from oscine.extensions.replicas.spec.placement import NoPlace


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def queue(clock: Clock | None = None, max_requests: int = 1000, max_wait_s: float = 60.0) -> FairQueue[str]:
    return FairQueue(QueueLimits(max_requests, max_wait_s), clock or Clock())


def push(q: FairQueue[str], item: str, *, priority: int = 0, tenant: str = "", tokens: float = 100) -> Ticket[str]:
    return q.push(item, priority=priority, tenant=tenant, tokens=tokens)[0]


def drain(q: FairQueue[str]) -> list[str]:
    items = []
    while (ticket := q.pop()) is not None:
        items.append(ticket.item)
    return items


def test_priority_goes_before_all_and_arrival_decides_among_equals() -> None:
    q = queue()
    for item, priority in [("a", 0), ("b", 1), ("c", -1), ("d", 0), ("e", 1)]:
        push(q, item, priority=priority)
    assert drain(q) == ["c", "a", "d", "b", "e"]


def test_a_tenant_with_one_request_does_not_wait_for_a_flood() -> None:
    q = queue()
    for i in range(50):
        push(q, f"flood-{i}", tenant="flood")
    assert q.pop() is not None
    push(q, "one", tenant="small")
    assert drain(q).index("one") <= 1


def test_shares_are_counted_in_tokens() -> None:
    q = queue()
    for _ in range(40):
        push(q, "long", tenant="long", tokens=300)
        push(q, "short", tenant="short", tokens=100)
    served = Counter(drain(q)[:40])
    assert served == {"long": 10, "short": 30}


def test_a_tenant_that_was_idle_has_saved_nothing_up() -> None:
    q = queue()
    for _ in range(30):
        push(q, "a", tenant="a")
    for _ in range(20):
        q.pop()
    for _ in range(10):
        push(q, "b", tenant="b")
    assert drain(q)[:10].count("b") in (5, 6)


def test_a_request_that_leaves_costs_its_tenant_nothing() -> None:
    q = queue()
    left = [push(q, f"left-{i}", tenant="a", tokens=1000) for i in range(5)]
    push(q, "b1", tenant="b")
    push(q, "b2", tenant="b")
    push(q, "a", tenant="a")
    assert all(q.remove(ticket) for ticket in left)
    assert not q.remove(left[0])
    assert drain(q) == ["b1", "a", "b2"]


def test_what_does_not_fit_lets_others_pass() -> None:
    q = queue()
    push(q, "stuck")
    push(q, "next")
    ticket = q.pop(lambda item: item != "stuck")
    assert ticket is not None
    assert ticket.item == "next"
    assert q.pop(lambda item: False) is None
    assert drain(q) == ["stuck"]


def test_the_wait_is_estimated_from_what_was_served_while_others_waited() -> None:
    clock = Clock()
    q = queue(clock)
    for i in range(40):
        push(q, str(i))
    assert q.estimate_s(0, "") is None, "nothing was served yet"
    for _ in range(20):
        clock.now_s += 0.5
        q.pop()
    assert q.estimate_s(0, "") == pytest.approx(21 / 2, rel=0.1)
    assert q.estimate_s(-1, "") == pytest.approx(1 / 2, rel=0.1), "more urgent than all that wait"
    assert q.estimate_s(0, "other") == pytest.approx(2 / 2, rel=0.1), "one of the flood may be before it"
    drain(q)
    clock.now_s += 3600  # in which nobody waited
    push(q, "later")
    assert q.estimate_s(0, "") == pytest.approx(2 / 2, rel=2), "quiet hours say nothing of how quick replicas are"


def test_a_wait_beyond_the_limit_is_refused_with_its_estimate() -> None:
    clock = Clock()
    q = queue(clock, max_wait_s=5)
    for i in range(20):
        push(q, str(i))
    for _ in range(10):
        clock.now_s += 1
        q.pop()
    with pytest.raises(NoPlace) as refusal:
        push(q, "one more")
    assert refusal.value.overloaded
    assert refusal.value.retry_after_s == 5
    assert "about 1" in refusal.value.message
    assert len(q) == 10
    push(q, "urgent", priority=-1)


def test_a_full_queue_refuses_and_says_when_to_come_again() -> None:
    q = queue(max_requests=3)
    for i in range(3):
        push(q, str(i))
    with pytest.raises(NoPlace, match="3 requests wait") as refusal:
        push(q, "4")
    assert refusal.value.overloaded
    assert refusal.value.retry_after_s == 1
    nothing = queue(max_requests=0)
    with pytest.raises(NoPlace):
        push(nothing, "1")


def test_a_full_queue_makes_room_for_who_has_less_of_it() -> None:
    q = queue(max_requests=3)
    for i in range(3):
        push(q, f"flood-{i}", tenant="flood")
    _, displaced = q.push("one", priority=0, tenant="small", tokens=1)
    assert displaced is not None
    assert displaced.item == "flood-2"
    with pytest.raises(NoPlace):
        push(q, "more", tenant="flood")
    _, displaced = q.push("urgent", priority=-1, tenant="flood", tokens=1)
    assert displaced is not None
    assert displaced.item == "flood-1"
    assert sorted(drain(q)) == ["flood-0", "one", "urgent"]


arrivals = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from("abc"), st.integers(1, 500), st.booleans()), min_size=1, max_size=60
)


@given(arrivals)
def test_nothing_is_lost_or_served_twice_and_a_tenant_is_never_overtaken_by_itself(
    given: list[tuple[int, str, int, bool]],
) -> None:
    q = queue()
    tickets, gone = [], []
    for i, (priority, tenant, tokens, leaves) in enumerate(given):
        tickets.append(push(q, str(i), priority=priority, tenant=tenant, tokens=tokens))
        if leaves:
            gone.append(str(i))
            assert q.remove(tickets[-1])
    order = [int(item) for item in drain(q)]
    assert sorted([*order, *map(int, gone)]) == list(range(len(given)))
    for tenant in "abc":
        own = [(given[i][0], i) for i in order if given[i][1] == tenant]
        assert own == sorted(own)
    assert len(q) == 0


@pytest.mark.long
@given(st.lists(st.sampled_from([50, 100, 400]), min_size=30, max_size=60), st.integers(2, 4))
def test_backlogged_tenants_get_equal_shares_up_to_one_request_each(sizes: list[int], num_tenants: int) -> None:
    q = queue()
    for i, tokens in enumerate(sizes):
        for tenant in range(num_tenants):
            q.push(f"{i}", priority=0, tenant=str(tenant), tokens=float(tokens if tenant else 100))
    served: Counter[str] = Counter()
    waiting = Counter({str(tenant): len(sizes) for tenant in range(num_tenants)})
    while all(waiting.values()):
        ticket = q.pop()
        assert ticket is not None
        served[ticket.tenant] += int(ticket.tokens)
        waiting[ticket.tenant] -= 1
        shares = [served[str(tenant)] for tenant in range(num_tenants)]
        assert max(shares) - min(shares) <= 2 * max(sizes)  # Goyal et al.: the sum of both tenants' longest requests
