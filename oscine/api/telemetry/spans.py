"""The spans below that of a request: the phases of a sequence, and its way through several engines.

Attributes gen_ai.* follow OpenTelemetry's conventions; oscine.* are our own.
"""

from itertools import pairwise
from typing import Any

from oscine.api.http.record import RequestRecord, SequenceTimes
from oscine.engine.wire.stream import Stay
from oscine.types import RemotePrefill

_NS = 1_000_000_000


def unix_ns(record: RequestRecord, at_s: float) -> int:
    """Converts a time on the clock of time.perf_counter."""
    return record.started_ns + int((at_s - record.started_s) * _NS)


class SequenceSpans:
    """Adds the spans once a request is over. Phases that have not ended end with it."""

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
        for stay in sequence.stays:
            self._stay(root, stay)
        for earlier, later in pairwise(sequence.stays):
            moved = {"oscine.replica.from": earlier.replica, "oscine.replica.to": later.replica}
            known = {"oscine.known_tokens": later.num_known_tokens}
            self._span(root, "migration", earlier.left_s, later.first_s or later.left_s, moved | known)

    def _stay(self, root: Any, stay: Stay) -> None:
        replica = {"oscine.replica": stay.replica}
        routed = {"oscine.router.queue_s": stay.queue_s, "oscine.router.overlap_tokens": stay.num_overlap_tokens}
        self._span(root, "route", stay.asked_s, stay.placed_s, replica | routed)
        said = {"gen_ai.usage.output_tokens": stay.num_tokens}
        engine = self._span(root, "engine", stay.placed_s, stay.left_s, replica | said)
        if stay.prefill is not None:
            self._prefill(engine, stay.placed_s, stay.prefill)

    def _prefill(self, engine: Any, asked_s: float, prefill: RemotePrefill) -> None:
        """The spans of a remote prefill. The engine asks for it as soon as it has the request."""
        replica = {"oscine.replica": prefill.replica}
        computed_s = asked_s + prefill.prefill_s
        self._span(engine, "remote_prefill", asked_s, computed_s, replica, prefill.failure)
        if prefill.failure is None:
            moved = {
                "oscine.transfer.full_pages": prefill.num_full_pages,
                "oscine.transfer.sliding_pages": prefill.num_sliding_pages,
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
            start_time=unix_ns(record, start_s),
        )
        if failure is not None:
            span.set_status(Status(StatusCode.ERROR, failure))
        span.end(unix_ns(record, end_s or record.ended_s))
        return span
