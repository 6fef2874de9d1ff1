"""Requests on their way: admitted, placed by the production router, run by replicas, moved when one is lost.

It does what the ingress of a cluster does (replicas/client/dispatcher.py), without connections and texts.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from oscine.api.common.errors import APIError
from oscine.api.serving.admission import Admission
from oscine.extensions.bench.serve.answer import Record
from oscine.extensions.plan.clock.agenda import Clock
from oscine.extensions.plan.engine.tokens import tokens
from oscine.extensions.plan.fleet.replica import Replica
from oscine.extensions.plan.traffic.session import Turn
from oscine.extensions.replicas.client.dispatcher import MigrationLimits, retry_s
from oscine.extensions.replicas.routing.model_router import ModelRouter
from oscine.extensions.replicas.spec.placement import NoPlace, Place, Placement
from oscine.types import GenerationOutput, GenerationRequest, SamplingParams

_EXCLUDED_S = 2.0  # a replica that failed a request gets it again only after this time


@dataclass(slots=True, eq=False)
class Live:
    """A request that has not ended."""

    number: int
    turn: Turn
    digests: list[bytes]
    record: Record
    on_end: Callable[[Record], None]
    admitted: AbstractContextManager[None] | None = None
    generated: int = 0  # tokens that were delivered
    attempts: int = 0  # engines that it was sent to
    losses: int = 0  # of these, that broke
    misses: int = 0  # in a row, that gave nothing
    deadline_s: float | None = None  # while it is between two engines
    failed: dict[str, float] = field(default_factory=dict)  # replica -> when it failed this request

    @property
    def engine_id(self) -> str:
        return f"{self.number}~{self.attempts}"


class Ingress:
    """Of one model. `replicas` are those that have an engine, by name."""

    def __init__(
        self, router: ModelRouter, admission: Admission, clock: Clock, page_size: int, limits: MigrationLimits
    ) -> None:
        self.replicas: dict[str, Replica] = {}
        self.num_moved = self.num_waiting = 0  # requests that lost an engine; that wait for a place now
        self._router, self._admission, self._clock = router, admission, clock
        self._page_size, self._limits = page_size, limits
        self._running: defaultdict[Replica, dict[str, Live]] = defaultdict(dict)  # by their ids in the engine
        self._waits: set[asyncio.Task[None]] = set()
        self.on_error: Callable[[BaseException], None]  # called with what a wait raises, which is a fault
        self.num_requests = 0

    def submit(self, turn: Turn, due_s: float, on_end: Callable[[Record], None]) -> None:
        """A request arrives now. `on_end` gets its record, perhaps at once."""
        now_s = self._clock()
        digests = turn.addresses(0, turn.prompt_tokens // self._page_size)
        live = Live(self.num_requests, turn, digests, Record(due_s, now_s, prompt_tokens=turn.prompt_tokens), on_end)
        self.num_requests += 1
        try:
            live.admitted = self._admission.hold(1, turn.prompt_tokens)
            live.admitted.__enter__()
        except APIError as error:
            live.admitted = None
            self._end(live, error.message)
            return
        self._seek(live)

    def num_running(self, replica: Replica) -> int:
        """Requests that the replica has."""
        return len(self._running[replica])

    def lose(self, replica: Replica, *, broke: bool) -> None:
        """The replica is gone. Its requests go elsewhere, and go on from the tokens that they have."""
        delivered = replica.end()
        for live in self._running.pop(replica, {}).values():
            num_new = delivered.get(live.engine_id, 0)
            most = live.turn.max_tokens - 1
            live.generated = min(live.generated + num_new, most)
            live.losses += broke
            self.num_moved += 1
            if live.losses > self._limits.max_losses:
                self._end(live, f"{live.losses} engines broke while they had this request")
            else:
                self._move(live, replica)

    def deliver(self, replica: Replica, output: GenerationOutput) -> None:
        """News of an engine."""
        live = self._running[replica].get(output.request_id)
        if live is None:
            return
        record, now_s = live.record, self._clock()
        live.deadline_s, live.misses = None, 0
        if output.token_ids:
            live.generated += len(output.token_ids)
            record.events_s.append(now_s)
            if len(record.events_s) == 1:
                record.begun_s, record.cached_tokens = now_s, output.num_cached_tokens
        if output.finish_reason is not None:
            del self._running[replica][output.request_id]
            self._end(live, output.error or "")

    def refuse(self, replica: Replica, request: GenerationRequest) -> None:
        """The engine is full."""
        live = self._running[replica].pop(request.request_id)
        if live.misses >= self._limits.max_refusals:
            self._end(live, "too many requests are waiting")
        else:
            self._move(live, replica)

    def _move(self, live: Live, replica: Replica) -> None:
        now_s = self._clock()
        live.misses += 1
        live.failed[replica.name] = now_s
        live.deadline_s = live.deadline_s or now_s + self._limits.timeout_s
        live.digests = live.turn.addresses(0, (live.turn.prompt_tokens + live.generated) // self._page_size)
        self._seek(live)

    # ---- finding a place ----

    def _placement(self, live: Live) -> Placement:
        now_s = self._clock()
        return Placement(
            str(live.number),
            self._router.model.name,
            live.digests,
            num_tokens=live.turn.prompt_tokens + live.generated,
            max_tokens=live.turn.max_tokens - live.generated,
            moved=live.deadline_s is not None,
            exclude=[replica for replica, failed_s in live.failed.items() if now_s - failed_s < _EXCLUDED_S],
        )

    def _seek(self, live: Live) -> None:
        place = self._router.place_now(self._placement(live))
        if place is not None:
            self._send(live, place)
            return
        self.num_waiting += 1
        wait = asyncio.get_running_loop().create_task(self._wait(live))
        self._waits.add(wait)
        wait.add_done_callback(self._waited)

    def _waited(self, wait: asyncio.Task[None]) -> None:
        self._waits.discard(wait)
        if not wait.cancelled() and (error := wait.exception()) is not None:
            self.on_error(error)

    async def _wait(self, live: Live) -> None:
        refusal: NoPlace | None = None
        while refusal is None or (live.deadline_s is not None and self._clock() < live.deadline_s):
            if refusal is not None:
                await asyncio.sleep(retry_s(refusal))
            try:
                place = await self._router.place(self._placement(live))
            except NoPlace as no:
                refusal = no
            else:
                self.num_waiting -= 1
                self._send(live, place)
                return
        self.num_waiting -= 1
        self._end(live, refusal.message)

    def _send(self, live: Live, place: Place) -> None:
        replica, turn = self.replicas[place.replica], live.turn
        live.attempts += 1
        self._running[replica][live.engine_id] = live
        replica.submit(
            GenerationRequest(
                live.engine_id,
                tokens(turn.prompt_tokens, turn.addresses),
                SamplingParams(max_tokens=turn.max_tokens, temperature=0.0),
                generated_token_ids=tokens(live.generated, turn.addresses),
                prefill=place.prefill,
            )
        )

    def _end(self, live: Live, error: str) -> None:
        live.record.error, live.record.output_tokens = error, live.generated
        if live.admitted is not None:
            live.admitted.__exit__(None, None, None)
        live.on_end(live.record)
