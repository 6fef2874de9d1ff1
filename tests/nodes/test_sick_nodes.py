"""Nodes with a fault: a clock that is an hour off, and a disk that is full. Streams do not notice.

node 1: Ray's head and the ingress    node 2: a replica, its clock an hour ahead    node 3: a replica
"""

import asyncio
import shutil
from collections.abc import Iterator
from functools import partial

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
    run_streams,
    running_by_node,
    start_ray,
    wait_cluster,
    wait_healthy,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(500),
    pytest.mark.skipif(shutil.which("cc") is None, reason="the clock is set by a library that cc compiles"),
]

STREAMS, TOKENS, HOUR_S = 64, 60, 3600
FILE = """
ray: auto
ingress: {host: 0.0.0.0, port: 8000, resource: front, allowed-hosts: ["*"]}
router: {resource: front}
models:
  - name: fake
    engine: {executor: fake, fake-step-s: 0.2, max-num-seqs: 512}
    aggregated: {cpus: 1, replicas: 2, max-replicas-per-node: 1, labels: work=yes}
"""
# Between a process and libc. Clocks that count from the start of the machine stay as they are.
CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>
#define OFF %d
int clock_gettime(clockid_t id, struct timespec *now) {
    static int (*next)(clockid_t, struct timespec *);
    if (!next) next = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = next(id, now);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += OFF;
    return failed;
}
time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
int gettimeofday(struct timeval *restrict to, void *restrict zone) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    to->tv_sec = now.tv_sec;
    to->tv_usec = now.tv_nsec / 1000;
    return 0;
}
"""
LIBRARY = "/tmp/clock.so"


def set_clock(node: Node, seconds: int) -> None:
    """Of processes that are started with LD_PRELOAD=LIBRARY."""
    node.run("bash", "-c", f"cat >/tmp/clock.c <<'E'\n{CLOCK % seconds}\nE\ncc -shared -fPIC -o {LIBRARY} /tmp/clock.c")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Bed]:
    with Bed(3) as bed:
        head, ahead, plain = bed.nodes
        start_ray(head, ["front"], head=True)
        set_clock(ahead, HOUR_S)
        in_parallel(
            partial(start_ray, ahead, labels="work=yes", LD_PRELOAD=LIBRARY),
            partial(start_ray, plain, labels="work=yes"),
        )
        deploy(head, FILE)
        wait_healthy()
        yield bed


def unix_time(node: Node, **more: str) -> float:
    return float(node.python("-c", "import time; print(time.time())", env=more))


def check_shares(nodes: list[Node]) -> None:
    """Streams to their ends, of which each of the nodes has its share."""
    busy: dict[str, float] = {}

    async def look(client: httpx.AsyncClient) -> None:
        def shares() -> bool:
            busy.update(running_by_node())
            return sum(busy.values()) == STREAMS

        await asyncio.to_thread(wait_cluster, shares, "the engines' reports")

    found = [Stream(number, TOKENS) for number in range(STREAMS)]
    asyncio.run(run_streams(found, look))
    assert busy.keys() == {node.address for node in nodes}
    assert min(busy.values()) >= 0.75 * STREAMS / len(nodes)
    assert len({one.text for one in found}) == 1


def test_a_node_whose_clock_is_an_hour_ahead_serves_its_share(cluster: Bed) -> None:
    _, ahead, plain = cluster.nodes
    assert unix_time(ahead, LD_PRELOAD=LIBRARY) - unix_time(ahead) > HOUR_S - 60
    assert ready_nodes() == {ahead.address, plain.address}
    check_shares([ahead, plain])
    assert metrics()["migrations_total"] == 0


FILL = """
import os
size = os.statvfs("/tmp")
with open("/tmp/full", "wb", buffering=0) as file:
    try:
        while True: file.write(bytes(1 << 20))
    except OSError: pass
print(os.statvfs("/tmp").f_bavail)
"""


def test_a_full_disk_on_a_node_costs_no_stream(cluster: Bed) -> None:
    """The disk of Ray's logs and sockets, and of temporary files. The node goes on and takes new streams."""
    _, ahead, plain = cluster.nodes
    found = [Stream(number, TOKENS) for number in range(STREAMS)]

    async def fill(client: httpx.AsyncClient) -> None:
        def fill_disk() -> str:
            plain.run("mount", "-o", "remount,size=256m", "/tmp")
            return plain.python("-c", FILL)

        assert (await asyncio.to_thread(fill_disk)).strip() == "0"
        await Stream(STREAMS, 5).run(client)

    asyncio.run(run_streams(found, fill))
    assert len({one.text for one in found}) == 1
    check_shares([ahead, plain])
    assert metrics()["migrations_total"] == 0
    assert ready_nodes() == {ahead.address, plain.address}
