"""What the server needs of traces. The extension that makes spans may be missing."""

from typing import Protocol

from oscine.api.common.asgi import Scope
from oscine.api.common.record import RequestRecord
from oscine.settings.config import ServerOptions
from oscine.system.extensions import Place, part

TRACING = Place("OTEL_EXPORTER_OTLP_ENDPOINT", "oscine.extensions.tracing.spans:Tracing")


class Span(Protocol):
    def end(self, record: RequestRecord) -> None:
        """The request is over."""
        ...


class Tracing(Protocol):
    def begin(self, record: RequestRecord, scope: Scope) -> Span:
        """A span within the trace that the request's headers name, if they do."""
        ...

    def stop(self) -> None:
        """Sends the remaining spans. May wait."""
        ...


def tracing_of(options: ServerOptions) -> Tracing | None:
    """None where no traces are wanted. Raises ValueError if they cannot be exported."""
    if not options.traces:
        return None
    found: Tracing = part(TRACING)(options.traces)
    return found
