"""A real cluster over three nodes: Ray on each, replicas on different nodes, and the loss of one under streams."""

import asyncio
import json
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="it places the replicas")

from tests.nodes.bed import Bed, Node
from tests.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

STREAMS, TOKENS = 320, 1000  # 50 s each: all have begun before one ends
KEY = "0123456789abcdef" * 4
FILE = """
ray: auto
ingress: {host: 0.0.0.0, port: 8000, resource: front, allowed-hosts: ["*"]}
models:
  - name: fake
    engine: {executor: fake, fake-step-s: 0.05, max-num-seqs: 512}
    aggregated: {cpus: 1, replicas: REPLICAS, max-replicas-per-node: 1, resource: back}
"""
HEAD = "10.77.0.1"
ENVIRONMENT = {"RAY_ADDRESS": f"{HEAD}:6379", "OSCINE_CLUSTER_KEY": KEY, "RAY_USAGE_STATS_ENABLED": "0"}


def start_ray(node: Node, *options: str) -> None:
    """Its processes stay when the command ends."""
    ray = (sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={node.address}", "--num-gpus=0")
    node.run(*ray, "--object-store-memory=80000000", "--temp-dir=/tmp/ray", *options, env=ENVIRONMENT)


def oscine(node: Node, *arguments: str) -> str:
    return node.python("-m", "oscine", "cluster", *arguments, env=ENVIRONMENT, timeout_s=300.0)


def deploy(node: Node, replicas: int) -> str:
    node.run("bash", "-c", f"cat >/tmp/cluster.yaml <<'E'\n{FILE.replace('REPLICAS', str(replicas))}\nE")
    return oscine(node, "up", "/tmp/cluster.yaml")


def replicas(node: Node) -> list[dict[str, Any]]:
    return list(json.loads(oscine(node, "status", "--json", "--ray", "auto"))["snapshot"]["replicas"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Bed]:
    with Bed(3) as bed:
        head, *workers = bed.nodes
        front = '--resources={"front": 1}'
        start_ray(head, "--head", "--port=6379", "--num-cpus=2", front, "--include-dashboard=false")
        for worker in workers:
            start_ray(worker, f"--address={HEAD}:6379", "--num-cpus=2", '--resources={"back": 2}')
        yield bed


def test_what_has_no_room_on_these_nodes_is_refused_before_anything_starts(cluster: Bed) -> None:
    with pytest.raises(AssertionError) as raised:
        deploy(cluster.nodes[0], 3)
    said = str(raised.value)
    assert "fake, aggregated: a replica takes 1 CPU, 1 back (1 per machine at most), so 2 of 3 have room" in said
    assert "Traceback" not in said


def test_replicas_are_on_different_nodes(cluster: Bed) -> None:
    head, *workers = cluster.nodes
    assert "http://10.77.0.1:8000" in deploy(head, 2)
    assert sorted(one["node"] for one in replicas(head)) == [worker.address for worker in workers]


async def stream(client: httpx.AsyncClient, begun: list[int], number: int) -> tuple[int, str | None]:
    """Tokens that have come, and how it ended."""
    body = {"model": "fake", "prompt": f"{number} one", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    num_tokens, reason = 0, None
    async with client.stream("POST", "/v1/completions", json=body | {"stream_options": {"include_usage": True}}) as on:
        assert on.status_code == 200, await on.aread()
        async for line in on.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[len("data: ") :])
            assert "error" not in event, event
            begun[number] = 1
            for choice in event["choices"]:
                reason = choice["finish_reason"] or reason
            if event.get("usage"):
                num_tokens = event["usage"]["completion_tokens"]
    return num_tokens, reason


async def lose(bed: Bed, victim: Node) -> list[tuple[int, str | None]]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://{HEAD}:8000", timeout=120.0, limits=limits) as client:
        begun = [0] * STREAMS
        streams = [asyncio.create_task(stream(client, begun, number)) for number in range(STREAMS)]
        while not all(begun) and not any(one.done() for one in streams):
            await asyncio.sleep(0.05)
        assert all(begun)
        await asyncio.to_thread(victim.kill)
        return await asyncio.gather(*streams)


ROUTER = """
import ray
from ray import serve
ray.init(address="auto", namespace="oscine", log_to_driver=False, logging_level="ERROR")
print(serve.get_deployment_handle("router", "oscine").address.remote().result(timeout_s=60))
"""


def without_router(bed: Bed) -> Node:
    """A node with a replica and without the router, which Ray may place on any node."""
    address = bed.nodes[0].python("-c", ROUTER, env=ENVIRONMENT).splitlines()[-1]
    return next(node for node in bed.nodes[1:] if f"//{node.address}:" not in address)


def metric(name: str) -> float:
    text = httpx.get(f"http://{HEAD}:8000/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"oscine:{name}"))


def test_no_stream_is_lost_with_a_node(cluster: Bed) -> None:
    """kill -9 of all processes of a node after its network: no connection is closed.

    Not of the router's node: that loss is a known limit (docs/cluster.md).
    """
    wait_until(lambda: httpx.get(f"http://{HEAD}:8000/health").status_code == 200, "the ingress")
    found = asyncio.run(lose(cluster, without_router(cluster)))
    assert set(found) == {(TOKENS, "length")}
    migrations = metric("migrations_total")
    assert 0 < migrations <= STREAMS, "no more moves than streams"
    assert metric("migration_failures_total") == 0
    print(f"{migrations:g} of {STREAMS} streams moved; longest pause {metric('migration_longest_pause_seconds'):.1f} s")
