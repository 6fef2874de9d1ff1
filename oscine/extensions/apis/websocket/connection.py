"""A connection: lanes of responses, each of which makes one at a time, and steering input for those that run."""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeVar

import msgspec

from oscine.api.common.asgi import INSIDE, Receive, Scope, Send
from oscine.api.common.errors import APIError, from_validation, invalid, unsupported
from oscine.api.common.memory import memory_of
from oscine.api.common.work import BODIES, run_in_thread
from oscine.api.http.websocket import BUSY
from oscine.api.serving.service import Service
from oscine.extensions.apis.responses.run import Within
from oscine.extensions.apis.websocket.frames import Head, Json, Steer, changed, refusal, with_lane
from oscine.extensions.apis.websocket.memory import ConnectionMemory, RecentResponses
from oscine.extensions.apis.websocket.request import ConnectionRequest
from oscine.system.json_text import decode_whole

logger = logging.getLogger(__name__)

LIFETIME_S = 3600.0
MAX_LANES = 32  # with responses
MAX_WAITING = 32  # requests behind those that run
MAX_STEERS = 16  # per response
_MAX_ENDED = 64  # ids of responses that are remembered as over
_NORMAL, _TEXT_ONLY = 1000, 1003  # statuses of a close
T = TypeVar("T")
_LIMIT = "websocket_connection_limit_reached"


@dataclass
class _Job:
    """A `response.create`."""

    frame: str
    head: Head
    steers: dict[str, Steer] = field(default_factory=dict)  # that were accepted, by their ids
    size_of_steers: int = 0  # bytes that are counted for these
    within: Within | None = None  # set when it begins

    @property
    def size(self) -> int:
        """Bytes that are counted for it, beside its steers."""
        return len(self.frame)


class Sessions:
    """The ASGI application of all connections."""

    def __init__(self, service: Service) -> None:
        self._service, self._memory = service, RecentResponses()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _Connection(self._service, scope, ConnectionMemory(self._memory), send).run(receive)


