"""Prometheus metrics: `oscine:*`, and the same samples under the `vllm:*` names that dashboards know.

Knows the engine's statistics and the times of requests; nothing of their content.
"""

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oscine.types import EngineStats, GenerationOutput

disable_created_metrics()  # type: ignore[no-untyped-call]  # they double the series and no dashboard reads them

_STEP_BUCKETS_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_REQUEST_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0),
)
_TOKEN_BUCKETS = tuple(1 << i for i in range(18))

_VLLM_NAMES = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
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
        "request_time_per_output_token_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
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


def _fraction(used: int, total: int) -> float:
    return used / total if total else 0.0


class EngineCollector:
    """Reads the engine's newest statistics at the moment of a scrape."""

    def __init__(self, stats: Callable[[], EngineStats], is_ready: Callable[[], bool], model: str) -> None:
        self._stats, self._is_ready, self._model = stats, is_ready, model

    def _gauge(self, name: str, what: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"oscine:{name}", what, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, what: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"oscine:{name}", what, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def collect(self) -> Iterable[Metric]:
        s = self._stats()
        full = _fraction(s.full_pages_used, s.full_pages_total)
        sliding = _fraction(s.sliding_pages_used, s.sliding_pages_total)
        yield self._gauge("engine_ready", "1 while the engine takes requests", float(self._is_ready()))
        yield self._gauge("num_requests_running", "Sequences that run", s.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait", s.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Used share of the fuller page group, 0 to 1", max(full, sliding))
        yield self._gauge("full_pages_used", "Full-attention pages held by live requests", s.full_pages_used)
        yield self._gauge("full_pages", "Full-attention pages there are", s.full_pages_total)
        yield self._gauge("sliding_pages_used", "Sliding-window pages held by live requests", s.sliding_pages_used)
        yield self._gauge("sliding_pages", "Sliding-window pages there are", s.sliding_pages_total)
        yield self._counter("engine_steps", "Steps of the model", s.steps)
        yield self._counter("prompt_tokens", "Prompt tokens of admitted requests", s.prompt_tokens)
        yield self._counter("generation_tokens", "Generated tokens", s.generated_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", s.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", s.prefix_hits)
        yield self._counter("num_preemptions", "Sequences that were put back to make room", s.preemptions)


class Metrics:
    """The metrics of one server. `model` labels them all."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._model = model
        self._finished = Counter(
            "oscine:request_success", "Finished sequences", ["model_name", "finished_reason"], registry=self.registry
        )
        self.http = Counter("oscine:http_responses", "HTTP responses", ["path", "status"], registry=self.registry)
        request, step = _REQUEST_BUCKETS_S, _STEP_BUCKETS_S
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", request)
        self.itl = self._histogram("inter_token_latency_seconds", "Between outputs of a sequence", step)
        self.tpot = self._histogram("request_time_per_output_token_seconds", "Mean time a token after the first", step)
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token", request)
        self.queue = self._histogram("request_queue_time_seconds", "Arrival to first scheduled step", request)
        self.prefill = self._histogram("request_prefill_time_seconds", "First scheduled step to first token", request)
        self.decode = self._histogram("request_decode_time_seconds", "First token to last token", request)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a sequence", _TOKEN_BUCKETS)
        self.tokens = self._histogram("request_generation_tokens", "Generated tokens of a sequence", _TOKEN_BUCKETS)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"oscine:{name}", what, ["model_name"], registry=self.registry, buckets=buckets)
        return family.labels(self._model)

    def watch_engine(self, stats: Callable[[], EngineStats], is_ready: Callable[[], bool]) -> None:
        self.registry.register(EngineCollector(stats, is_ready, self._model))

    def finished(self, reason: str) -> None:
        self._finished.labels(self._model, reason).inc()

    def collect(self) -> Iterable[Metric]:
        return _aliases(self.registry.collect())

    async def endpoint(self, request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self), media_type=content_type)


class SequenceClock:
    """The times of one sequence, from its arrival to its end."""

    def __init__(self, metrics: Metrics, arrived_s: float) -> None:
        """`arrived_s` is on the clock of time.perf_counter."""
        self._metrics = metrics
        self._arrived_s = arrived_s
        self._first_s = self._last_s = 0.0
        self._queue_s = 0.0

    def output(self, output: GenerationOutput) -> None:
        if not output.token_ids:
            return
        now = time.perf_counter()
        if self._first_s:
            self._metrics.itl.observe(now - self._last_s)
        else:
            self._first_s = now
            self._queue_s = output.queue_s
            self._metrics.ttft.observe(now - self._arrived_s)
        self._last_s = now

    def finish(self, prompt_tokens: int, generated_tokens: int, reason: str) -> None:
        m = self._metrics
        m.finished(reason)
        m.e2e.observe(time.perf_counter() - self._arrived_s)
        m.prompt_tokens.observe(prompt_tokens)
        m.tokens.observe(generated_tokens)
        if not self._first_s:
            return
        m.queue.observe(self._queue_s)
        m.prefill.observe(max(self._first_s - self._arrived_s - self._queue_s, 0.0))
        m.decode.observe(self._last_s - self._first_s)
        if generated_tokens > 1:
            m.tpot.observe((self._last_s - self._first_s) / (generated_tokens - 1))


class HttpMetrics:
    """Middleware that counts responses by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.counter = metrics.http

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = scope.get("route")  # set by the router; absent for unknown paths, which would be unbounded
                self.counter.labels(route.path if route else "other", str(message["status"])).inc()
            await send(message)

        await self.app(scope, receive, count)
