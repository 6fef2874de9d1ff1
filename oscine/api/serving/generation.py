"""From requests to the engine to the response: runs the sequences of one answer and sends it, streamed or whole.

Knows engine streams, connections and event streams; not what the tokens mean: that is the answer's and its choices'.
"""

import asyncio
import logging
import uuid
from collections.abc import Sequence
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from oscine.api.http.connection import run_while_connected
from oscine.api.http.errors import APIError, internal, unavailable
from oscine.api.http.sse import EventStream, Write
from oscine.api.serving.served_model import ServedModel
from oscine.api.telemetry.sequence_metrics import SequenceClock
from oscine.engine.wire.stream import EngineDied, EngineOverloaded, RequestStream
from oscine.types import GenerationOutput, GenerationRequest, SamplingParams

logger = logging.getLogger(__name__)

_STARTED_AT_ONCE = 16  # sequences of one answer that begin in one turn of the event loop


class Choice(Protocol):
    """One sequence of an answer as it grows."""

    @property
    def finish_reason(self) -> str | None:
        """Set when it is complete, which a stop string can do before the engine does."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Generated so far."""
        ...

    def feed(self, output: GenerationOutput) -> bytes:
        """Takes the engine's news. Returns the events to send, when the answer is streamed."""
        ...

    @property
    def interrupted(self) -> bool:
        """Whether the engine's request is to end early, for `continuation` to give another."""
        ...

    async def continuation(self, write: Write | None) -> GenerationRequest | None:
        """Called when the engine's request has ended: the one that goes on, or None if the choice is complete.

        May take its time, to run a tool say, and write events meanwhile.
        """
        ...


class Answer(Protocol):
    """What one request is answered with. choices are in the order of the requests to the engine."""

    @property
    def choices(self) -> Sequence[Choice]: ...

    def last_event(self) -> bytes:
        """What a stream ends with: the usage, if it was asked for, and [DONE]."""
        ...

    def failure(self, error: APIError) -> bytes:
        """What a stream ends with when it fails after its begin."""
        ...

    def body(self) -> bytes:
        """The whole answer as JSON, when all choices are complete."""
        ...


def engine_request(
    prompt: list[int], sampling: SamplingParams, priority: int, cache_salt: str | None
) -> GenerationRequest:
    return GenerationRequest(uuid.uuid4().hex, prompt, sampling, priority, cache_salt=cache_salt or "")


class Generation:
    """Runs the sequences of one answer."""

    def __init__(
        self, model: ServedModel, choices: Sequence[Choice], requests: Sequence[GenerationRequest], arrived_s: float
    ) -> None:
        """`arrived_s` is when the HTTP request came, on the clock of time.perf_counter."""
        self._model = model
        self._choices = choices
        self._requests = requests
        self._arrived_s = arrived_s

    async def respond(
        self, answer: Answer, scope: Scope, receive: Receive, send: Send, *, events: EventStream | None
    ) -> None:
        """Sends the response, as `events` if it is streamed. When the client leaves, its sequences end.

        Raises APIError if nothing was sent yet.
        """
        with self._model.admit(self._requests):
            if events is not None:
                await run_while_connected(receive, self._stream(answer, events), on_idle=events.keep_alive)
            elif await run_while_connected(receive, self.run(None)):
                await Response(answer.body(), media_type="application/json")(scope, receive, send)

    async def _stream(self, answer: Answer, events: EventStream) -> None:
        try:
            await self.run(events.write)
            await events.end(answer.last_event())
        except APIError as error:
            if not events.started:
                raise
            await events.end(answer.failure(error))
        except Exception:
            if not events.started:
                raise
            logger.exception("a stream failed")
            await events.end(answer.failure(internal()))

    async def run(self, write: Write | None) -> None:
        """Until all choices are complete. Raises APIError. Admission is the caller's affair."""
        try:
            await self._run(write)
        finally:
            self._model.metrics.answered(max(choice.num_tokens for choice in self._choices))

    async def _run(self, write: Write | None) -> None:
        pairs = [*zip(self._requests, self._choices, strict=True)]
        if len(pairs) == 1:
            await self._run_choice(*pairs[0], write)
            return
        tasks: list[asyncio.Future[None]] = []
        try:
            for request, choice in pairs:
                tasks.append(asyncio.ensure_future(self._run_choice(request, choice, write)))
                if len(tasks) % _STARTED_AT_ONCE == 0:
                    await asyncio.sleep(0)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _run_choice(self, request: GenerationRequest, choice: Choice, write: Write | None) -> None:
        clock = SequenceClock(self._model.metrics, self._arrived_s)
        following: GenerationRequest | None = request
        try:
            while following is not None:
                await self._run_request(following, choice, clock, write)
                following = await choice.continuation(write)
        except APIError as error:
            clock.failed = error.code
            raise
        finally:
            clock.finish(choice.num_prompt_tokens, choice.num_tokens, choice.finish_reason or "abort")

    async def _run_request(
        self, request: GenerationRequest, choice: Choice, clock: SequenceClock, write: Write | None
    ) -> None:
        """Until it ends or the choice is complete; closing the stream before its end cancels it in the engine."""
        stream = self._model.submit(request)
        try:
            async with stream:
                await self._pump(stream, choice, clock, write)
        except EngineDied as error:
            raise unavailable(
                f"The engine failed: {error}.", code="engine_died", retry_after_s=error.retry_after_s
            ) from None
        except EngineOverloaded as error:
            wait_s = error.retry_after_s or self._model.admission.departures.wait_s(1, 0)
            raise unavailable(f"The server is overloaded: {error}.", code="overloaded", retry_after_s=wait_s) from None
        finally:
            self._model.forget(stream)
            clock.times.stays += stream.stays

    async def _pump(self, stream: RequestStream, choice: Choice, clock: SequenceClock, write: Write | None) -> None:
        """The hot path: one wake-up of the stream is one write, whatever has arrived."""
        async for outputs in stream:
            events, over = [], False
            for output in outputs:
                if output.finish_reason == "error" or output.finish_reason == "cancelled":
                    raise _failure(output)
                clock.output(output)
                events.append(choice.feed(output))
                over = choice.finish_reason is not None or choice.interrupted
                if over:
                    break
            if write is not None and (data := b"".join(events)):
                await write(data)
            if over:
                return


def _failure(output: GenerationOutput) -> APIError:
    if output.finish_reason == "cancelled":
        return unavailable("The server shuts down and cancelled this request.", code="draining")
    return unavailable(f"The request failed: {output.error}.", code="engine_failed")
