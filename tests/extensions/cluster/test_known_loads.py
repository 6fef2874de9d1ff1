"""Loads that are counted anew only where something changed, against loads that are always counted anew."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from oscine.extensions.replicas.routing.known_loads import KnownLoads
from oscine.extensions.replicas.routing.replica_view import Expected, ReplicaView
from oscine.extensions.replicas.spec.snapshot import ReplicaReport
from oscine.types import Endpoints, EngineInfo, EngineStats

NAMES = "abc"
INFO = EngineInfo("m", 4096, 300, page_size=16, max_num_seqs=4)


def report(*, publishes: bool, is_ready: bool) -> ReplicaReport:
    endpoints = Endpoints("here", kv_events="there" if publishes else None)
    return ReplicaReport(state="ready" if is_ready else "draining", endpoints=endpoints, info=INFO)


def change(views: dict[str, ReplicaView], name: str, data: st.DataObject, now_s: float, number: int) -> None:
    """Something happens to a replica."""
    kind = data.draw(st.sampled_from(["join", "remove", "hear", "expect", "withdraw"]))
    if kind == "remove":
        views.pop(name, None)
    elif kind == "join" or name not in views:
        given = report(publishes=data.draw(st.booleans()), is_ready=data.draw(st.sampled_from([True, True, False])))
        views.setdefault(name, ReplicaView(name, now_s)).describe(given)
    elif kind == "hear":
        before = views[name].stats or EngineStats()
        numbers: dict[str, Any] = {"requests": before.requests + data.draw(st.integers(0, 3))}
        numbers |= {"num_running": data.draw(st.integers(0, 12)), "active_tokens": data.draw(st.integers(0, 99))}
        views[name].hear(EngineStats(**numbers), now_s)
    elif kind == "expect":
        views[name].expect(Expected(f"{number}", 100, 16, now_s))
    else:
        views[name].withdraw(f"{data.draw(st.integers(0, number))}")


@given(data=st.data(), steps=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from([0.0, 0.3, 1.1, 2.5]))))
def test_known_loads_are_those_that_are_counted_anew(data: st.DataObject, steps: list[tuple[str, float]]) -> None:
    views: dict[str, ReplicaView] = {}
    known, now_s = KnownLoads(views), 0.0
    for number, (name, passed_s) in enumerate(steps):
        now_s += passed_s
        if data.draw(st.booleans()):
            change(views, name, data, now_s, number)
            known.note(name)
        if data.draw(st.booleans()):
            known.refresh(now_s)
            ready = {name: view for name, view in views.items() if view.state(now_s) == "ready"}
            free = {name: view.load(now_s) for name, view in ready.items() if view.num_requests(now_s) < view.bound}
            assert known.free == free
            assert known.busy == {name: view.load(now_s) for name, view in ready.items() if name not in free}
