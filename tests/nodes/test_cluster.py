"""A real cluster over five nodes under 320 streams: placement, a partition, the loss of nodes, a node that joins.

    node 1: Ray's head, and nothing of the cluster      node 3, rack a: a replica and the router
    node 2: the ingress                                 node 4, rack b: a replica
                                                        node 5, rack a: joins
The tests build on each other, in their order.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from threading import Thread

import httpx
import pytest

pytest.importorskip("ray", reason="it places the replicas")

from tests.nodes.bed import Bed, Node
from tests.nodes.cluster import (
    Stream,
    deploy,
    in_parallel,
    metrics,
    ready_nodes,
    replicas,
    run_streams,
    running_by_node,
    start_ray,
    wait_cluster,
    wait_healthy,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

STREAMS, TOKENS = 320, 150  # 30 s each: all have begun before one ends
PARTITION_S = 20.0
FRONT = "10.77.0.2"
FILE = """
ray: auto
ingress: {host: 0.0.0.0, port: 8000, resource: front, allowed-hosts: ["*"]}
router: {resource: inner}
models:
  - name: fake
    engine: {executor: fake, fake-step-s: 0.2, max-num-seqs: 512}
    aggregated: {cpus: 1, replicas: REPLICAS, max-replicas-per-node: 1, labels: [rack=a, rack=b]}
"""


def file(count: int) -> str:
    return FILE.replace("REPLICAS", str(count))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Bed]:
    with Bed(4) as bed:
        head, front, inner, back = bed.nodes
        start_ray(head, head=True)
        in_parallel(
            partial(start_ray, front, ["front"]),
            partial(start_ray, inner, ["inner"], labels="rack=a"),
            partial(start_ray, back, labels="rack=b"),
        )
        yield bed


def streams(count: int = STREAMS, tokens: int = TOKENS) -> list[Stream]:
    return [Stream(number, tokens) for number in range(count)]


@cache
def undisturbed() -> str:
    alone = Stream(0, TOKENS)
    asyncio.run(run_streams([alone], address=FRONT))
    return alone.text


def check_whole(found: list[Stream]) -> None:
    """Each text is that of an undisturbed stream, to the letter: nothing is missing, and nothing there twice."""
    assert {one.text for one in found} == {undisturbed()}


def moved(before: dict[str, float]) -> tuple[int, float]:
    """Streams that went on elsewhere since then, and the longest pause of any so far in seconds."""
    now = metrics(FRONT)
    assert now["migration_failures_total"] == before["migration_failures_total"]
    return int(now["migrations_total"] - before["migrations_total"]), now["migration_longest_pause_seconds"]


def wait_idle() -> None:
    """No engine goes on with a stream that another one has, or that has ended."""
    wait_cluster(lambda: metrics(FRONT)["replica_requests_running"] == 0, "idle engines")


def test_what_has_no_room_on_these_nodes_is_refused_before_anything_starts(cluster: Bed) -> None:
    with pytest.raises(AssertionError) as raised:
        deploy(cluster.nodes[0], file(3))
    said = str(raised.value)
    wanted = "fake, aggregated: a replica takes 1 CPU on a machine with rack=a (1 per machine at most), so 1 of 2 have"
    assert f"{wanted} room on empty machines (10.77.0.3: 1)" in said
    assert "Traceback" not in said


def test_replicas_are_on_nodes_of_both_racks(cluster: Bed) -> None:
    head, _, *workers = cluster.nodes
    assert f"http://{FRONT}:8000" in deploy(head, file(2))
    assert sorted(one["node"] for one in replicas(head)) == [worker.address for worker in workers]
    wait_healthy(FRONT)


def test_a_partition_heals_and_each_stream_has_one_owner(cluster: Bed) -> None:
    """The router and half of the streams are on the other side."""
    _, _, inner, back = cluster.nodes
    before, found = metrics(FRONT), streams()

    async def part(client: httpx.AsyncClient) -> None:
        await asyncio.to_thread(cluster.partition, [inner])
        healed_s = time.monotonic() + PARTITION_S
        late = Stream(STREAMS, 10)
        await late.run(client)
        assert time.monotonic() < healed_s, "a request that comes meanwhile is answered meanwhile"
        await asyncio.sleep(healed_s - time.monotonic())
        await asyncio.to_thread(cluster.heal)

    asyncio.run(run_streams(found, part, FRONT))
    count, pause_s = moved(before)
    assert 0 < count <= STREAMS
    print(f"partition: {count} of {STREAMS} streams moved; longest pause {pause_s:.1f} s")
    wait_cluster(
        lambda: ready_nodes(FRONT) == {inner.address, back.address}, "the replicas behind the partition", 120.0
    )
    wait_idle()
    check_whole(found)


class Load:
    """Users who ask for 5 tokens again and again."""

    def __init__(self, users: int) -> None:
        self._users, self._over = users, False
        self.answered = 0

    async def run(self, work: Callable[[], object]) -> None:
        """While `work` runs in a thread. Raises AssertionError if an answer is not whole."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=f"http://{FRONT}:8000", timeout=120.0, limits=limits) as client:
            users = [asyncio.create_task(self._ask(client, number)) for number in range(self._users)]
            try:
                await asyncio.to_thread(work)
            finally:
                self._over = True
            await asyncio.gather(*users)

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        while not self._over:
            await Stream(number, 5).run(client)
            self.answered += 1


