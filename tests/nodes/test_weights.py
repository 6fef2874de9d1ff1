"""A model of the hub on two nodes with two replicas each: one download per node, and one from the hub in all.

node 1: Ray's head and the ingress    nodes 2 and 3: two replicas each    outside: the hub
"""

import asyncio
import hashlib
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

pytest.importorskip("ray", reason="it places the replicas")

from oscine.checkpoint.hub import NANO_FOLDER
from tests.cli.local_hub import local_hub
from tests.nodes.bed import CLIENT, Bed, Node
from tests.nodes.cluster import (
    Stream,
    deploy,
    in_parallel,
    ready_nodes,
    run_streams,
    start_ray,
    wait_cluster,
    wait_healthy,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

NAME, WEIGHTS, HALF = "owner/name", "model.safetensors", 5 << 20
START_S = 180.0  # deadline for Serve and four replicas
FILES = {path.name: path.read_bytes() for path in NANO_FOLDER.iterdir() if path.is_file()}
SHA256 = hashlib.sha256(FILES[WEIGHTS]).hexdigest()
BLOBS = "/tmp/hf/hub/models--owner--name/blobs"
FILE = f"""
ray: auto
ingress: {{host: 0.0.0.0, port: 8000, resource: front, allowed-hosts: ["*"]}}
router: {{resource: front}}
models:
  - name: fake
    model: {NAME}
    engine: {{executor: fake, fake-step-s: 0.05}}
    aggregated: {{cpus: 1, replicas: 4, max-replicas-per-node: 2, labels: work=yes}}
"""


def size(node: Node, name: str) -> int:
    """Of a blob, in bytes; 0 for one that is not there."""
    file = node.files(f"{BLOBS}/{name}")
    return file.stat().st_size if file.exists() else 0


def kill_downloading(node: Node) -> None:
    """kill -9 of the process that has locked the unfinished file."""
    inode = node.run("stat", "-c", "%i", f"{BLOBS}/{SHA256}.incomplete").strip()
    locks = [line.split() for line in node.run("cat", "/proc/locks").splitlines()]
    [process] = [words[4] for words in locks if words[1] == "FLOCK" and words[5].rpartition(":")[2] == inode]
    node.run("kill", "-9", process)


def test_a_download_whose_process_is_killed_goes_on_elsewhere() -> None:
    with Bed(3) as bed, local_hub(CLIENT) as hub, ThreadPoolExecutor() as threads:
        hub.repositories[NAME], hub.stalls_after, hub.trickle_s = FILES, HALF, 1.0
        environment = {"HF_ENDPOINT": hub.url, "HF_HOME": "/tmp/hf", "HF_HUB_DISABLE_XET": "1"}
        head, *workers = bed.nodes
        start_ray(head, ["front"], head=True, **environment)
        in_parallel(*(partial(start_ray, worker, labels="work=yes", **environment) for worker in workers))
        updating = threads.submit(deploy, head, FILE, **environment)
        try:
            wait_cluster(
                lambda: updating.done() or all(size(node, f"{SHA256}.incomplete") >= HALF for node in workers),
                "half of the file on each node",
                START_S,
            )
            assert not updating.done(), updating.result()
            [first] = set(hub.clients[WEIGHTS])
            [downloading] = [node for node in workers if node.address == first]
            kill_downloading(downloading)
        finally:
            hub.end_stalls()
        with pytest.raises(AssertionError, match="Failed to update the deployments"):  # as a replica was killed
            updating.result()
        wait_cluster(lambda: all(size(node, SHA256) for node in workers), "the whole file on each node", START_S)
        wait_healthy()
        wait_cluster(lambda: len(ready_nodes()) == 2, "replicas on both nodes", START_S)
        asyncio.run(run_streams([Stream(0, 10)]))
        assert hub.resumed_at(WEIGHTS) >= HALF, "the rest leaves the hub once"
        for node in workers:
            assert node.run("sha256sum", f"{BLOBS}/{SHA256}").split()[0] == SHA256
