"""Prometheus metrics: `oscine:*`, and the same samples under the `vllm:*` names that dashboards know.

Knows the numbers and times of requests; nothing of their content.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from oscine.api.engine_metrics import EngineCollector
from oscine.api.record import RequestRecord, SequenceTimes, current
from oscine.types import GenerationOutput, GenerationRequest

disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the series and no dashboard reads them

_STEP_BUCKETS_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_REQUEST_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0),
)
_TOKEN_BUCKETS = tuple(1 << i for i in range(18))
_CHOICE_BUCKETS = (1, 2, 5, 10, 20, 50, 100)

_VLLM_NAMES = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "cache_config_info",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_time_per_output_token_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
    }
)


def _aliases(families: Iterable[Metric]) -> Iterable[Metric]:
    for family in families:
        yield family
        name = family.name.removeprefix("oscine:")
        if name != family.name and name in _VLLM_NAMES:
            alias = Metric(f"vllm:{name}", family.documentation, family.type)
            alias.samples = [s._replace(name="vllm:" + s.name.removeprefix("oscine:")) for s in family.samples]
            yield alias


class Metrics:
    """The metrics of one server. `model` labels them all."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._model = model
        self._finished = self._counter("request_success", "Finished sequences", "model_name", "finished_reason")
        self._http = self._counter("http_responses", "HTTP responses", "path", "status")
        self._errors = self._counter("request_errors", "Requests that ended with an error", "path", "code")
        self._key_requests = self._counter("api_key_requests", "Requests with a key", "api_key", "status")
        self._key_tokens = self._counter("api_key_tokens", "Tokens of sequences with a key", "api_key", "type")
        self.in_progress = self._gauge("http_requests_in_progress", "Requests whose response is not complete")
        self._gauge("asyncio_tasks", "Tasks of the API process").set_function(lambda: len(asyncio.all_tasks()))
        request, step = _REQUEST_BUCKETS_S, _STEP_BUCKETS_S
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", request)
        self.itl = self._histogram("inter_token_latency_seconds", "Between outputs of a sequence", step)
        self.tpot = self._histogram("request_time_per_output_token_seconds", "Mean time a token after the first", step)
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token", request)
        self.queue = self._histogram("request_queue_time_seconds", "Arrival to first scheduled step", request)
        self.prefill = self._histogram("request_prefill_time_seconds", "First scheduled step to first token", request)
        self.decode = self._histogram("request_decode_time_seconds", "First token to last token", request)
        self.inference = self._histogram("request_inference_time_seconds", "First step to last token", request)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a sequence", _TOKEN_BUCKETS)
        self.tokens = self._histogram("request_generation_tokens", "Generated tokens of a sequence", _TOKEN_BUCKETS)
        self._n = self._histogram("request_params_n", "Sequences of a request", _CHOICE_BUCKETS)
        self._max_tokens = self._histogram("request_params_max_tokens", "Most tokens of a sequence", _TOKEN_BUCKETS)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"oscine:{name}", what, labels, registry=self.registry)

    def _gauge(self, name: str, what: str) -> Gauge:
        return Gauge(f"oscine:{name}", what, registry=self.registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"oscine:{name}", what, ["model_name"], registry=self.registry, buckets=buckets)
        return family.labels(self._model)

    def watch_engine(self, collector: EngineCollector) -> None:
        self.registry.register(collector)

    def watch_connections(self, count: Callable[[], int]) -> None:
        self._gauge("http_connections", "Open connections").set_function(count)

    def admitted(self, requests: Sequence[GenerationRequest]) -> None:
        """The sequences of one HTTP request."""
        self._n.observe(len(requests))
        for request in requests:
            self._max_tokens.observe(request.sampling.max_tokens)

    def responded(self, record: RequestRecord) -> None:
        """A request is over, with or without a response."""
        path, status = record.route or "other", str(record.status)
        self._http.labels(path, status).inc()
        if record.error is not None:
            self._errors.labels(path, record.error).inc()
        if record.key is not None:
            self._key_requests.labels(record.key.name, status).inc()

    def ended(self, times: SequenceTimes) -> None:
        """A sequence is over; only one that had a token has times worth counting."""
        self._finished.labels(self._model, times.finish_reason).inc()
        self.e2e.observe(times.ended_s - times.arrived_s)
        self.prompt_tokens.observe(times.prompt_tokens)
        self.tokens.observe(times.tokens)
        if not times.first_s:
            return
        self.queue.observe(times.scheduled_s - times.arrived_s)
        self.prefill.observe(times.first_s - times.scheduled_s)
        self.decode.observe(times.last_s - times.first_s)
        self.inference.observe(times.last_s - times.scheduled_s)
        if times.tokens > 1:
            self.tpot.observe((times.last_s - times.first_s) / (times.tokens - 1))

    def used(self, key: str, times: SequenceTimes) -> None:
        self._key_tokens.labels(key, "prompt").inc(times.prompt_tokens)
        self._key_tokens.labels(key, "generation").inc(times.tokens)

    def collect(self) -> Iterable[Metric]:
        return _aliases(self.registry.collect())

    async def endpoint(self, request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self), media_type=content_type)


class SequenceClock:
    """The times of one sequence, from its arrival to its end; made when it is handed to the engine."""

    def __init__(self, metrics: Metrics, arrived_s: float) -> None:
        """`arrived_s` is on the clock of time.perf_counter."""
        self._metrics = metrics
        self._submitted_s = time.perf_counter()
        self.times = SequenceTimes(arrived_s)
        self.failed: str | None = None  # code of the error that ended it
        self._record = current.get()
        self._key = self._record.key if self._record is not None else None
        if self._record is not None:
            self._record.sequences.append(self.times)

    def output(self, output: GenerationOutput) -> None:
        if not output.token_ids:
            return
        times, now = self.times, time.perf_counter()
        if times.first_s:
            self._metrics.itl.observe(now - times.last_s)
        else:
            times.first_s = now
            times.scheduled_s = min(self._submitted_s + output.queue_s, now)
            times.cached_tokens = output.num_cached_tokens
            self._metrics.ttft.observe(now - times.arrived_s)
        times.last_s = now
        if self._key is not None:
            self._key.take_generated(len(output.token_ids))

    def finish(self, prompt_tokens: int, generated_tokens: int, reason: str) -> None:
        times = self.times
        times.ended_s = time.perf_counter()
        times.prompt_tokens, times.tokens = prompt_tokens, generated_tokens
        times.finish_reason = reason if self.failed is None else "error"
        if self._record is not None and self.failed is not None:
            self._record.error = self.failed
        self._metrics.ended(times)
        if self._key is not None:
            self._metrics.used(self._key.name, times)
