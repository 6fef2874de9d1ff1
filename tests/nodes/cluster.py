"""Ray and `oscine cluster` on the nodes of a test bed, and streams of clients outside."""

import asyncio
import json
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.nodes.bed import Node
from tests.waiting import DEADLINE_S, wait_until

KEY = "0123456789abcdef" * 4
HEAD = "10.77.0.1"
PORT = 8000
ENVIRONMENT = {
    "RAY_ADDRESS": f"{HEAD}:6379",
    "OSCINE_CLUSTER_KEY": KEY,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # else each `up` starts a process per CPU of a node, which it does not use
}


def in_parallel(*calls: Callable[[], object]) -> None:
    """For commands that wait more than they compute."""
    with ThreadPoolExecutor() as threads:
        for one in [threads.submit(call) for call in calls]:
            one.result()


def wait_cluster(condition: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """As wait_until, but asks less often, since an ingress that always answers takes CPU time from what is awaited."""
    wait_until(condition, what, deadline_s, every_s=0.1)


def start_ray(
    node: Node,
    resources: Iterable[str] = (),
    *,
    head: bool = False,
    labels: str = "",
    python: str = sys.executable,
    **more: str,
) -> None:
    """Its processes stay when the command ends. `resources`: custom ones, two of each; `more`: its environment."""
    ray = (python, "-m", "ray.scripts.scripts", "start", f"--node-ip-address={node.address}", "--num-gpus=0")
    joins = ("--head", "--port=6379", "--include-dashboard=false") if head else (f"--address={HEAD}:6379",)
    custom = json.dumps(dict.fromkeys(resources, 2))
    options = (
        "--num-cpus=4",
        "--object-store-memory=80000000",
        "--temp-dir=/tmp/ray",
        f"--resources={custom}",
        f"--labels={labels}",
    )
    node.run(*ray, *joins, *options, env=ENVIRONMENT | more)


def oscine(node: Node, *arguments: str, python: str = sys.executable, **more: str) -> str:
    """`python`: of the release. Without -P Python would find the package of the current folder first."""
    safe = ("-P",) if python != sys.executable else ()
    return node.run(python, *safe, "-m", "oscine", "cluster", *arguments, env=ENVIRONMENT | more, timeout_s=300.0)


def deploy(node: Node, text: str, python: str = sys.executable, **more: str) -> str:
    """`more`: the environment of `up`."""
    node.run("bash", "-c", f"cat >/tmp/cluster.yaml <<'E'\n{text}\nE")
    return oscine(node, "up", "/tmp/cluster.yaml", python=python, **more)


def replicas(node: Node) -> list[dict[str, Any]]:
    return list(json.loads(oscine(node, "status", "--json", "--ray", "auto"))["snapshot"]["replicas"])


def samples(address: str = HEAD) -> list[tuple[str, dict[str, str], float]]:
    """Name without `oscine:`, labels and value of each metric of an ingress."""
    text = httpx.get(f"http://{address}:{PORT}/metrics", timeout=30.0).text
    return [
        (sample.name.removeprefix("oscine:"), sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith("oscine:")
    ]


def metrics(address: str = HEAD) -> dict[str, float]:
    """Each metric of an ingress, summed over its labels."""
    found: dict[str, float] = {}
    for name, _, value in samples(address):
        found[name] = found.get(name, 0.0) + value
    return found


def ready_nodes(address: str = HEAD) -> set[str]:
    """Nodes of the replicas that take requests, as an ingress sees it."""
    states = [(labels, value) for name, labels, value in samples(address) if name == "replica_state"]
    return {labels["node"] for labels, value in states if labels["state"] == "ready" and value}


def running_by_node(address: str = HEAD) -> dict[str, float]:
    """Sequences that run, by the nodes of the replicas."""
    return {labels["node"]: value for name, labels, value in samples(address) if name == "replica_requests_running"}


def wait_healthy(address: str = HEAD) -> None:
    def is_healthy() -> bool:
        try:
            return httpx.get(f"http://{address}:{PORT}/health", timeout=30.0).status_code == 200
        except httpx.TransportError:
            return False

    wait_cluster(is_healthy, "the ingress")


@dataclass
class Stream:
    """What a client gets of a completion of `tokens` tokens by a fake executor."""

    number: int
    tokens: int
    text: str = ""
    pieces: int = 0
    reason: str | None = None
    usage: int = 0  # tokens, as the server counts
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, client: httpx.AsyncClient) -> None:
        """Raises AssertionError for any answer but a whole one."""
        body = {"model": "fake", "prompt": f"{self.number} one", "max_tokens": self.tokens, "ignore_eos": True}
        more = {"stream": True, "stream_options": {"include_usage": True}}
        async with client.stream("POST", "/v1/completions", json=body | more) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    self._take(json.loads(line.removeprefix("data: ")))
        assert (self.usage, self.reason) == (self.tokens, "length"), self

    def _take(self, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        for choice in event["choices"]:
            self.text += choice["text"]
            self.reason = choice["finish_reason"] or self.reason
            self.begun.set()
        if event.get("usage"):
            self.usage = event["usage"]["completion_tokens"]


async def run_streams(
    streams: list[Stream], meanwhile: Callable[[httpx.AsyncClient], Any] | None = None, address: str = HEAD
) -> None:
    """Runs them to their ends; `meanwhile` is awaited once all have begun and none has ended."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://{address}:{PORT}", timeout=60.0, limits=limits) as client:
        tasks = [asyncio.create_task(one.run(client)) for one in streams]
        for one, task in zip(streams, tasks, strict=True):
            begun = asyncio.create_task(one.begun.wait())
            await asyncio.wait((begun, task), return_when=asyncio.FIRST_COMPLETED)
            begun.cancel()
        if meanwhile is not None:
            assert not any(task.done() for task in tasks), "streams must be under way"
            await meanwhile(client)
        await asyncio.gather(*tasks)
