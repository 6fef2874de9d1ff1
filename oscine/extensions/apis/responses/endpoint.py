"""/v1/responses: makes responses, and returns, cancels and deletes stored ones."""

from collections.abc import AsyncIterator
from operator import itemgetter
from typing import Generic

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from oscine.api.common.connection import run_while_connected
from oscine.api.common.errors import CONTEXT_OVERFLOW, APIError, invalid, not_found
from oscine.api.common.keys import Caller
from oscine.api.common.paging import page_of
from oscine.api.common.record import current, header
from oscine.api.common.work import BODIES, run_in_thread
from oscine.api.http.body import json_response
from oscine.api.http.sse import EventStream
from oscine.api.openai.endpoint import Endpoint
from oscine.api.serving.call import Call, T
from oscine.api.serving.service import Service
from oscine.extensions.apis.responses.background import BackgroundResponse, KeptResponses
from oscine.extensions.apis.responses.events import events_since
from oscine.extensions.apis.responses.plan import make_plan
from oscine.extensions.apis.responses.resource import KeptResponse, item_list, with_output
from oscine.extensions.apis.responses.run import WITHIN, ResponseRun, Within
from oscine.extensions.apis.responses.schemas import (
    DeletedResponse,
    ItemsQuery,
    ResponseAnswer,
    ResponseRequest,
    RetrieveQuery,
    read_query,
)
from oscine.extensions.apis.responses.store import StoredResponse
from oscine.extensions.apis.responses.view import Object, included


class ResponseEndpoint(Endpoint[T], Generic[T]):
    """An endpoint that needs stored responses."""

    def __init__(self, service: Service, kept: KeptResponses) -> None:
        super().__init__(service)
        self.kept = kept


class Responses(ResponseEndpoint[ResponseRequest]):
    async def answer(self, call: Call[ResponseRequest], scope: Scope, receive: Receive, send: Send) -> None:
        call.model.served.admission.check(1)  # before the prompt is made, which costs more
        within: Within | None = scope.get(WITHIN)
        if within is not None:  # the client reads events
            call.body.stream = True
        memory = None if within is None else within.memory
        run = ResponseRun(self.service, self.kept, await make_plan(self.service, self.kept.store, call, memory), within)
        if call.body.background:
            response = await self.kept.background.start(run)
            app = _Events(response.events(0), self.service) if call.body.stream else json_response(run.snapshot())
            await app(scope, receive, send)
        else:
            try:
                await self.respond(run.run, run, scope, receive, send, stream=call.body.stream)
            except APIError as error:
                if not (call.body.stream and error.code == CONTEXT_OVERFLOW and _is_codex(scope)):
                    raise
                if (record := current.get()) is not None:
                    record.error = error.code
                await _Events(_once(run.refusal(error)), self.service)(scope, receive, send)


def _is_codex(scope: Scope) -> bool:
    """Whether the client compacts its conversation upon an event only: for Codex a status of 400 ends the job."""
    return header(scope, b"originator").lower().startswith(b"codex")


class _Events:
    """An ASGI application that sends events."""

    def __init__(self, events: AsyncIterator[bytes], service: Service) -> None:
        self._events = events
        self._comments = service.config.server.keep_alive_comments

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = EventStream(send, comments=self._comments)
        await run_while_connected(receive, self._send_all(stream), on_idle=stream.keep_alive)

    async def _send_all(self, stream: EventStream) -> None:
        async for events in self._events:
            await stream.write(events)
        await stream.end(b"")


class StoredResponses:
    def __init__(self, service: Service, kept: KeptResponses) -> None:
        self._service, self._kept = service, kept

    async def retrieve(self, request: Request) -> ASGIApp:
        """The response, or with `stream` its events from `starting_after` on."""
        query = read_query(request.query_params, RetrieveQuery)
        include = included(query.include)
        live = self._live(request)
        if query.stream:
            number = 0 if query.starting_after is None else query.starting_after + 1
            return _Events(await self._events(request, live, number), self._service)
        if live is not None:
            return json_response(live.run.snapshot())
        return json_response(await _shown(await self._stored(request), include))

    async def cancel(self, request: Request) -> Response:
        """Ends a response that runs in the background; one that has ended stays as it is."""
        response_id = request.path_params["id"]
        live = self._live(request)
        if live is not None:
            await live.cancel(by_client=True)
        if live is not None and live.run.unstored:
            return json_response(live.run.snapshot())
        response = await _shown(await self._stored(request), frozenset())
        if not response.background:
            raise APIError(f"The response '{response_id}' does not run in the background and cannot be cancelled.")
        return json_response(response)

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["id"]
        live = self._live(request)
        if live is not None:
            await live.cancel(by_client=True)
            await self._kept.background.forget(live)
        if not await self._kept.store.delete(response_id, Caller.of(request.scope).name):
            raise _not_found(response_id)
        return json_response(DeletedResponse(response_id, "response", deleted=True))

    async def input_items(self, request: Request) -> Response:
        """A page of the items that the request came with."""
        query = read_query(request.query_params, ItemsQuery)
        include = included(query.include)
        stored = await self._stored(request)
        items: list[Object] = await run_in_thread(lambda: msgspec.json.decode(stored.input), len(stored.input), BODIES)
        return json_response(item_list(page_of(items, itemgetter("id"), query), query.limit, include))

    def _live(self, request: Request) -> BackgroundResponse | None:
        return self._kept.background.get(request.path_params["id"], Caller.of(request.scope).name)

    async def _stored(self, request: Request) -> StoredResponse:
        response_id = request.path_params["id"]
        stored = await self._kept.store.get(response_id, Caller.of(request.scope).name)
        if stored is None:
            raise _not_found(response_id)
        return stored

    async def _events(self, request: Request, live: BackgroundResponse | None, number: int) -> AsyncIterator[bytes]:
        if live is not None:
            return live.events(number)
        stored = await self._stored(request)
        if stored.events is None:
            raise invalid("stream", "only a response that was made in the background can be streamed again")
        return _once(events_since(stored.events, number))


async def _once(events: bytes) -> AsyncIterator[bytes]:
    yield events


async def _shown(stored: StoredResponse, include: frozenset[str]) -> ResponseAnswer:
    size = len(stored.body)
    kept = await run_in_thread(lambda: msgspec.json.decode(stored.body, type=KeptResponse), size, BODIES)
    return with_output(kept.response, kept.response.output, include)


def _not_found(response_id: str) -> APIError:
    return not_found(f"The response '{response_id}' is not stored on this server.", "response_not_found")
