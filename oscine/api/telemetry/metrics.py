"""Prometheus metrics: `oscine:*`, and the same samples under the `vllm:*` names that dashboards know.

This module has the metrics of HTTP requests; sequence_metrics has those of sequences, engine_metrics those of engines.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from oscine.api.common.record import RequestRecord
from oscine.api.telemetry.sequence_metrics import HISTOGRAMS, SequenceFamilies, SequenceMetrics

disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the series and no dashboard reads them

_VLLM_NAMES = {
    *HISTOGRAMS,
    *("request_success", "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason"),
    *("engine_sleep_state", "iteration_tokens", "kv_cache_usage_perc", "cache_config_info", "num_preemptions"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    "spec_decode_num_accepted_tokens_per_pos",
    *("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens", "prompt_tokens_cached", "generation_tokens"),
    *("prompt_tokens_by_source", "tool_call_parser_invocations"),
}
_OTHERWISE_NAMED = {"iteration_tokens": "iteration_tokens_total"}  # a histogram, whatever its name in vLLM says
# Names in dashboards for earlier versions of vLLM.
_OLDER_NAMES = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "inter_token_latency_seconds": "time_per_output_token_seconds",
}
_ENGINE = {"engine": "0"}  # one per model; the engines of a cluster count as one
_PROBES = frozenset(
    (
        *("/metrics", "/health", "/v1/health/live", "/v1/health/ready", "/version"),
        *("/v1/metrics", "/v1/version", "/ping", "/v2/health/live", "/v2/health/ready", "/v2/models/{name:path}/ready"),
    )
)
_METHODS = frozenset(("GET", "POST", "DELETE", "HEAD", "OPTIONS"))
_HTTP_BUCKETS_S = (0.1, 0.5, 1.0, 5.0, 30.0)
_LAG_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


def _aliases(families: Iterable[Metric]) -> Iterable[Metric]:
    for family in families:
        yield family
        name = family.name.removeprefix("oscine:")
        if name != family.name and name in _VLLM_NAMES:
            yield _alias(family, _OTHERWISE_NAMED.get(name, name))
            if older := _OLDER_NAMES.get(name):
                yield _alias(family, older)


def _alias(family: Metric, name: str) -> Metric:
    alias = Metric(f"vllm:{name}", family.documentation, family.type)
    alias.samples = [
        sample._replace(name=f"vllm:{name}{sample.name.removeprefix(family.name)}", labels={**sample.labels, **_ENGINE})
        for sample in family.samples
    ]
    return alias


def _unescaped(accept: str) -> str:
    """The same formats without an escape of names, as all names are valid in each format.

    The library would write `_` for the colon of a name in OpenMetrics, which Prometheus 2 asks for.
    """
    kinds = (re.sub(r";\s*escaping=[^;]*", "", kind) for kind in accept.split(","))
    return ",".join(f"{kind};escaping=allow-utf-8" for kind in kinds)


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._refreshes: list[Callable[[], Awaitable[None]]] = []
        ProcessCollector(registry=self.registry)
        self._http = self._counter("http_responses", "HTTP responses", "path", "status")
        # Dashboards of vLLM and other servers query these names.
        name, what, labels = "http_request_duration_seconds", "Time to the end of the response", ("method", "handler")
        self._requests = Counter("http_requests", "HTTP requests", (*labels, "status"), registry=self.registry)
        self._durations = Histogram(name, what, labels, buckets=_HTTP_BUCKETS_S, registry=self.registry)
        self._errors = self._counter("request_errors", "Requests that ended with an error", "path", "code")
        self._key_requests = self._counter("api_key_requests", "Requests with a key", "api_key", "status")
        self.store_failures = self._counter("response_store_failures", "Writes of responses that failed")
        self.in_progress = self._gauge("http_requests_in_progress", "Requests whose response is not complete")
        self._gauge("asyncio_tasks", "Tasks of the API process").set_function(lambda: len(asyncio.all_tasks()))
        self.loop_lag = Histogram(
            "oscine:event_loop_lag_seconds",
            "How late the event loop is, not counting time without a core",
            buckets=_LAG_BUCKETS_S,
            registry=self.registry,
        )
        self._sequences = SequenceFamilies(self.registry)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"oscine:{name}", what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"oscine:{name}", what, registry=self.registry)

    def of_model(self, name: str) -> SequenceMetrics:
        return SequenceMetrics(self._sequences, name)

    def watch(self, collector: Collector, refresh: Callable[[], Awaitable[None]] | None = None) -> None:
        """Collects from it at each scrape, after `refresh`, which updates numbers that are kept elsewhere."""
        self.registry.register(collector)
        if refresh is not None:
            self._refreshes.append(refresh)

    def watch_connections(self, count: Callable[[], int]) -> None:
        self._gauge("http_connections", "Open connections").set_function(count)

    def responded(self, record: RequestRecord) -> None:
        """A request is over, with or without a response."""
        path, status = record.route or "other", str(record.status)
        self._http.labels(path, status).inc()
        if path not in _PROBES:
            labels = (record.method if record.method in _METHODS else "other", path)
            self._requests.labels(*labels, f"{status[0]}xx").inc()
            self._durations.labels(*labels).observe(record.ended_s - record.started_s)
        if record.error is not None:
            self._errors.labels(path, record.error).inc()
        if record.key is not None:
            self._key_requests.labels(record.key.name, status).inc()

    def collect(self) -> Iterable[Metric]:
        return _aliases(self.registry.collect())

    async def encoded(self, accept: str) -> tuple[bytes, str]:
        """All samples in a format that the client accepts, and the type of that format."""
        await asyncio.gather(*(refresh() for refresh in self._refreshes))
        _, content_type = choose_encoder(accept)
        encode, _ = choose_encoder(_unescaped(accept))
        return encode(self), content_type
