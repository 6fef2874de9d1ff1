"""One /metrics has every replica, the router and the migrated requests, also after the loss of the router."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from oscine.api.telemetry.engine_metrics import EngineCollector
from oscine.extensions.replicas.client import metrics
from oscine.extensions.replicas.client.dispatcher import MigrationCounters
from oscine.extensions.replicas.client.metrics import ClusterMetrics
from oscine.extensions.replicas.spec.placement import NoPlace
from oscine.extensions.replicas.spec.snapshot import ClusterSnapshot, ReplicaSnapshot, RouterCounters
from oscine.types import EngineStats
from tests.api.scripted_server import ScriptedServer
from tests.api.test_metrics import scrape, total

GOLDEN = Path(__file__).parent / "metrics.txt"
PREFILL = EngineStats(num_running=1, kv_slots_total=8, kv_slots_used=6, first_tokens=4, first_token_s=0.5)
DECODE = EngineStats(
    num_running=3,
    num_waiting=2,
    prefix_queries=100,
    prefix_hits=64,
    generated_tokens=500,
    inter_tokens=400,
    inter_token_s=2.0,
    remote_prefills=7,
    remote_prefill_failures=1,
    fetched_pages=30,
    fetched_bytes=1 << 20,
    fetch_s=0.25,
)
SNAPSHOT = ClusterSnapshot(
    1e9,
    replicas=[
        ReplicaSnapshot("p-1", "m", "prefill", "10.0.0.1", "ready", PREFILL),
        ReplicaSnapshot("d-1", "m", "decode", "10.0.0.2", "draining", DECODE, num_indexed_pages=12),
        ReplicaSnapshot("other", "n", "aggregated", "10.0.0.2", "ready", DECODE),
    ],
    routers=[RouterCounters("m", placed=9, refused=2, overlap_tokens=640, known_tokens=700, event_gaps=1, queue_s=1.5)],
    queued={"m": 5},
)
MOVED = MigrationCounters(migrations=3, failures=1, pause_s=0.75, longest_pause_s=0.5)


class Router:
    """Answers with a snapshot, an error, or never."""

    answer: ClusterSnapshot | Exception | None = SNAPSHOT

    async def snapshot(self) -> ClusterSnapshot:
        if self.answer is None:
            await asyncio.sleep(3600)
        assert self.answer is not None
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def router(scripted: ScriptedServer) -> Router:
    router = Router()
    collector = ClusterMetrics(router.snapshot, lambda: {"m": MOVED})
    scripted.service.metrics.watch(collector, collector.refresh)
    return router


@pytest.fixture
def scripted(model_folder: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(model_folder) as server:
        yield server


def test_every_replica_has_its_own_numbers(scripted: ScriptedServer, router: Router) -> None:
    found = scrape(scripted)
    decode = {"replica": "d-1", "model_name": "m", "role": "decode", "node": "10.0.0.2"}
    for name, value in {
        "requests_running": 3,
        "requests_waiting": 2,
        "indexed_pages": 12,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 64,
        "generation_tokens_total": 500,
        "inter_token_latency_seconds_count": 400,
        "inter_token_latency_seconds_sum": 2.0,
        "remote_prefills_total": 7,
        "remote_prefill_failures_total": 1,
        "fetched_pages_total": 30,
        "fetched_bytes_total": 1 << 20,
        "fetch_seconds_total": 0.25,
    }.items():
        assert found[f"oscine:replica_{name}", frozenset(decode.items())] == value, name
    assert total(found, "oscine:replica_kv_cache_usage_perc", replica="p-1") == 0.75
    assert total(found, "oscine:replica_time_to_first_token_seconds_sum", role="prefill") == 0.5
    for state, value in {"starting": 0, "ready": 0, "draining": 1, "lost": 0}.items():
        assert found["oscine:replica_state", frozenset({**decode, "state": state}.items())] == value
    assert total(found, "oscine:replica_requests_running", model_name="m") == 4


def test_the_metrics_are_a_decision(scripted: ScriptedServer, router: Router) -> None:
    """A metric that comes, goes or changes its kind or its help must be written into metrics.txt as well."""
    scripted.service.metrics.watch(EngineCollector(lambda: (), transfers=True))
    text = scripted.get("/metrics").text
    described = [line for line in text.splitlines() if line.startswith(("# HELP oscine:", "# TYPE oscine:"))]
    assert sorted(set(described)) == GOLDEN.read_text().splitlines()


def test_names_end_as_their_kind_asks() -> None:
    kinds = [line.split()[2:] for line in GOLDEN.read_text().splitlines() if line.startswith("# TYPE")]
    assert [name for name, kind in kinds if name.endswith("_total") != (kind == "counter")] == []
    assert [name for name, _ in kinds if name.endswith(("_count", "_sum", "_bucket", "_created"))] == []


def test_the_router_and_the_requests_that_moved(scripted: ScriptedServer, router: Router) -> None:
    found = scrape(scripted)
    for name, value in {
        "router_up": 1,
        "router_requests_queued": 5,
        "router_requests_placed_total": 9,
        "router_requests_refused_total": 2,
        "router_overlap_tokens_total": 640,
        "router_known_tokens_total": 700,
        "router_event_gaps_total": 1,
        "router_queue_seconds_total": 1.5,
        "migrations_total": 3,
        "migration_failures_total": 1,
        "migration_pause_seconds_total": 0.75,
        "migration_longest_pause_seconds": 0.5,
    }.items():
        labels = {} if name == "router_up" else {"model_name": "m"}
        assert found[f"oscine:{name}", frozenset(labels.items())] == value, name


@pytest.mark.parametrize("answer", [NoPlace("no router", retry_after_s=1, overloaded=False), RuntimeError("odd"), None])
def test_without_a_router_the_rest_is_still_there(
    scripted: ScriptedServer, router: Router, monkeypatch: pytest.MonkeyPatch, answer: Exception | None
) -> None:
    assert scrape(scripted)["oscine:router_up", frozenset()] == 1
    monkeypatch.setattr(metrics, "_PATIENCE_S", 0.05)
    router.answer = answer
    found = scrape(scripted)
    assert found["oscine:router_up", frozenset()] == 0
    assert not any(name.startswith("oscine:replica_") for name, _ in found)
    assert total(found, "oscine:migrations_total", model_name="m") == 3
    assert total(found, "oscine:engine_ready") == 1