class _Connection:
    def __init__(self, service: Service, scope: Scope, memory: ConnectionMemory, send: Send) -> None:
        self._service, self._scope, self._memory, self._send = service, scope, memory, send
        self._lanes: dict[str | None, deque[_Job]] = {}  # those with a request; the first job of each runs
        self._tasks: set[asyncio.Task[None]] = set()
        self._gone = asyncio.Event()
        self._over = False  # its time is over: no further request is taken
        self._ended: deque[str] = deque(maxlen=_MAX_ENDED)
        self._queued: dict[str, _Job] = {}  # those whose steers wait for results of tools, by response
        self._number = 0  # of the next event about steering
        self._tell_busy: Callable[..., None] = scope.get("extensions", {}).get(BUSY, lambda *, busy: None)

    async def run(self, receive: Receive) -> None:
        """Until the client leaves, or its time is over and all responses have ended."""
        await receive()
        await self._send({"type": "websocket.accept"})
        deadline_s: float | None = asyncio.get_running_loop().time() + LIFETIME_S
        try:
            while True:
                try:
                    async with asyncio.timeout_at(deadline_s):
                        message = await receive()
                except TimeoutError:
                    deadline_s, self._over = None, True
                    await self._close_if_over()
                    continue
                if message["type"] == "websocket.disconnect":
                    return
                await self._take(message.get("text"))
        finally:
            self._gone.set()
            if self._tasks:
                await asyncio.wait(self._tasks)
            for job in self._queued.values():
                self._service.bodies.give_back(job.size_of_steers)
            self._memory.close()

    async def _take(self, frame: str | None) -> None:
        """Answers what a client sends, or begins to."""
        if frame is None:
            await self._close(_TEXT_ONLY)
            return
        head = Head()
        try:
            self._service.bodies.take(len(frame))
            try:
                whole, head = await run_in_thread(lambda: _decoded(frame, Head), len(frame), BODIES)
            finally:
                self._service.bodies.give_back(len(frame))
            if head.type == "response.create":
                await self._create(whole, head)
            elif head.type == "response.steer":
                await self._steer(whole)
            else:
                raise invalid("type", "it is 'response.create' or 'response.steer'")
        except APIError as error:
            await self._tell(with_lane(refusal(error), head.stream_id))

    async def _create(self, frame: str, head: Head) -> None:
        if self._over:
            raise _expired()
        if head.background:
            raise unsupported("background", "a response over a WebSocket ends with its connection")
        if head.stream is False:
            raise unsupported("stream", "a response over a WebSocket is always streamed")
        if sum(map(len, self._lanes.values())) - len(self._lanes) >= MAX_WAITING:
            raise _too_many(f"{MAX_WAITING} requests wait on this connection")
        if head.stream_id not in self._lanes and len(self._lanes) >= MAX_LANES:
            raise _too_many(f"{MAX_LANES} responses run on this connection")
        job = _Job(await self._with_queued_steers(frame, head.previous_response_id or ""), head)
        if head.stream_id in self._lanes:
            self._lanes[head.stream_id].append(job)
            return
        self._lanes[head.stream_id] = deque([job])
        self._tell_busy(busy=True)
        task = asyncio.create_task(self._run_lane(head.stream_id))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _with_queued_steers(self, frame: str, previous: str) -> str:
        """The frame with the input that waits for results of the previous response. It is counted from now on.

        Raises APIError 503.
        """
        before = self._queued.get(previous)
        whole = frame
        if before is not None:
            size, steers = len(frame) + before.size_of_steers, list(before.steers.values())
            whole = await run_in_thread(lambda: changed(frame, _items(steers)), size, BODIES)
        if self._queued.get(previous) is not before:  # it came back meanwhile
            before, whole = None, frame
        self._service.bodies.take(len(whole))
        if before is not None:
            del self._queued[previous]
            self._service.bodies.give_back(before.size_of_steers)
        return whole

    async def _run_lane(self, stream_id: str | None) -> None:
        lane = self._lanes[stream_id]
        try:
            while lane and not self._gone.is_set():
                try:
                    await self._serve(lane)
                finally:
                    self._service.bodies.give_back(lane.popleft().size)
        finally:
            for job in lane:
                self._service.bodies.give_back(job.size)
            del self._lanes[stream_id]
            if not self._lanes:
                self._tell_busy(busy=False)
        await self._close_if_over()

    async def _serve(self, lane: "deque[_Job]") -> None:
        """The first request of the lane. A successor by steering is the next one."""
        job = lane[0]
        within = job.within = Within(self._memory, generate=job.head.generate is not False)
        failed = True
        try:
            request = ConnectionRequest(self._scope[INSIDE], self._scope, job.frame, within, self._gone)
            failed = await request.run(self._tell, job.head.stream_id)
        except Exception:  # the client was told
            logger.exception("a request over a WebSocket failed")
        if failed and job.head.previous_response_id is not None:
            self._memory.forget(job.head.previous_response_id)
        job.within = None  # no steer comes any more
        if within.response_id is not None:
            self._ended.append(within.response_id)
        if job.steers:
            await self._after_steers(lane, job, within, failed=failed)

    async def _after_steers(self, lane: "deque[_Job]", job: _Job, within: Within, *, failed: bool) -> None:
        response_id = within.response_id
        assert response_id is not None
        if within.required_input and not failed:
            await self._queue(response_id, job, within.required_input)
            return
        if failed:
            self._service.bodies.give_back(job.size_of_steers)
            await self._refuse_steers(job, "response_not_active", "the response has failed")
            return

        def steered() -> str:
            return changed(
                job.frame, input=_items(job.steers.values()), previous_response_id=response_id, generate=True
            )

        try:
            frame = await run_in_thread(steered, job.size + job.size_of_steers, BODIES)
            self._service.bodies.take(len(frame))
        except APIError as error:
            await self._refuse_steers(job, "server_overloaded", error.message)
            return
        finally:  # the frame has a copy of them
            self._service.bodies.give_back(job.size_of_steers)
        head = msgspec.structs.replace(job.head, previous_response_id=response_id, generate=True)
        lane.insert(1, _Job(frame, head))

    async def _queue(self, response_id: str, job: _Job, required: list[Json]) -> None:
        """Keeps its steers for the request that brings the results of its calls."""
        self._queued[response_id] = replace(job, frame="")
        if len(self._queued) > MAX_WAITING:
            oldest = self._queued.pop(next(iter(self._queued)))
            self._service.bodies.give_back(oldest.size_of_steers)
            why = f"{MAX_WAITING} later responses wait for results of tools"
            await self._refuse_steers(oldest, "too_many_pending_steers", why)
        for steer_id in job.steers:
            told = {"steer": {"id": steer_id, "previous_response_id": response_id}}
            waits = {"reason": "waiting_for_required_input", "required_input": required}
            await self._tell_steer("pending", job.head.stream_id, **told, **waits)

    async def _steer(self, frame: str) -> None:
        steer = await run_in_thread(lambda: _steer_of(frame), len(frame), BODIES)
        target, found = steer.previous_response_id, None
        for lane in self._lanes.values():
            within = lane[0].within
            if within is not None and within.response_id == target:
                found = lane[0]
        if found is None or found.within is None:
            code = "response_already_completed" if target in self._ended else "response_not_found"
            await self._refuse_steer(steer, code, f"no response '{target}' runs on this connection")
            return
        stream_id, within = found.head.stream_id, found.within
        if not within.may_be_steered:
            why = "a response of a conversation, or one that compacts its own, cannot be steered"
            await self._refuse_steer(steer, "steering_not_supported", why, stream_id)
        elif len(found.steers) >= MAX_STEERS:
            why = f"{MAX_STEERS} submissions wait for this response"
            await self._refuse_steer(steer, "too_many_pending_steers", why, stream_id)
        else:
            try:
                steer.items  # noqa: B018
            except APIError as error:
                await self._refuse_steer(steer, "invalid_input", error.message, stream_id)
                return
            try:
                self._service.bodies.take(len(frame))
            except APIError as error:
                await self._refuse_steer(steer, "server_overloaded", error.message, stream_id)
                return
            steer_id = f"steer_{secrets.token_hex(24)}"
            found.steers[steer_id] = steer
            found.size_of_steers += len(frame)
            within.steered = True
            told = {"id": steer_id, "previous_response_id": target}
            await self._tell_steer("accepted", stream_id, steer=told)

    async def _refuse_steers(self, job: _Job, code: str, why: str) -> None:
        for steer_id, steer in job.steers.items():
            await self._refuse_steer(steer, code, why, job.head.stream_id, steer_id)

    async def _refuse_steer(
        self, steer: Steer, code: str, why: str, stream_id: str | None = None, steer_id: str | None = None
    ) -> None:
        """`steer_id`: of input that was accepted."""
        given = msgspec.to_builtins(steer.input)
        told: Json = {"input": given, "previous_response_id": steer.previous_response_id}
        told |= {} if steer_id is None else {"id": steer_id}
        error = {"type": "invalid_request_error", "code": code, "message": f"{why[0].upper()}{why[1:].rstrip('.')}."}
        await self._tell_steer("failed", stream_id, error=error, steer=told)

    async def _tell_steer(self, kind: str, stream_id: str | None, **fields: object) -> None:
        event = {"type": f"response.steer.{kind}", **fields, "sequence_number": self._number}
        self._number += 1
        await self._tell(with_lane(msgspec.json.encode(event), stream_id))

    async def _tell(self, text: str) -> None:
        if self._gone.is_set():
            return
        try:
            await self._send({"type": "websocket.send", "text": text})
        except OSError:  # the client has left
            self._gone.set()

    async def _close_if_over(self) -> None:
        if self._over and not self._lanes:
            await self._tell(with_lane(refusal(_expired()), None))
            await self._close(_NORMAL)

    async def _close(self, status: int) -> None:
        if not self._gone.is_set():
            self._gone.set()
            await self._send({"type": "websocket.close", "code": status})


def _items(steers: Iterable[Steer]) -> list[Json]:
    return [item for steer in steers for item in steer.items]


def _steer_of(frame: str) -> Steer:
    """Raises APIError, also for too many values: some are looked at on the event loop."""
    try:
        memory_of(frame.encode())
    except ValueError as error:
        raise invalid("input", str(error)) from None
    return _decoded(frame, Steer)[1]


def _decoded(frame: str, kind: type[T]) -> tuple[str, T]:
    """The frame without lone surrogates, and what it says. Raises APIError."""
    try:
        return decode_whole(frame, kind)
    except msgspec.ValidationError as error:
        raise from_validation(error) from None
    except (msgspec.DecodeError, RecursionError):
        raise APIError("The text is not one JSON object.", code="invalid_json") from None


def _expired() -> APIError:
    message = f"A connection lasts {LIFETIME_S / 60:g} minutes. Open another one."
    return APIError(message, code=_LIMIT)


def _too_many(why: str) -> APIError:
    return APIError(f"Too much at once: {why}.", status=429, type="requests", code="rate_limit_exceeded")
