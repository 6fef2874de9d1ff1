"""Updates of the release under load: to one with other messages, and to one with the same.

node 1: Ray's head and the ingress    nodes 2 and 3: a replica each

Each release is installed on each node, in a folder of its own. The first one is an older commit of this repository,
whose messages are others; in a clone without it, it is this release with another message. The environment variable
OSCINE_RELEASE_BEFORE may name a tar file with another one, as `git archive COMMIT oscine` makes it. The ids of the
tests say which one it is.
"""

import asyncio
import os
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

pytest.importorskip("ray", reason="it places the replicas")

from tests.nodes.bed import Bed, Node
from tests.nodes.cluster import (
    HEAD,
    PORT,
    Stream,
    deploy,
    in_parallel,
    ready_nodes,
    run_streams,
    start_ray,
    wait_healthy,
)
from tests.nodes.entered import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

USERS, TOKENS = 24, 40
BEFORE = "6a91170d13db"  # the last commit with other messages than those of version 0.1.0
GIVEN = os.environ.get("OSCINE_RELEASE_BEFORE")
FROM_FILE, OTHER_MESSAGE = "from-file", "this-one-with-another-message"
ENGINES = "oscine.engine.process.server"
FILE = """
ray: auto
ingress: {host: 0.0.0.0, port: 8000, resource: front, allowed-hosts: ["*"], drain-s: 20}
models:
  - name: fake
    engine: {executor: fake, fake-step-s: 0.1, max-num-seqs: 64}
    aggregated: {cpus: CPUS, replicas: 2, max-replicas-per-node: 1, resource: work, surge: false}
"""
NOTE = "the release that runs has other messages: this one starts beside it"


def file(cpus: float = 1.0) -> str:
    return FILE.replace("CPUS", str(cpus))


def python(release: str) -> str:
    return f"/tmp/{release}/bin/python"


def install(node: Node, release: str, version: str, *options: str) -> None:
    node.python("-m", "tests.nodes.release", f"/tmp/{release}", version, *options)


def git(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", "-c", "safe.directory=*", *arguments], cwd=ROOT, capture_output=True, text=True)


def first_release() -> str:
    if GIVEN is not None:
        return FROM_FILE
    try:
        has_commit = git("cat-file", "-e", f"{BEFORE}^{{commit}}").returncode == 0
    except FileNotFoundError:  # no git
        has_commit = False
    return BEFORE if has_commit else OTHER_MESSAGE


def archive_of(release: str, folder: Path) -> Path | None:
    """A tar file with the first release; None if it is this one with another message."""
    if release == OTHER_MESSAGE:
        return None
    if release == FROM_FILE:
        assert GIVEN is not None
        return Path(GIVEN)
    made = folder / "before.tar"
    done = git("archive", "--format=tar", f"--output={made}", BEFORE, "oscine")
    assert done.returncode == 0, done.stderr
    return made


def before(node: Node, archive: Path | None) -> None:
    if archive is None:
        install(node, "before", "0.0.1", "--other-messages")
        return
    with archive.open("rb") as tar:
        node.run("cp", "/dev/stdin", "/tmp/before.tar", stdin=tar)
    install(node, "before", "0.0.1", "--archive", "/tmp/before.tar")


def install_all(node: Node, archive: Path | None) -> None:
    before(node, archive)
    install(node, "now", "0.0.2")
    install(node, "later", "0.0.3")


@pytest.fixture(scope="module", params=[first_release()])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    archive = archive_of(request.param, tmp_path_factory.mktemp("release"))
    with Bed(3) as bed:
        in_parallel(*(partial(install_all, node, archive) for node in bed.nodes))
        head, *workers = bed.nodes
        start_ray(head, ["front"], head=True, python=python("before"))
        in_parallel(*(partial(start_ray, worker, ["work"], python=python("before")) for worker in workers))
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
    assert "3.5 CPU" in said
    assert "is free (10.77.0." in said
    assert "Traceback" not in said
    assert engines(cluster) == [python("before")] * 2


def test_a_release_with_other_messages_takes_over_under_load(cluster: Bed) -> None:
    assert NOTE in update(cluster, "now")


def test_replicas_of_a_release_with_the_same_messages_are_replaced_under_load(cluster: Bed) -> None:
    assert NOTE not in update(cluster, "later")
