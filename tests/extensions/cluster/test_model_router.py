"""Placement of requests: a model's router over simulated replicas, with a clock that the test moves."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest

from oscine.extensions.kv_events.publisher import page_hash
from oscine.extensions.replicas.routing.fleet import Fleet
from oscine.extensions.replicas.routing.model_router import ModelRouter
from oscine.extensions.replicas.spec.deployment import ModelSpec, PrefillLimits, QueueLimits, RoleSpec
from oscine.extensions.replicas.spec.placement import NoPlace, Place, Placement
from oscine.extensions.replicas.spec.snapshot import ReplicaReport
from oscine.types import Endpoints, EngineInfo, EngineStats

ROLES = (RoleSpec("decode"), RoleSpec("prefill"))
ROUTE = ModelSpec(("m",), ROLES, prefill=PrefillLimits(min_tokens=256), start_timeout_s=60)
DIGESTS = [bytes([i]) * 16 for i in range(40)]
HASHES = [page_hash(digest) for digest in DIGESTS]
PAGE = 64


@dataclass
class Cluster:
    """Two fleets of replicas that exist in their reports alone."""

    now_s: float = 1000.0
    lives: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.decode, self.prefill = Fleet(clock=self.clock), Fleet(clock=self.clock)

    def clock(self) -> float:
        return self.now_s

    def router(self, route: ModelSpec = ROUTE) -> ModelRouter:
        return ModelRouter(route, self.decode, self.prefill if route.role("prefill") else None, self.clock)

    def report(self, name: str, **changes: object) -> ReplicaReport:
        info = EngineInfo("m", 4096, 300, page_size=PAGE, max_num_seqs=4)
        endpoints = Endpoints(f"tcp://{name}:{self.lives.get(name, 0)}")
        return replace(ReplicaReport("m", endpoints=endpoints, info=info), **changes)  # type: ignore[arg-type]

    def start(self, *names: str) -> None:
        for name in names:
            self.decode.join(name, self.report(name))


def placement(name: str, num_pages: int = 2, num_tokens: int | None = None, **more: object) -> Placement:
    tokens = num_tokens if num_tokens is not None else num_pages * PAGE
    return Placement(name, "m", DIGESTS[:num_pages], tokens, 100, **more)  # type: ignore[arg-type]


def run(test: Callable[[Cluster], Awaitable[None]]) -> None:
    async def patient() -> None:
        async with asyncio.timeout(20):
            await test(Cluster())

    asyncio.run(patient())


async def settle() -> None:
    """Everybody goes on as far as there is no need to wait."""
    for _ in range(200):
        await asyncio.sleep(0)


def test_a_request_goes_where_its_prefix_is() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.start("a", "b", "c")
        cluster.decode.index.store("b", HASHES[:8])
        place = await cluster.router().place(placement("r", 10))
        assert place == Place("b", "tcp://b:0", None, 8 * PAGE, 0.0)

    run(test)


def test_requests_just_placed_count_and_their_pages_are_expected() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.start("a", "b")
        router = cluster.router(replace(ROUTE, roles=(RoleSpec(),)))
        first = await router.place(placement("1", 10))
        same = await router.place(placement("2", 12))
        assert same.replica == first.replica, "its prefix is being computed there"
        assert same.num_overlap_tokens == 10 * PAGE
        other = await router.place(Placement("3", "m", [b"x" * 16], 2000, 100))
        assert other.replica != first.replica, "there is work to do before it"

    run(test)


def test_a_report_replaces_what_was_expected() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.start("a")
        router = cluster.router()
        cluster.decode.hear("a", EngineStats(requests=7))
        await router.place(placement("1"))
        await router.place(placement("2"))
        assert cluster.decode.room() == 8 - 2
        cluster.decode.hear("a", EngineStats(requests=8, num_running=1))
        assert cluster.decode.room() == 8 - 2, "one is in the report, one is still expected"
        cluster.decode.hear("a", EngineStats(requests=9, num_running=1))
        assert cluster.decode.room() == 8 - 1
        await router.place(placement("3"))
        cluster.now_s += 3
        assert cluster.decode.room() == 8 - 1, "it never came"

    run(test)


def test_saturated_replicas_leave_requests_waiting_in_order() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.start("a")
        router = cluster.router()
        cluster.decode.hear("a", EngineStats(requests=8, num_running=4, num_waiting=4))
        placed: list[str] = []

        async def place(name: str, priority: int) -> None:
            await router.place(placement(name, priority=priority))
            placed.append(name)

        tasks = [asyncio.create_task(place(name, p)) for name, p in [("late", 1), ("soon", 0), ("gone", 0)]]
        await settle()
        assert router.num_queued == 3
        tasks[2].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert router.num_queued == 2, "who leaves, leaves at once"
        cluster.decode.hear("a", EngineStats(requests=8, num_running=4, num_waiting=3))
        await settle()
        assert placed == ["soon"]
        cluster.decode.hear("a", EngineStats(requests=9, num_running=4, num_waiting=3))
        await asyncio.gather(*tasks, return_exceptions=True)
        assert placed == ["soon", "late"]
        assert router.num_queued == 0

    run(test)


def test_who_has_lost_a_replica_is_placed_before_newcomers_of_its_priority() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.start("a")
        router = cluster.router(replace(ROUTE, queue=QueueLimits(max_requests=3)))
        cluster.decode.hear("a", EngineStats(requests=8, num_running=4, num_waiting=4))
        new = [asyncio.create_task(router.place(placement(f"new {i}", priority=i))) for i in (1, 0, 1)]
        await settle()
        moved = asyncio.create_task(router.place(placement("moved", priority=1, moved=True)))
        await settle()
        with pytest.raises(NoPlace, match="others were to be served before"):
            await new[2]
        for number, task in enumerate([new[1], moved, new[0]]):
            assert not task.done()
            cluster.decode.hear("a", EngineStats(requests=8 + number, num_running=4, num_waiting=3))
            await task

    run(test)


def test_no_more_turns_are_given_than_there_is_room() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.start("a", "b")
        router = cluster.router()
        tasks = [asyncio.create_task(router.place(placement(str(i)))) for i in range(30)]
        await settle()
        assert sorted(task.result().replica for task in tasks if task.done()) == ["a"] * 8 + ["b"] * 8
        assert router.num_queued == 14
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert router.num_queued == 0

    run(test)


def test_an_overloaded_model_says_so() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.start("a")
        router = cluster.router(replace(ROUTE, queue=QueueLimits(max_requests=1, max_wait_s=0.05)))
        cluster.decode.hear("a", EngineStats(num_running=8))
        waits = asyncio.create_task(router.place(placement("1", tenant="x")))
        await asyncio.sleep(0)
        with pytest.raises(NoPlace) as full:
            await router.place(placement("2", tenant="x"))
        with pytest.raises(NoPlace) as late:
            await waits
        assert full.value.overloaded
        assert late.value.overloaded
        assert late.value.retry_after_s >= 1
        assert router.counters.refused == 2
        assert router.num_queued == 0

    run(test)


@pytest.mark.parametrize("leaves", ["before", "after"])
def test_a_request_may_leave_at_the_very_moment_that_it_has_to_make_room(leaves: str) -> None:
    async def test(cluster: Cluster) -> None:
        cluster.start("a")
        router = cluster.router(replace(ROUTE, queue=QueueLimits(max_requests=1)))
        cluster.decode.hear("a", EngineStats(num_running=8))
        late = asyncio.create_task(router.place(placement("late", priority=1)))
        await settle()
        urgent = asyncio.create_task(router.place(placement("urgent")))
        if leaves == "before":
            late.cancel()
        else:
            asyncio.get_running_loop().call_soon(late.cancel)
        await asyncio.gather(late, return_exceptions=True)
        assert not urgent.done()
        cluster.decode.hear("a", EngineStats(num_running=7))
        assert (await urgent).replica == "a"
        router.reconfigure(ROUTE)
        cluster.now_s += 3
        others = [asyncio.create_task(router.place(placement(str(i)))) for i in range(3)]
        await settle()
        assert router.num_queued == 2, "there is room for one"
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    run(test)


def test_a_request_waits_for_the_first_replica_but_not_for_ever() -> None:
    async def test(cluster: Cluster) -> None:
        router = cluster.router(replace(ROUTE, start_timeout_s=0.05))
        with pytest.raises(NoPlace, match="no replica of m is ready") as refusal:
            await router.place(placement("1"))
        assert not refusal.value.overloaded
        router.reconfigure(ROUTE)
        tasks = [asyncio.create_task(router.place(placement(str(i)))) for i in range(3)]
        await settle()
        assert router.num_queued == 3
        cluster.start("a")
        assert {place.replica for place in await asyncio.gather(*tasks)} == {"a"}

    run(test)


def test_excluded_and_draining_replicas_get_nothing() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.decode.join("draining", cluster.report("draining", state="draining"))
        cluster.start("failed", "ok")
        for name in ("draining", "failed"):
            cluster.decode.index.store(name, HASHES)
        place = await cluster.router().place(placement("1", 4, exclude=["failed"]))
        assert place.replica == "ok"

    run(test)


def test_a_request_that_leaves_at_the_moment_of_its_turn_frees_its_place() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.start("a")
        router = cluster.router()
        cluster.decode.hear("a", EngineStats(requests=8, num_running=4, num_waiting=4))
        waiting = [asyncio.create_task(router.place(placement(name))) for name in ("leaves", "stays")]
        await settle()
        cluster.decode.hear("a", EngineStats(requests=8, num_running=4, num_waiting=3))
        await asyncio.sleep(0)
        waiting[0].cancel()
        assert (await waiting[1]).replica == "a"
        assert waiting[0].cancelled()
        assert cluster.decode.room() == 0

    run(test)


def test_roles_without_replicas_are_missed_while_requests_want_them() -> None:
    async def test(cluster: Cluster) -> None:
        router = cluster.router(replace(ROUTE, roles=(RoleSpec(),)))
        assert router.missing() == []
        describing = asyncio.create_task(router.describe())
        await settle()
        assert router.missing() == ["aggregated"]
        describing.cancel()
        await asyncio.gather(describing, return_exceptions=True)
        assert router.missing() == []
        placing = asyncio.create_task(router.place(placement("1", 10)))
        await settle()
        cluster.decode.join("goes", cluster.report("goes", state="draining"))
        assert router.missing() == ["aggregated"], "the one that there is takes no more"
        cluster.start("a")
        assert (await placing).replica == "a"
        assert router.missing() == []

    run(test)


def test_an_excluded_replica_may_serve_again_once_its_engine_is_another_one() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.start("a")
        router = cluster.router(ROUTE)
        task = asyncio.create_task(router.place(placement("1", exclude=["a"])))
        await settle()
        assert not task.done()
        cluster.lives["a"] = 1
        cluster.start("a")
        assert (await task).address == "tcp://a:1"

    run(test)


def test_the_only_replica_serves_a_request_again_that_it_has_failed_a_while_ago() -> None:
    """Its engine goes on: the connection broke, or its queue was full."""

    async def test(cluster: Cluster) -> None:
        cluster.start("a")
        router = cluster.router(ROUTE)
        task = asyncio.create_task(router.place(placement("1", exclude=["a"])))
        await settle()
        cluster.decode.hear("a", EngineStats())
        await settle()
        assert not task.done()
        cluster.now_s += 3
        cluster.decode.hear("a", EngineStats())
        assert (await task).address == "tcp://a:0"

    run(test)


def test_long_prompts_that_are_not_cached_get_a_prefill_replica() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.start("a")
        router = cluster.router()
        assert (await router.place(placement("0", 10))).prefill is None, "there is none"
        for name in ("p", "q"):
            cluster.prefill.join(name, cluster.report(name, role="prefill"))
        cluster.prefill.index.store("q", HASHES[:20])
        place = await router.place(placement("1", 20))
        assert place.prefill is not None
        assert (place.prefill.replica, place.prefill.address) == ("q", "tcp://q:0")
        assert place.prefill.min_tokens == 256
        assert (await router.place(placement("2", 3))).prefill is None, "it is short"
        cluster.decode.index.store("a", HASHES[:38])
        assert (await router.place(placement("3", 40))).prefill is None, "most of it is cached"
        counters = router.counters
        assert (counters.placed, counters.remote_prefills) == (4, 1)
        assert counters.known_tokens == 73 * PAGE

    run(test)


def test_a_prompt_is_prefilled_on_the_machine_that_decodes_it_unless_that_costs_more() -> None:
    async def test(cluster: Cluster) -> None:
        router = cluster.router()
        cluster.decode.join("d", cluster.report("d", endpoints=Endpoints("tcp://[fd00::2]:1")))
        for name, machine in (("far", "fd00::1"), ("near", "fd00::2"), ("other", "fd00::3")):
            report = cluster.report(name, role="prefill", endpoints=Endpoints(f"tcp://[{machine}]:2"))
            cluster.prefill.join(name, report)

        async def prefilled_on(number: int, **stats: int) -> str:
            cluster.prefill.hear("near", EngineStats(**stats))  # type: ignore[arg-type]
            digests = [bytes([number, i]) * 8 for i in range(16)]
            place = await router.place(Placement(str(number), "m", digests, 16 * PAGE, 100))
            cluster.decode.withdraw(str(number))
            cluster.prefill.withdraw(str(number))
            assert place.prefill is not None
            return place.prefill.replica

        assert {await prefilled_on(number) for number in range(8)} == {"near"}
        assert await prefilled_on(8, queued_tokens=100) == "near"
        assert await prefilled_on(9, queued_tokens=4000) in ("far", "other")
        cluster.decode.index.store("d", HASHES[:30])  # only what the decode replica lacks is moved
        cluster.prefill.hear("near", EngineStats(queued_tokens=400))
        place = await router.place(placement("10", 40))
        assert place.prefill is not None
        assert place.prefill.replica in ("far", "other")

    run(test)


def test_a_replica_that_goes_takes_its_pages_along() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.start("a", "b")
        cluster.decode.index.store("a", HASHES)
        cluster.decode.remove("a")
        place = await cluster.router(replace(ROUTE, roles=(RoleSpec(),))).place(placement("1", 4))
        assert (place.replica, place.num_overlap_tokens) == ("b", 0)

    run(test)


def test_rates_are_of_the_last_seconds() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.start("a")
        for second in range(20):
            cluster.now_s += 1
            generated = 100 * min(second, 12)
            stats = EngineStats(generated_tokens=generated, inter_tokens=generated, inter_token_s=generated * 0.01)
            cluster.decode.hear("a", stats)
            (snapshot,) = cluster.decode.snapshot()
            if 6 <= second <= 12:
                assert snapshot.tokens_s == pytest.approx(100)
                assert snapshot.itl_s == pytest.approx(0.01)
        assert snapshot.tokens_s == 0
        assert snapshot.itl_s is None
        assert snapshot.ttft_s is None

    run(test)


def test_what_waiting_requests_will_find_cached_is_no_work() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.start("a")
        router = cluster.router()
        cluster.decode.hear("a", EngineStats())
        cluster.decode.index.store("a", HASHES[:20])
        await router.place(placement("1", 24))
        cluster.decode.hear("a", EngineStats(requests=1, num_waiting=1, queued_tokens=24 * PAGE))
        (view,) = cluster.decode.candidates()
        assert view.load(cluster.now_s).queued_tokens == 4 * PAGE
        cluster.decode.hear("a", EngineStats(requests=1, num_running=1, queued_tokens=PAGE))
        assert view.load(cluster.now_s).queued_tokens == PAGE

    run(test)


def test_a_prefill_replica_is_asked_for_where_there_is_none_and_a_prompt_is_long() -> None:
    async def test(cluster: Cluster) -> None:
        cluster.start("a")
        router = cluster.router()
        assert (await router.place(placement("short", num_pages=2))).prefill is None
        assert router.missing() == []
        assert (await router.place(placement("long", num_pages=8))).prefill is None
        assert router.missing() == ["prefill"]
        assert router.missing() == [], "once"
        cluster.prefill.join("p", cluster.report("p"))
        assert (await router.place(placement("other", num_pages=1, num_tokens=600))).prefill is not None
        assert router.missing() == []

    run(test)
