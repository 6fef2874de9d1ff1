"""OpenTelemetry traces: one span per request, with `gen_ai.*` attributes, and the spans of its sequences below it.

OpenTelemetry's SDK is imported only if traces are on. It reads its own environment: OTEL_EXPORTER_OTLP_*,
OTEL_TRACES_SAMPLER, OTEL_SERVICE_NAME, OTEL_BSP_* and the like. Records become spans when a request is over, so a token
costs nothing. Attributes gen_ai.* follow OpenTelemetry's conventions; oscine.* are our own.
"""

from itertools import pairwise
from typing import Any

import oscine
from oscine.api.common.asgi import Scope
from oscine.api.common.record import RequestRecord, SequenceTimes
from oscine.engine.wire.stream import Attempt
from oscine.types import RemotePrefill

_OPERATIONS = {"/v1/completions": "text_completion"}  # gen_ai.operation.name; all others that generate: chat
_PROTOCOL = "http/protobuf"
_NS = 1_000_000_000


class Tracing:
    """Exports over OTLP/HTTP, from a thread of its own. Raises ValueError if traces were requested and cannot be
    exported."""

    def __init__(self, protocol: str = _PROTOCOL) -> None:
        if protocol != _PROTOCOL:
            raise ValueError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; traces are sent as {_PROTOCOL!r} alone")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            needs = "which need the packages of oscine[otel]; OTEL_SDK_DISABLED=true turns them off"
            raise ValueError(f"OTEL_EXPORTER_OTLP_ENDPOINT asks for traces, {needs}") from None
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "oscine"}))
        resource = resource.merge(Resource({SERVICE_VERSION: oscine.__version__}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self.tracer = self._provider.get_tracer("oscine", oscine.__version__)

    def begin(self, record: RequestRecord, scope: Scope) -> "RequestSpan":
        """A span within the trace of the client's `traceparent`, if there is one."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind

        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        name = record.method  # until the endpoint is known
        attributes = {"http.request.method": record.method, "url.path": record.path[:200]}
        span = self.tracer.start_span(
            name, extract(headers), SpanKind.SERVER, attributes=attributes, start_time=record.started_ns
        )
        record.trace_id = f"{span.get_span_context().trace_id:032x}"
        return RequestSpan(self.tracer, span)

    def stop(self) -> None:
        """Sends the remaining spans. Takes up to OTEL_EXPORTER_OTLP_TIMEOUT if no collector answers."""
        self._provider.shutdown()


class RequestSpan:
    """The span of one request."""

    def __init__(self, tracer: Any, span: Any) -> None:
        self._tracer, self._span = tracer, span

    def end(self, record: RequestRecord) -> None:
        from opentelemetry.trace import Status, StatusCode

        span = self._span
        if span.is_recording():
            span.update_name(_name(record))
            span.set_attributes(_attributes(record))
            if record.status >= 500 or (record.error and record.status == 200):
                span.set_status(Status(StatusCode.ERROR))
            children = SequenceSpans(self._tracer, record)
            for sequence in record.sequences:
                children.add(span, sequence)
        span.end(_unix_ns(record, record.ended_s))


def _name(record: RequestRecord) -> str:
    if record.model is not None and record.sequences:
        return f"{_operation(record)} {record.model}"
    return f"{record.method} {record.route}".rstrip()


def _operation(record: RequestRecord) -> str:
    return _OPERATIONS.get(record.route, "chat")


def _attributes(record: RequestRecord) -> dict[str, Any]:
    found: dict[str, Any] = {
        "http.response.status_code": record.status,
        "http.route": record.route or None,
        "error.type": record.error or (str(record.status) if record.status >= 500 else None),
        "oscine.request_id": record.request_id.decode(),
        "oscine.api_key": record.key.name if record.key else None,
    }
    if record.sequences:
        found |= _generation(record)
    return {name: value for name, value in found.items() if value is not None}


def _generation(record: RequestRecord) -> dict[str, Any]:
    sequences, sampling = record.sequences, record.sampling
    found: dict[str, Any] = {
        "gen_ai.operation.name": _operation(record),
        "gen_ai.provider.name": "oscine",
        "gen_ai.request.model": record.model,
        "gen_ai.response.model": record.model,
        "gen_ai.usage.input_tokens": record.prompt_tokens,
        "gen_ai.usage.output_tokens": record.tokens,
        "gen_ai.usage.cache_read.input_tokens": sum(sequence.cached_tokens for sequence in sequences),
        "gen_ai.response.finish_reasons": [sequence.finish_reason for sequence in sequences],
        "gen_ai.server.time_to_first_token": record.first_token_s,
    }
    if len(sequences) > 1:
        found["gen_ai.request.choice.count"] = len(sequences)
    if sampling is not None:
        for name in ("max_tokens", "temperature", "top_p", "seed"):
            found[f"gen_ai.request.{name}"] = getattr(sampling, name)
    return found


class SequenceSpans:
    """Adds child spans to a request's span once it is over: the phases of each sequence, and its way through engines.

    Phases that have not ended end with the request.
    """

    def __init__(self, tracer: Any, record: RequestRecord) -> None:
        self._tracer, self._record = tracer, record
        self._common = {"gen_ai.provider.name": "oscine"}
        if record.model is not None:
            self._common["gen_ai.request.model"] = record.model

    def add(self, root: Any, sequence: SequenceTimes) -> None:
        marks = (sequence.arrived_s, sequence.scheduled_s, sequence.first_s, sequence.ended_s)
        for name, start_s, end_s in zip(("queue", "prefill", "decode"), marks, marks[1:], strict=False):
            if start_s:
                self._span(root, name, start_s, end_s or sequence.ended_s)
        for attempt in sequence.attempts:
            self._attempt(root, attempt)
        for earlier, later in pairwise(sequence.attempts):
            moved = {"oscine.replica.from": earlier.replica, "oscine.replica.to": later.replica}
            known = {"oscine.known_tokens": later.num_known_tokens}
            self._span(root, "migration", earlier.left_s, later.first_s or later.left_s, moved | known)

    def _attempt(self, root: Any, attempt: Attempt) -> None:
        replica = {"oscine.replica": attempt.replica}
        routed = {"oscine.router.queue_s": attempt.queue_s, "oscine.router.overlap_tokens": attempt.num_overlap_tokens}
        self._span(root, "route", attempt.asked_s, attempt.placed_s, replica | routed)
        said = {"gen_ai.usage.output_tokens": attempt.num_tokens}
        engine = self._span(root, "engine", attempt.placed_s, attempt.left_s, replica | said)
        if attempt.prefill is not None:
            self._prefill(engine, attempt.placed_s, attempt.prefill)

    def _prefill(self, engine: Any, asked_s: float, prefill: RemotePrefill) -> None:
        """The spans of a remote prefill. The engine asks for it as soon as it has the request."""
        replica = {"oscine.replica": prefill.replica}
        computed_s = asked_s + prefill.prefill_s
        self._span(engine, "remote_prefill", asked_s, computed_s, replica, prefill.failure)
        if prefill.failure is None:
            moved = {
                "oscine.transfer.full_pages": prefill.num_full_pages,
                "oscine.transfer.sliding_pages": prefill.num_sliding_pages,
                "oscine.transfer.transport": prefill.transport,
                "oscine.transfer.bytes": prefill.num_bytes,
            }
            self._span(engine, "kv_transfer", computed_s, computed_s + prefill.transfer_s, replica | moved)

    def _span(
        self,
        parent: Any,
        name: str,
        start_s: float,
        end_s: float,
        attributes: dict[str, Any] | None = None,
        failure: str | None = None,
    ) -> Any:
        """Adds a span that has already ended; it can still have children."""
        from opentelemetry.trace import Status, StatusCode, set_span_in_context

        record = self._record
        span = self._tracer.start_span(
            name,
            set_span_in_context(parent),
            attributes=self._common | (attributes or {}),
            start_time=_unix_ns(record, start_s),
        )
        if failure is not None:
            span.set_status(Status(StatusCode.ERROR, failure))
        span.end(_unix_ns(record, end_s or record.ended_s))
        return span


def _unix_ns(record: RequestRecord, at_s: float) -> int:
    """Converts a time on the clock of time.perf_counter."""
    return record.started_ns + int((at_s - record.started_s) * _NS)