def test_a_node_that_joins_under_load_gets_its_share(cluster: Bed) -> None:
    load = Load(users=60)

    def join() -> None:
        head, _, inner, back = cluster.nodes
        begun_s = time.monotonic()
        joining = cluster.add()
        start_ray(joining, labels="rack=a")
        joined_s = time.monotonic()
        deploying = Thread(target=deploy, args=(head, file(3)))
        deploying.start()
        wait_cluster(lambda: joining.address in ready_nodes(FRONT), "the replica of the new node", 240.0)
        ready_s = time.monotonic()
        wait_cluster(lambda: min(running_by_node(FRONT).values()) >= 0.75 * 60 / 3, "its share", 120.0)
        shared_s = time.monotonic()
        deploying.join()
        assert ready_nodes(FRONT) == {inner.address, back.address, joining.address}
        took = f"in Ray after {joined_s - begun_s:.1f} s, ready after {ready_s - joined_s:.1f} s more"
        print(f"a node joins: {took}, has its share after {shared_s - ready_s:.1f} s more; {load.answered} answers")

    asyncio.run(load.run(join))


def lose(victim: Node, seconds: float = 0.0) -> list[Stream]:
    """320 streams, and the loss of a node while they run; new requests are answered at once and `seconds` later."""
    found = streams()

    async def kill(client: httpx.AsyncClient) -> None:
        await asyncio.to_thread(victim.kill)
        await Stream(STREAMS, 5).run(client)
        await asyncio.sleep(seconds)
        await Stream(STREAMS + 1, 5).run(client)

    asyncio.run(run_streams(found, kill, FRONT))
    return found


def test_no_stream_is_lost_with_the_node_of_the_router(cluster: Bed) -> None:
    """kill -9 of all processes of a node after its network: no connection is closed. No other node may have the router:
    it stays away.
    """
    before = metrics(FRONT)
    found = lose(cluster.nodes[2])
    count, pause_s = moved(before)
    print(f"node of the router: {count} of {STREAMS} streams moved; longest pause {pause_s:.1f} s so far")
    assert 0 < count <= STREAMS, "no more moves than streams"
    now = metrics(FRONT)
    assert now["router_up"] == 0
    assert now["requests_placed_without_router_total"] > before["requests_placed_without_router_total"]
    check_whole(found)


def test_serving_goes_on_without_the_head_node(cluster: Bed) -> None:
    """No process of Ray is told anything any more, and none is started. 30 s later requests are answered as before."""
    before = metrics(FRONT)
    found = lose(cluster.nodes[0], seconds=25.0)
    count, _ = moved(before)
    assert count == 0
    check_whole(found)
