"""The outputs of one request on their way to the task that reads them, and the errors that can end them."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from oscine.types import GenerationOutput, RemotePrefill


class EngineError(Exception):
    """The engine cannot serve; the message is one line and safe to show to a client."""

    def __init__(self, message: str | None, *, retry_after_s: float | None = None) -> None:
        """`retry_after_s`: estimated time until the request may find a place; None if unknown."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineDied(EngineError):  # noqa: N818  (reads as what happened)
    """The engine process ended while the request ran. A client may send the request again."""


class EngineOverloaded(EngineError):  # noqa: N818
    """The engine has as many waiting requests as it admits."""


@dataclass(slots=True)
class Attempt:
    """A request's time in one of several engines. Times are in seconds on the clock of time.perf_counter; 0: never."""

    replica: str
    asked_s: float  # when a place was asked for
    placed_s: float  # when this one was given
    queue_s: float  # that the request was queued in between
    num_overlap_tokens: int  # that were believed to be cached there
    num_known_tokens: int  # generated before, elsewhere
    first_s: float = 0.0  # first output
    left_s: float = 0.0  # when it ended, or had to move
    num_tokens: int = 0  # generated here
    prefill: RemotePrefill | None = None  # how the prompt came here


class RequestStream:
    """Reads the outputs of one request: `async for outputs in stream`, each time all that has arrived (>= 1).

    Ends after the output with a finish_reason; a request that the engine refuses as bad ends with such an output too
    (finish_reason "error"). Raises EngineDied or EngineOverloaded in place of a last output.
    Closing it before its end cancels the request; use `async with stream:`, so that a reader that is cancelled closes
    it as well. One reader at a time.
    """

    def __init__(self, request_id: str, cancel: Callable[[str], object]) -> None:
        """`cancel(request_id)` is called at most once, when the stream is closed before its end."""
        self.request_id = request_id
        self.attempts: list[Attempt] = []  # filled in by a producer with several engines
        self._cancel = cancel
        self._outputs: list[GenerationOutput] = []
        self._error: EngineError | None = None
        self._ended = False  # nothing will be put any more
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: GenerationOutput) -> None:
        """Called by the producer, on the reader's event loop."""
        self._outputs.append(output)
        if output.finish_reason is not None:
            self._ended = True
        self._wake()

    def fail(self, error: EngineError) -> None:
        """Called by the producer: the reader gets what has arrived, then the error."""
        if not self._ended:
            self._error = error
            self._ended = True
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def close(self) -> None:
        if not self._ended:
            self._ended = True
            self._wake()
            self._cancel(self.request_id)

    def __aiter__(self) -> "RequestStream":
        return self

    async def __anext__(self) -> list[GenerationOutput]:
        if not self._outputs and not self._ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._outputs:
            outputs, self._outputs = self._outputs, []
            return outputs
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def __aenter__(self) -> "RequestStream":
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
