"""Runs the sequences of one answer: from requests to the engine to choices that are complete.

Knows engine streams; not what the tokens mean, which is the affair of the choices.
"""

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Generic, Protocol, TypeVar

from oscine.api.http.errors import APIError, unavailable
from oscine.api.http.sse import Write
from oscine.api.serving.served_model import ServedModel
from oscine.api.telemetry.sequence_metrics import SequenceClock
from oscine.engine.wire.stream import EngineDied, EngineOverloaded, RequestStream
from oscine.types import GenerationOutput, GenerationRequest, SamplingParams

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


class GrowingChoice(Protocol):
    """What a SentChoice sends. It grows as a Choice does, without a word of any API."""

    num_prompt_tokens: int
    num_tokens: int
    finish_reason: str | None

    @property
    def interrupted(self) -> bool: ...

    def continuation(self) -> GenerationRequest | None: ...


C = TypeVar("C", bound=GrowingChoice)


class SentChoice(ABC, Generic[C]):
    """A Choice that words another one as its API does."""

    def __init__(self, choice: C) -> None:
        self.choice = choice
        self.num_prompt_tokens = choice.num_prompt_tokens

    @abstractmethod
    def feed(self, output: GenerationOutput) -> bytes:
        """Lets the choice grow. Returns the events to send, when the answer is streamed."""

    @property
    def finish_reason(self) -> str | None:
        return self.choice.finish_reason

    @property
    def num_tokens(self) -> int:
        return self.choice.num_tokens

    @property
    def interrupted(self) -> bool:
        return self.choice.interrupted

    async def continuation(self, write: Write | None) -> GenerationRequest | None:
        return self.choice.continuation()


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

    def admit(self) -> AbstractContextManager[None]:
        """The places of its sequences. Raises APIError as ServedModel.admit does."""
        return self._model.admit(self._requests)

    async def run(self, write: Write | None) -> None:
        """Until all choices are complete. Raises APIError. The caller holds `admit`."""
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
