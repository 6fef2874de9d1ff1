"""The operations of the table of endpoints, and their description: /openapi.json, which /docs shows."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import oscine
from oscine.api.common.errors import AnthropicError, Error
from oscine.api.common.ids import Id
from oscine.api.http.sse import SSE

_PAGE = Path(__file__).with_name("docs.html")
_REF = "#/components/schemas/{name}"
_PARAMETER = re.compile(r"{(\w+)(:\w+)?}")
_JSON, _FORM = "application/json", "multipart/form-data"
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'"
_STATUSES = {
    "400": "The request cannot be served; the error says why",
    "401": "No API key, or not one of this server",
    "403": "The API key lacks a right, or the server has no keys and is not known by this name",
    "404": "There is no such thing",
    "408": "The body did not arrive in time",
    "413": "The body is too large",
    "415": "The body is not declared as application/json",
    "409": "It cannot be done now",
    "429": "The API key is over a limit; Retry-After says when to try again",
    "500": "A bug; the server's log has it",
    "501": "This server keeps no files",
    "503": "The server is overloaded or not ready; Retry-After says when to try again",
    "529": "The server is overloaded",
}
QUESTION = [{"role": "user", "content": "What is 27 + 58?"}]


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str  # as Starlette writes it: /v1/models/{name:path}
    handler: Callable[..., Any]  # an ASGI application, or an async function of a Request
    summary: str
    body: Any = None  # the msgspec struct of the request's JSON; None: there is none
    form: Any = None  # the msgspec struct of the parts of a form
    undeclared: bool = False  # whether the JSON may come under any media type: that of curl -d is a form's
    answer: type | str = "application/json"  # the msgspec struct of the answer's JSON, or a media type
    open: bool = False  # whether it needs no API key
    admin: bool = False  # whether it needs the right `admin`
    error: type = Error  # the struct of its errors
    events: str = SSE  # the media type of a stream
    query: Any = None  # the msgspec struct of what may stand behind the question mark
    other: Mapping[str, type] = field(default_factory=dict)  # statuses that are answered with other structs
    example: Mapping[str, Any] | None = None  # a request; each endpoint with a body has one, and a test sends it

    @property
    def parameters(self) -> list[str]:
        """The names of those in the path."""
        return [name for name, _ in _PARAMETER.findall(self.path)]

    @property
    def ids(self) -> list[str]:
        """The parameters of the path that are ids of objects."""
        return [name for name in self.parameters if name == "id" or name.endswith("_id")]

    @property
    def streams(self) -> bool:
        """Whether the request can ask for events instead of one answer."""
        return any("stream" in kind.__struct_fields__ for kind in (self.body, self.query) if kind is not None)


def _post(path: str, handler: Any, summary: str, **facts: Any) -> Operation:
    """`body` need not be given for an Endpoint, which knows the type of its requests."""
    return Operation("POST", path, handler, summary, **{"body": getattr(handler, "request_type", None), **facts})


GET, POST, DELETE = partial(Operation, "GET"), _post, partial(Operation, "DELETE")
PROBE = partial(GET, open=True)


def describe(operations: Sequence[Operation], *, keys: bool, admin_keys: bool = False) -> dict[str, Any]:
    """The OpenAPI 3.1 document. `keys`: whether the server requires them; `admin_keys`: for the right `admin` alone."""
    kinds = [kind for o in operations for kind in (o.body, o.form, o.answer, o.error, *o.other.values())]
    types = [kind for kind in kinds if isinstance(kind, type)]
    _, schemas = msgspec.json.schema_components(list(dict.fromkeys(types)), ref_template=_REF)
    paths: dict[str, Any] = {}
    for operation in operations:
        needed = (keys or (admin_keys and operation.admin)) and not operation.open
        paths.setdefault(plain_path(operation), {})[operation.method.lower()] = _describe(operation, needed)
    components: dict[str, Any] = {"schemas": schemas}
    if keys or admin_keys:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "Oscine", "version": oscine.__version__, "description": "gpt-oss behind OpenAI's API."}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def plain_path(operation: Operation) -> str:
    """The path without converters of parameters: /v1/models/{name}."""
    return _PARAMETER.sub(r"{\1}", operation.path)


def _describe(operation: Operation, needs_key: bool) -> dict[str, Any]:
    words = re.findall(r"\w+", operation.path)
    described: dict[str, Any] = {
        "operationId": "_".join([operation.method.lower(), *words]),
        "summary": operation.summary,
    }
    in_path = [_in_path(name, is_id=name in operation.ids) for name in operation.parameters]
    if parameters := in_path + _query(operation.query):
        described["parameters"] = parameters
    if operation.body is not None:
        content = {"schema": _reference(operation.body), "example": operation.example}
        described["requestBody"] = {"required": True, "content": {_JSON: content}}
    if operation.form is not None:
        described["requestBody"] = {"required": True, "content": {_FORM: {"schema": _reference(operation.form)}}}
    described["responses"] = {"200": _answer(operation)} | _errors(operation, needs_key)
    if needs_key:
        described["security"] = [{"key": []}]
    return described


def _in_path(name: str, *, is_id: bool) -> dict[str, Any]:
    schema = msgspec.json.schema(Id if is_id else str)
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _query(kind: type | None) -> list[dict[str, Any]]:
    if kind is None:
        return []
    properties = msgspec.json.schema(kind)["$defs"][kind.__name__]["properties"]
    return [{"name": name, "in": "query", "required": False, "schema": schema} for name, schema in properties.items()]


def _answer(operation: Operation) -> dict[str, Any]:
    answer = operation.answer
    content: dict[str, Any] = {answer: {}} if isinstance(answer, str) else {_JSON: {"schema": _reference(answer)}}
    if operation.streams:
        content[operation.events] = {"schema": {"type": "string"}}
    return {"description": "The answer", "content": content}


def _errors(operation: Operation, needs_key: bool) -> dict[str, Any]:
    statuses = {"404"} if operation.parameters or operation.body is not None else set()
    if operation.query is not None or operation.ids:
        statuses |= {"400"}
    if operation.body is not None:
        statuses |= {"400", "408", "413", "503"} if operation.undeclared else {"400", "408", "413", "415", "503"}
        statuses |= {"529"} if operation.error is AnthropicError else set()
    if needs_key:
        statuses |= {"401", "429"} if operation.method == "POST" else {"401"}
    if operation.admin or not (needs_key or operation.open):
        statuses |= {"403"}
    answers = dict.fromkeys(statuses, operation.error) | dict(operation.other)
    content = {status: {_JSON: {"schema": _reference(kind)}} for status, kind in sorted(answers.items())}
    return {status: {"description": _STATUSES[status], "content": what} for status, what in content.items()}


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}


class Description:
    """Serves both; the document is made when it is first asked for."""

    def __init__(self, operations: Sequence[Operation], *, keys: bool, admin_keys: bool) -> None:
        """`operations` may still grow before the first request."""
        self._operations, self._keys, self._admin_keys = operations, keys, admin_keys
        self._page = _PAGE.read_bytes()

    @cached_property
    def _document(self) -> bytes:
        return msgspec.json.encode(describe(self._operations, keys=self._keys, admin_keys=self._admin_keys))

    async def document(self, request: Request) -> Response:
        return Response(self._document, media_type=_JSON)

    async def page(self, request: Request) -> Response:
        return Response(self._page, headers={"Content-Security-Policy": _POLICY}, media_type="text/html")
