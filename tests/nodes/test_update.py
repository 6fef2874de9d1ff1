"""Updates of the release under load: to one with other messages, and to one with the same.

node 1: Ray's head and the ingress    nodes 2 and 3: a replica each

Each release is installed on each node, in a folder of its own. The environment variable OSCINE_RELEASE_BEFORE may name
a tar file with the first one, as `git archive COMMIT oscine` makes it.
"""

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray", reason="it places the replicas")

from tests.nodes.bed import Bed, Node
from tests.nodes.cluster import HEAD, PORT, Stream, deploy, ready_nodes, run_streams, start_ray, wait_healthy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

USERS, TOKENS = 24, 40
ENGINES = "oscine.engine.process.server"
FILE = """
ray: auto
ingress: {host: 0.0.0.0, port: 8000, resource: front, allowed-hosts: ["*"], drain-s: 20}
models:
  - name: fake
    engine: {executor: fake, fake-step-s: 0.1, max-num-seqs: 64}
    aggregated: {cpus: CPUS, replicas: 2, max-replicas-per-node: 1, labels: work=yes, surge: false}
"""
NOTE = "the release that runs has other messages: this one starts beside it"


def file(cpus: float = 1.0) -> str:
    return FILE.replace("CPUS", str(cpus))


def python(release: str) -> str:
    return f"/tmp/{release}/bin/python"


def install(node: Node, release: str, version: str, *options: str) -> None:
    node.python("-m", "tests.nodes.release", f"/tmp/{release}", version, *options)


def before(node: Node) -> None:
    archive = os.environ.get("OSCINE_RELEASE_BEFORE")
    if archive is None:
        install(node, "before", "0.0.1", "--other-messages")
        return
    with Path(archive).open("rb") as tar:
        node.run("cp", "/dev/stdin", "/tmp/before.tar", stdin=tar)
    install(node, "before", "0.0.1", "--archive", "/tmp/before.tar")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Bed]:
    with Bed(3) as bed:
        for node in bed.nodes:
            before(node)
            install(node, "now", "0.0.2")
            install(node, "later", "0.0.3")
        head, *workers = bed.nodes
        start_ray(head, ["front"], head=True, python=python("before"))
        for worker in workers:
            start_ray(worker, labels="work=yes", python=python("before"))
        deploy(head, file(), python=python("before"))
        wait_healthy()
        yield bed


def engines(bed: Bed) -> list[str]:
    """The Python of each engine."""
    lines = [process.cmdline() for node in bed.nodes for process in node.processes()]
    return [line[0] for line in lines if ENGINES in line]


class Load:
    """Users who ask again and again, and the whole answers that they got.

    An ingress that leaves closes idle connections. A request that is under way to it then gets no answer, and is asked
    again, as OpenAI's clients do. A refused connection is an error: some ingress must listen at any time.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.asked_again = 0
        self._over = False

    async def run(self, work: Callable[[], str]) -> str:
        """While `work` runs in a thread. Raises AssertionError if an answer is not whole."""
        async with httpx.AsyncClient(base_url=f"http://{HEAD}:{PORT}", timeout=60.0) as client:
            users = [asyncio.create_task(self._ask(client, number)) for number in range(USERS)]
            try:
                return await asyncio.to_thread(work)
            finally:
                self._over = True
                await asyncio.gather(*users)

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        while not self._over:
            one = Stream(number, TOKENS)
            try:
                await one.run(client)
            except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError):  # not one that is refused
                assert not one.begun.is_set(), "an answer that has begun comes to its end"
                self.asked_again += 1
                continue
            self.texts.append(one.text)


def update(bed: Bed, release: str) -> str:
    """What `up` of the release says while users ask. Each answer is that of a stream that nothing disturbs."""
    alone, load, head = Stream(0, TOKENS), Load(), bed.nodes[0]
    asyncio.run(run_streams([alone]))
    said = asyncio.run(load.run(lambda: deploy(head, file(), python=python(release))))
    assert len(load.texts) >= 2 * USERS
    assert set(load.texts) == {alone.text}
    assert load.asked_again <= USERS, "once per connection at most"
    assert len(ready_nodes()) == 2
    assert engines(bed) == [python(release)] * 2
    print(f"update to {release}: {len(load.texts)} answers, {load.asked_again} asked again")
    return said


def test_releases_that_cannot_talk_need_room_side_by_side(cluster: Bed) -> None:
    """A node has 4 CPUs, and the release that runs has one of them."""
    with pytest.raises(AssertionError) as raised:
        deploy(cluster.nodes[0], file(3.5), python=python("now"))
    said = str(raised.value)
    assert "other messages, so replicas of both must have room at once: fake, aggregated: a " in said
    assert "CPU free" in said
    assert "Traceback" not in said
    assert engines(cluster) == [python("before")] * 2


def test_a_release_with_other_messages_takes_over_under_load(cluster: Bed) -> None:
    assert NOTE in update(cluster, "now")


def test_replicas_of_a_release_with_the_same_messages_are_replaced_under_load(cluster: Bed) -> None:
    assert NOTE not in update(cluster, "later")
