"""Runs the sequences of one answer: from requests to the engine to turns that are complete.

Knows engine streams. What the tokens mean is known to the turns, and how an answer is worded to the choices.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from oscine.api.common.asgi import Write
from oscine.api.common.errors import APIError, unavailable
from oscine.api.serving.call import Call
from oscine.api.telemetry.sequence_metrics import RequestType, SequenceClock
from oscine.api.turns.progress import Turn, TurnEvent
from oscine.engine.wire.stream import EngineDied, EngineOverloaded, RequestStream
from oscine.types import GenerationOutput

_STARTED_AT_ONCE = 16  # sequences of one answer that begin in one turn of the event loop


class Choice(Protocol):
    """One sequence of an answer: what the model says, and how the API words it."""

    @property
    def turn(self) -> Turn: ...

    def encode(self, events: Sequence[TurnEvent]) -> bytes:
        """What to send of new events. Called for each of the engine's news; nothing is sent of an answer sent whole."""
        ...


class Generation:
    """Runs the sequences of one answer. Metrics count calls of functions by `request_type`."""

    def __init__(self, call: Call[Any], choices: Sequence[Choice], request_type: RequestType = "other") -> None:
        self._call, self._choices, self._request_type = call, choices, request_type
        self._model = call.model.served

    def admit(self) -> AbstractContextManager[None]:
        """The places of its sequences. Raises APIError as ServedModel.admit does."""
        return self._model.admit([choice.turn.request for choice in self._choices], self._call.caller)

    async def run(self, write: Write | None) -> None:
        """Until all choices are complete. Raises APIError. The caller holds `admit`."""
        try:
            await self._run(write)
        finally:
            self._model.metrics.answered(max(choice.turn.num_tokens for choice in self._choices))

    async def _run(self, write: Write | None) -> None:
        if len(self._choices) == 1:
            await self._run_choice(self._choices[0], write)
            return
        tasks: list[asyncio.Future[None]] = []
        try:
            for choice in self._choices:
                tasks.append(asyncio.ensure_future(self._run_choice(choice, write)))
                if len(tasks) % _STARTED_AT_ONCE == 0:
                    await asyncio.sleep(0)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _run_choice(self, choice: Choice, write: Write | None) -> None:
        turn = choice.turn
        clock = SequenceClock(self._model.metrics, self._call.arrived_s, self._call.caller.key)
        turn.times = clock.times
        try:
            await self._run_request(choice, clock, write)
            while turn.interrupted:
                async for events in turn.go_on():
                    if (data := choice.encode(events)) and write is not None:
                        await write(data)
                if turn.finish_reason is None:
                    await self._run_request(choice, clock, write)
            if turn.may_call:
                self._model.metrics.parsed(self._request_type, streamed=write is not None, called=turn.has_called)
        except APIError as error:
            clock.failed = error.code
            raise
        finally:
            read = turn.num_prompt_tokens + turn.num_appended_tokens
            clock.finish(read, turn.num_tokens, turn.finish_reason or "abort")

    async def _run_request(self, choice: Choice, clock: SequenceClock, write: Write | None) -> None:
        """Until it ends or the choice is complete; closing the stream before its end cancels it in the engine."""
        stream = self._model.submit(choice.turn.request)
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
            clock.times.attempts += stream.attempts

    async def _pump(self, stream: RequestStream, choice: Choice, clock: SequenceClock, write: Write | None) -> None:
        """The hot path: one wake-up of the stream is one write, whatever has arrived."""
        turn, encode = choice.turn, choice.encode
        async for outputs in stream:
            data, over = [], False
            for output in outputs:
                if output.finish_reason == "error" or output.finish_reason == "cancelled":
                    raise _failure(output)
                clock.output(output)
                data.append(encode(turn.feed(output)))
                over = turn.finish_reason is not None or turn.interrupted
                if over:
                    break
            if write is not None and (joined := b"".join(data)):
                await write(joined)
            if over:
                return


def _failure(output: GenerationOutput) -> APIError:
    if output.finish_reason == "cancelled":
        return unavailable("The server shuts down and cancelled this request.", code="draining")
    return unavailable(f"The request failed: {output.error}.", code="engine_failed")
