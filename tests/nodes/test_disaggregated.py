"""Two models over four nodes: one node computes prompts of both, others generate from pages that cross the network."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

pytest.importorskip("ray", reason="it places the replicas")
pytest.importorskip("nixl_cu13", reason="it moves the pages")

from benchmarks.cluster.chaos import conversation
from oscine import LLM
from tests.nodes.bed import Bed
from tests.nodes.cluster import (
    HEAD,
    PORT,
    deploy,
    in_parallel,
    metrics,
    replicas,
    start_ray,
    wait_cluster,
    wait_healthy,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

STREAMS, TOKENS = 64, 32
ENDS = ("prefills", "prefill_failures", "prefills_declined")  # of a prompt that another engine may compute
MODELS: dict[str, dict[str, Any]] = {"exact": {"dtype": "float32"}, "half": {"dtype": "bfloat16"}}
ROLES = """
  - name: {name}
    engine: {{dtype: {dtype}, page-size: 16, max-num-seqs: 32, kv-cache-bytes: 64MiB}}
    prefill: {{cpus: 1, resource: prompts}}
    decode: {{cpus: 1, resource: {name}}}
    remote-prefill: {{min-tokens: 64, timeout-s: 60}}"""
FILE = """
ray: auto
ingress: {host: 0.0.0.0, port: 8000, resource: front, allowed-hosts: ["*"]}
models:""" + "".join(ROLES.format(name=name, **options) for name, options in MODELS.items())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Bed]:
    with Bed(4) as bed:
        head, *workers = bed.nodes
        start_ray(head, ["front"], head=True)
        resources = ("prompts", "exact", "half")
        in_parallel(*(partial(start_ray, w, [resource]) for w, resource in zip(workers, resources, strict=True)))
        deploy(head, FILE)
        wait_healthy()
        yield bed


def body(number: int) -> dict[str, Any]:
    return conversation(number) | {"max_tokens": TOKENS}


def alone(model: str) -> list[str]:
    """What one engine answers."""

    def ask_llm(number: int) -> str:
        wanted = body(number)
        effort = wanted["reasoning_effort"]
        answer = llm.chat(wanted["messages"], temperature=0, max_tokens=TOKENS, reasoning_effort=effort)
        return f"{answer.reasoning}|{answer.content}|{answer.finish_reason}"

    with LLM(page_size=16, threads=2, **MODELS[model]) as llm, ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask_llm, range(STREAMS // 2)))


async def ask(client: httpx.AsyncClient, model: str, number: int) -> str:
    answer = await client.post("/v1/chat/completions", json=body(number) | {"model": model})
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    message = choice["message"]
    return f"{message.get('reasoning')}|{message['content'] or ''}|{choice['finish_reason']}"


async def ask_all() -> list[str]:
    async with httpx.AsyncClient(base_url=f"http://{HEAD}:{PORT}", timeout=240.0) as client:
        return await asyncio.gather(*(ask(client, m, n) for n in range(STREAMS // 2) for m in MODELS))


def test_answers_from_pages_of_another_node_equal_those_of_one_engine(cluster: Bed) -> None:
    """The least number of fetched prompts depends on the machine's speed: a transfer slower than computing is declined.

    All else holds at any speed.
    """
    head, prompts, *decoders = cluster.nodes
    places = {(one["model"], one["role"]): one["node"] for one in replicas(head)}
    assert places == {
        **{(model, "prefill"): prompts.address for model in MODELS},
        **{(model, "decode"): node.address for model, node in zip(MODELS, decoders, strict=True)},
    }
    expected = {model: alone(model) for model in MODELS}
    assert len(set(expected["exact"])) == STREAMS // 2, "the answers differ, so that one of another request is noticed"
    before = [node.received_bytes() for node in decoders]
    found = asyncio.run(ask_all())
    assert found == [expected[model][number] for number in range(STREAMS // 2) for model in MODELS]

    counts: dict[str, float] = {}

    def is_reported() -> bool:
        counts.update(metrics())
        return sum(counts[f"replica_remote_{end}_total"] for end in ENDS) == STREAMS

    wait_cluster(is_reported, "the engines' reports")
    received = sum(node.received_bytes() - was for node, was in zip(decoders, before, strict=True))
    assert counts["replica_remote_prefill_failures_total"] == 0
    assert counts["replica_remote_prefills_total"] >= 0.9 * STREAMS, "few transfers are slower than computing"
    assert counts["replica_remote_prefills_over_tcp_total"] == counts["replica_remote_prefills_total"]
    assert 0 < counts["replica_fetched_bytes_total"] < received
    print({name: number for name, number in counts.items() if name.startswith("replica_") and "fetch" in name})
    print(f"{counts['replica_remote_prefills_total']:g} of {STREAMS} prompts fetched; {received} bytes received")
