"""Pages of prompts behind a link with 200 ms of delay and 1 % loss: only prompts that gain by them are fetched."""

import statistics
import time
from collections.abc import Iterator

import httpx
import pytest

pytest.importorskip("ray", reason="it places the replicas")
pytest.importorskip("nixl_cu13", reason="it moves the pages")

from benchmarks.cluster.chaos import conversation
from tests.nodes.bed import Bed, Link
from tests.nodes.cluster import HEAD, PORT, deploy, metrics, start_ray, wait_cluster, wait_healthy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]

PROMPTS = 200
DELAY_S, LOSS = 0.2, 0.01
ENDS = ("prefills", "prefills_declined")  # of a prompt that another engine may compute, unless a transfer fails
FILE = """
ray: auto
ingress: {host: 0.0.0.0, port: 8000, resource: front, allowed-hosts: ["*"]}
router: {resource: front}
models:
  - name: far
    engine: &engine {page-size: 16, max-num-seqs: 8, kv-cache-bytes: 256MiB}
    prefill: {cpus: 1, labels: far=yes}
    decode: {cpus: 1, labels: far=no}
    remote-prefill: {min-tokens: 64}
  - name: plain
    engine: *engine
    aggregated: {cpus: 1, labels: far=no}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Bed]:
    with Bed(2, {2: Link()}) as bed:
        head, far = bed.nodes
        start_ray(head, ["front"], head=True, labels="far=no")
        start_ray(far, labels="far=yes")
        deploy(head, FILE)
        wait_healthy()
        yield bed


def first_token_s(client: httpx.Client, model: str, number: int) -> float:
    begun_s = time.monotonic()
    answer = client.post("/v1/chat/completions", json=conversation(number) | {"model": model, "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    return time.monotonic() - begun_s


def test_a_slow_link_costs_few_prompts_and_no_time(cluster: Bed) -> None:
    """The same prompts, in turns, for a model whose prompts another node could compute, and for one without that.

    The limits depend on the machine's speed: a prompt must be computed sooner than its pages cross the link, and
    medians of both models are compared.
    """
    cluster.nodes[1].set_link(Link(delay_s=DELAY_S, loss=LOSS))
    with httpx.Client(base_url=f"http://{HEAD}:{PORT}", timeout=60.0) as client:
        for model in ("far", "plain"):
            first_token_s(client, model, PROMPTS)
        times = [[first_token_s(client, model, number) for model in ("far", "plain")] for number in range(PROMPTS)]
    far_s, plain_s = (statistics.median(column) for column in zip(*times, strict=True))
    counts: dict[str, float] = {}

    def is_reported() -> bool:
        counts.update(metrics())
        return sum(counts[f"replica_remote_{end}_total"] for end in ENDS) == PROMPTS + 1

    wait_cluster(is_reported, "a report in which each prompt was fetched or declined, and no transfer failed")
    fetched, declined = (counts[f"replica_remote_{end}_total"] for end in ENDS)
    print(f"p50 TTFT {far_s * 1e3:.0f} ms, plain {plain_s * 1e3:.0f} ms; {fetched:g} fetched, {declined:g} declined")
    assert 1 <= fetched <= PROMPTS / 10, "the first one measures the link, and a few look whether it is better now"
    assert far_s <= 1.2 * plain_s
