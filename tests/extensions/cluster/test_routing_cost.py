"""The replica of a request: each term of the cost alone, and the order among equals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscine.extensions.replicas.routing.cost import SLACK, ReplicaLoad, cost, rank, sticky_key
from oscine.extensions.replicas.routing.replica_view import Expected, ReplicaView
from oscine.extensions.replicas.spec.snapshot import ReplicaReport
from oscine.types import EngineInfo, EngineStats

IDLE = [ReplicaLoad("a"), ReplicaLoad("b"), ReplicaLoad("c")]


def first(loads: list[ReplicaLoad], overlap: dict[str, int], num_tokens: int = 1000, key: bytes = b"k") -> str:
    return next(rank(loads, overlap, num_tokens, key))


def test_the_longest_overlap_wins_among_idle_replicas() -> None:
    assert first(IDLE, {"a": 128, "b": 640}) == "b"


def test_a_prompt_is_computed_again_rather_than_waiting_longer_for_its_pages() -> None:
    busy = ReplicaLoad("b", queued_tokens=1200)
    assert first([ReplicaLoad("a"), busy], {"b": 640}) == "a"
    assert first([ReplicaLoad("a"), ReplicaLoad("b", queued_tokens=300)], {"b": 640}) == "b"


@pytest.mark.parametrize(
    "loaded",
    [
        ReplicaLoad("a", queued_tokens=2000),
        ReplicaLoad("a", active_tokens=20_000),
        ReplicaLoad("a", num_requests=40),
        ReplicaLoad("a", capacity_tokens=4096, held_tokens=4000),
        ReplicaLoad("a", capacity_tokens=4096, cached_tokens=4096),
    ],
    ids=["queue", "contexts", "requests", "held pages", "full cache"],
)
def test_each_term_drives_requests_away(loaded: ReplicaLoad) -> None:
    empty = ReplicaLoad("b", capacity_tokens=4096)
    assert all(first([loaded, empty], {}, key=bytes([i])) == "b" for i in range(20))


def test_windows_fill_the_memory_of_a_replica_too() -> None:
    """300 slots of 500 are held, and in 100 there are only cached pages, half of them of windows."""
    view = ReplicaView("a", 0.0, ReplicaReport(info=EngineInfo("m", 4096, 300, page_size=16, max_num_seqs=4)))
    slots = {"kv_slots_used": 300, "kv_slots_cached": 100, "kv_slots_total": 500}
    view.hear(EngineStats(full_pages_used=150, full_pages_total=500, **slots), 1.0)
    load = view.load(1.0)
    assert (load.held_tokens, load.cached_tokens, load.capacity_tokens) == (300 * 16, 100 * 16, 500 * 16)
    view.expect(Expected("r", 100, 40, 1.0))
    assert view.load(1.0).held_tokens == 300 * 16 + 60
    assert ReplicaView("b", 0.0).load(1.0).capacity_tokens == 0, "not known yet"


def test_a_full_cache_costs_nothing_to_whom_it_has() -> None:
    full = ReplicaLoad("a", capacity_tokens=4096, cached_tokens=4096)
    assert cost(full, 640, 640) == cost(ReplicaLoad("a", capacity_tokens=4096), 640, 640)


def test_equality_is_sticky() -> None:
    keys = [bytes([i]) for i in range(60)]
    chosen = {key: first(IDLE, {}, key=key) for key in keys}
    assert chosen == {key: first(IDLE[::-1], {}, key=key) for key in keys}, "the order of replicas decides nothing"
    assert set(chosen.values()) == {"a", "b", "c"}
    left = {key: first(IDLE[:2], {}, key=key) for key in keys}
    assert all(left[key] == chosen[key] for key in keys if chosen[key] != "c"), "only those of the lost one move"


def test_a_small_difference_of_load_does_not_move_a_session() -> None:
    keys = [bytes([i]) for i in range(30)]
    noisy = [ReplicaLoad("a", active_tokens=300), ReplicaLoad("b", num_requests=1), ReplicaLoad("c")]
    assert {key: first(noisy, {}, key=key) for key in keys} == {key: first(IDLE, {}, key=key) for key in keys}
    assert first([ReplicaLoad("a", num_requests=1), ReplicaLoad("b")], {"a": 64}, num_tokens=100) == "a"


def test_prompts_with_a_common_beginning_that_all_have_are_spread() -> None:
    system = [b"s1", b"s2"]
    keys = [sticky_key([*system, b"user %d" % i], [2, 2, 2]) for i in range(30)]
    assert {first(IDLE, {"a": 128, "b": 128, "c": 128}, key=key) for key in keys} == {"a", "b", "c"}
    assert sticky_key(system, [2]) == b"s2"
    assert sticky_key([], []) == b""


loads = st.builds(
    ReplicaLoad,
    replica=st.uuids().map(str),
    queued_tokens=st.integers(0, 10_000),
    active_tokens=st.integers(0, 10_000),
    num_requests=st.integers(0, 100),
    capacity_tokens=st.integers(0, 10_000),
    held_tokens=st.integers(0, 10_000),
    cached_tokens=st.integers(0, 20_000),
)


@given(loads, st.integers(1, 5000), st.data())
def test_more_overlap_never_costs_more(load: ReplicaLoad, num_tokens: int, data: st.DataObject) -> None:
    less, more = sorted(data.draw(st.tuples(*[st.integers(0, num_tokens)] * 2)))
    assert 0 <= cost(load, num_tokens, more) <= cost(load, num_tokens, less)


@pytest.mark.long
@given(st.lists(loads, max_size=6, unique_by=lambda load: load.replica), st.integers(1, 5000))
def test_every_replica_is_ranked_once_and_none_is_much_cheaper_than_the_first(
    given: list[ReplicaLoad], num: int
) -> None:
    order = [*rank(given, {}, num, b"k")]
    assert sorted(order) == sorted(load.replica for load in given)
    costs = {load.replica: cost(load, num, 0) for load in given}
    assert all(costs[order[0]] <= costs[replica] + SLACK for replica in order)


@pytest.mark.long
@given(st.lists(st.tuples(st.sampled_from(["hear", "expect", "withdraw", "pass"]), st.integers(0, 9)), max_size=30))
def test_a_load_that_is_kept_is_the_one_that_is_counted(events: list[tuple[str, int]]) -> None:
    info = EngineInfo("m", 4096, 300, page_size=16, max_num_seqs=4)
    view, now_s, arrived = ReplicaView("a", 0.0, ReplicaReport(info=info)), 0.0, 0
    for what, number in events:
        now_s += number / 8
        if what == "hear":
            arrived += number
            view.hear(EngineStats(requests=arrived, queued_tokens=number, num_running=number), now_s)
        elif what == "expect":
            view.expect(Expected(str(number), 100, 10 * number, now_s))
        elif what == "withdraw":
            view.withdraw(str(number))
        assert view.load(now_s) == view.load(now_s) == view._count_load(now_s)
