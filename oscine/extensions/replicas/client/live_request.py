"""One request of an ingress on its way through engines: all it has produced, and where it is now.

placing --> running --> ended
   ^           |
   +-- lost ---+     the engine is gone, and the request goes on in another one from the tokens it has
"""

import asyncio
import time
from dataclasses import replace
from typing import Protocol

from oscine.engine.wire.stream import Attempt, RequestStream
from oscine.extensions.replicas.spec.placement import Place, Placement
from oscine.types import GenerationOutput, GenerationRequest, PrefillSource

_EXCLUDED_S = 2.0  # a replica that failed a request is not asked again so soon; one that restarts may be back then


class Holder(Protocol):
    """The connection to the engine that has a request."""

    def cancel(self, live: "LiveRequest") -> None: ...


class LiveRequest:
    """State of one live request. Exactly one of `seating` and `link` is set, but for moments."""

    def __init__(self, request: GenerationRequest, stream: RequestStream, digests: list[bytes]) -> None:
        """`digests` are those of the prompt."""
        self.request, self.stream, self.digests = request, stream, digests
        self.generated: list[int] = []  # by all engines so far
        self.seating: asyncio.Task[None] | None = None  # while it looks for a place
        self.link: Holder | None = None  # while an engine has it
        self.asked_s = 0.0  # for a place, on the clock of time.perf_counter
        self.attempts = 0  # engines that it was sent to
        self.losses = 0  # engines that broke while they had it
        self.moves = 0  # engines that had it and do not any more, those included that were to stop
        self.misses = 0  # engines in a row that gave nothing
        self.deadline_s: float | None = None  # when to give up, while it is between two engines
        self.pause_s = 0.0  # longest silence that a change of engines has caused
        self._failed: dict[str, float] = {}  # replica -> when it failed this request
        self._arrived_s = self._sent_s = time.monotonic()
        self._has_output = False  # its reader has got something
        self._waiting_for_output = True  # of the engine that has it now
        self._silent_s = 0.0  # when its last engine was last heard of

    @property
    def engine_id(self) -> str:
        """Its id in the present engine, which may not have noticed yet that an earlier try is over."""
        return f"{self.request.request_id}~{self.attempts}"

    def placement(self, model: str) -> Placement:
        request, now = self.request, time.monotonic()
        return Placement(
            request.request_id,
            model,
            self.digests,
            num_tokens=len(request.prompt_token_ids) + len(self.generated),
            max_tokens=request.sampling.max_tokens - len(self.generated),
            priority=request.priority,
            tenant=request.tenant,
            moved=self.deadline_s is not None,
            exclude=[replica for replica, failed_s in self._failed.items() if now - failed_s < _EXCLUDED_S],
        )

    def enter(self, place: Place) -> None:
        """An engine is to have it."""
        now_s, overlap = time.perf_counter(), place.num_overlap_tokens
        known = len(self.generated)
        self.stream.attempts.append(Attempt(place.replica, self.asked_s, now_s, place.queue_s, overlap, known))

    def leave(self) -> None:
        """The engine that had it, if any did, has it no more."""
        if self.stream.attempts and not (attempt := self.stream.attempts[-1]).left_s:
            attempt.left_s = time.perf_counter()
            attempt.num_tokens = len(self.generated) - attempt.num_known_tokens

    def for_engine(self, prefill: PrefillSource | None) -> GenerationRequest:
        """What the next engine is asked to do: to go on from here."""
        self.attempts += 1
        self._sent_s, self._waiting_for_output = time.monotonic(), True
        return replace(self.request, request_id=self.engine_id, generated_token_ids=self.generated, prefill=prefill)

    def fails_at(self, replica: str, heard_s: float) -> None:
        """The engine there, last heard of at `heard_s`, does not have the request any more, or never had."""
        self.leave()
        self.link = None
        self.misses += 1
        now = time.monotonic()
        self._failed[replica] = now
        if self._has_output and not self._waiting_for_output:
            self._silent_s = heard_s
        elif not self._silent_s:
            self._silent_s = now

    def withdraw(self) -> None:
        """Takes it from the engine that has it, or from the queue for one."""
        if self.seating is not None:
            self.seating.cancel()
        if self.link is not None:
            self.link.cancel(self)

    def take(self, output: GenerationOutput) -> None:
        """Passes news of the present engine on."""
        output.request_id = self.request.request_id
        if self._waiting_for_output:
            self._join(output)
        self.generated += output.token_ids
        self.stream.put(output)

    def _join(self, output: GenerationOutput) -> None:
        """Makes the first output of an engine one of the whole request."""
        attempt = self.stream.attempts[-1]
        attempt.first_s, attempt.prefill = time.perf_counter(), output.prefill
        if self._has_output:
            output.num_cached_tokens, output.queue_s = 0, 0.0
            output.prompt_logprobs = output.prefill = None
        else:
            output.queue_s += self._sent_s - self._arrived_s
        if self._silent_s:
            self.pause_s = max(self.pause_s, time.monotonic() - self._silent_s)
        self._silent_s = 0.0
        self.deadline_s, self.misses = None, 0
        self._has_output, self._waiting_for_output = True, False
