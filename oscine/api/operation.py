"""One line of the table of endpoints: path, method, handler, and the types of body, query and answers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from oscine.api.openai.answers import AnthropicError, Error


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str  # as Starlette writes it: /v1/models/{name:path}
    handler: Callable[..., Any]  # an ASGI application, or an async function of a Request
    summary: str
    body: Any = None  # the msgspec struct of the request's JSON; None: there is no body
    answer: type | str = "application/json"  # the msgspec struct of the answer's JSON, or a media type
    open: bool = False  # whether it needs no API key
    error: type = Error  # the struct of its errors
    query: Any = None  # the msgspec struct of the query parameters
    other: Mapping[str, type] = field(default_factory=dict)  # statuses that are answered with other structs

    @property
    def streams(self) -> bool:
        """Whether the request can ask for events instead of one answer."""
        return any("stream" in kind.__struct_fields__ for kind in (self.body, self.query) if kind is not None)


GET, POST, DELETE = (partial(Operation, method) for method in ("GET", "POST", "DELETE"))
PROBE = partial(Operation, "GET", open=True)
ANTHROPIC = partial(Operation, "POST", error=AnthropicError)
