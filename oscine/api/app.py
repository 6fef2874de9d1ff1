"""The ASGI application: the router made from the table of endpoints, and the middleware of every request."""

from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from oscine.api.common.errors import APIError
from oscine.api.common.ids import IdCheck
from oscine.api.common.keys import AdminCheck, ApiKeys, KeyCheck
from oscine.api.error_handlers import HANDLERS
from oscine.api.http.hosts import HostCheck, JsonCheck, OriginCheck
from oscine.api.openapi import Operation
from oscine.api.playground import playground_routes, running
from oscine.api.routes import apis_of, endpoints
from oscine.api.serving.service import Service
from oscine.api.telemetry.observe import Observe

_RATE_LIMITS = [
    f"X-RateLimit-{what}-{unit}" for what in ("Limit", "Remaining", "Reset") for unit in ("Requests", "Tokens")
]


def create_app(service: Service) -> ASGIApp:
    """The caller starts and stops the service."""
    checks = _Checks(
        key=Middleware(KeyCheck, service.keys),
        host=Middleware(HostCheck, service.config.server.allowed_hosts),
        origin=Middleware(OriginCheck, service.config.server.cors_origins),
        admin=Middleware(AdminCheck, service.keys),
    )
    routes: list[BaseRoute] = [_route(operation, checks, service.keys) for operation in endpoints(service)]
    for path, session in websockets_of(service).items():
        check = checks.key if service.keys else checks.host
        routes.append(WebSocketRoute(path, session, middleware=[check, checks.origin]))
        routes.append(Route(path, _upgrade_required, methods=["GET"]))
    front = next((api.front for api in apis_of(service) if api.front is not None), running)
    routes += playground_routes(front) if service.config.server.playground else [Route("/", front)]
    router = Starlette(routes=routes, exception_handlers=HANDLERS)
    router.router.redirect_slashes = False  # they would lead to the host that the client names
    app: ASGIApp = Observe(router, service.metrics, service.tracing, service.bodies)
    if service.config.server.cors_origins:  # outermost: a browser's preflight has no key, and it reads errors too
        app = CORSMiddleware(
            app,
            allow_origins=service.config.server.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            allow_private_network="*" not in service.config.server.cors_origins,
            expose_headers=["X-Request-Id", "Retry-After", "X-Tools-Left-Out", *_RATE_LIMITS],
        )
    root = service.config.server.root_path.rstrip("/")
    return _BelowPath(app, root) if root else app


class _BelowPath:
    """Middleware that removes the path of --root-path from requests that have it, and leads its end to a slash."""

    def __init__(self, app: ASGIApp, root: str) -> None:
        self._app, self._root = app, root

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == self._root:
            query = scope["query_string"].decode("latin-1")
            where = f"{self._root}/?{query}" if query else f"{self._root}/"
            await RedirectResponse(where)(scope, receive, send)  # without a host, which the client names
            return
        if scope["type"] in ("http", "websocket") and scope["path"].startswith(f"{self._root}/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._root)}
        await self._app(scope, receive, send)


def open_paths(service: Service) -> list[str]:
    """The paths of the endpoints that need no key: health, metrics and the like."""
    return [operation.path for operation in endpoints(service) if operation.open]


def websockets_of(service: Service) -> dict[str, ASGIApp]:
    """The WebSockets of all APIs by their paths."""
    return {path: session for api in apis_of(service) for path, session in api.websockets.items()}


def websocket_paths(service: Service) -> list[str]:
    """As clients name them."""
    root = service.config.server.root_path.rstrip("/")
    return [path for own in websockets_of(service) for path in {own, root + own}]


def _upgrade_required(request: Request) -> Response:
    message = f"GET {request.url.path} opens a WebSocket: it needs the header 'Upgrade: websocket'."
    headers = {"Upgrade": "websocket", "Connection": "Upgrade"}
    raise APIError(message, status=426, code="upgrade_required", headers=headers)


@dataclass(frozen=True, slots=True)
class _Checks:
    key: Middleware
    host: Middleware
    origin: Middleware
    admin: Middleware


def _route(operation: Operation, checks: _Checks, keys: ApiKeys) -> Route:
    needs_key = keys.for_admin if operation.admin else bool(keys)
    middleware = [] if operation.open else [checks.key if needs_key else checks.host]
    if operation.body is not None and not operation.undeclared:
        middleware.append(Middleware(JsonCheck))
    if operation.form is not None or operation.undeclared or operation.admin:
        middleware.append(checks.origin)
    if operation.admin:
        middleware.append(checks.admin)
    if operation.ids:
        middleware.append(Middleware(IdCheck, operation.ids))
    return Route(operation.path, operation.handler, methods=[operation.method], middleware=middleware)
