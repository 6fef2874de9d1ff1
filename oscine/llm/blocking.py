"""The model for programs without an event loop, and for notebooks, whose event loop is taken."""

import asyncio
import signal
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from os import PathLike
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar, overload

import uvloop

from oscine.chat.tokenizer import Tokenizer
from oscine.llm.asynchronous import AsyncLLM, Conversation, Prompt, Request, is_conversation, is_prompt
from oscine.llm.batches import progress_bar
from oscine.llm.errors import LostEngineError
from oscine.llm.events import Finished, StreamEvent
from oscine.llm.results import ChatResult, TextResult
from oscine.settings.config import NANO
from oscine.types import EngineInfo

T = TypeVar("T")
_FAREWELL_S = 2.0  # for requests that run when the LLM is closed


class _LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = uvloop.new_event_loop()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="oscine-llm", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # Ctrl-C must reach the main thread: delivered here, it would not wake a thread that waits.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        self.loop.close()

    @property
    def is_alive(self) -> bool:
        """False also in a process that was forked: it has no threads but one."""
        return not self._ended and self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Raises LostEngineError once the loop has ended, and RuntimeError in the thread of the loop itself."""
        if not self.is_alive or self.is_current:
            work.close()
            if self.is_current:
                raise RuntimeError(
                    "An async function that an LLM calls cannot wait for this LLM: use a plain function."
                )
            raise LostEngineError("The LLM was closed.")
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result. When the caller is interrupted, so is the work."""
        future = self.start(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def stop(self) -> None:
        """Ends the loop, once what runs has heard of it."""
        self._ended = True
        asyncio.run_coroutine_threadsafe(_others_end(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


async def _others_end() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        _, stuck = await asyncio.wait(others, timeout=_FAREWELL_S)
        for task in stuck:
            task.cancel()


def _close(thread: _LoopThread, llm: AsyncLLM) -> None:
    """The garbage collector calls it in any thread, the loop's among them; the exit of a forked process does too."""
    if thread.is_current:
        threading.Thread(target=_close, args=(thread, llm)).start()
        return
    if not thread.is_alive:
        return
    try:
        thread.run(llm.close())
    finally:
        thread.stop()


class LLM:
    """A model with an engine of its own, loaded when it is made. A context manager; closed at exit at the latest.

    Several threads may use it at once.
    """

    def __init__(self, model: str | PathLike[str] = NANO, **options: Any) -> None:
        """`options`: those of `oscine serve`, with underscores. Raises ValueError or LostEngineError."""
        self._llm = AsyncLLM(model, **options)
        self._thread = _LoopThread()
        self._finalizer = weakref.finalize(self, _close, self._thread, self._llm)
        try:
            self._thread.run(self._llm.start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the engine."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    @property
    def info(self) -> EngineInfo:
        """The model as loaded, with `max_model_len` and `vocab_size`."""
        return self._llm.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._llm.tokenizer

    def load_adapter(self, name: str, folder: str | PathLike[str]) -> None:
        """Loads a LoRA adapter; requests have it with `model=name`. Needs enable_lora=True. Raises ValueError."""
        self._thread.run(self._llm.load_adapter(name, folder))

    def unload_adapter(self, name: str) -> None:
        """Frees the name of a LoRA adapter. Requests that have it go on. Raises ValueError for an unknown name."""
        self._thread.run(self._llm.unload_adapter(name))

    @overload
    def chat(self, messages: Conversation, **parameters: Any) -> ChatResult: ...

    @overload
    def chat(self, messages: Sequence[Conversation], **parameters: Any) -> list[ChatResult]: ...

    def chat(self, messages: Any, **parameters: Any) -> ChatResult | list[ChatResult]:
        """See AsyncLLM.chat."""
        found: ChatResult | list[ChatResult] = self._run(messages, is_conversation, self._llm.chat_request, parameters)
        return found

    @overload
    def generate(self, prompt: Prompt, **parameters: Any) -> TextResult: ...

    @overload
    def generate(self, prompt: Sequence[Prompt], **parameters: Any) -> list[TextResult]: ...

    def generate(self, prompt: Any, **parameters: Any) -> TextResult | list[TextResult]:
        """See AsyncLLM.generate."""
        found: TextResult | list[TextResult] = self._run(prompt, is_prompt, self._llm.text_request, parameters)
        return found

    def stream_chat(self, messages: Conversation, **parameters: Any) -> Iterator[StreamEvent]:
        """See AsyncLLM.stream_chat. An iterator that is closed early ends the answer."""
        return self._events(self._llm.chat_request(messages, **parameters))

    def stream_generate(self, prompt: Prompt, **parameters: Any) -> Iterator[StreamEvent]:
        """See AsyncLLM.stream_generate."""
        return self._events(self._llm.text_request(prompt, **parameters))

    def _events(self, request: Request[Any]) -> Iterator[StreamEvent]:
        queue: SimpleQueue[StreamEvent | None] = SimpleQueue()
        future = self._thread.start(request(queue.put))
        future.add_done_callback(lambda done: queue.put(None))
        try:
            while (event := queue.get()) is not None:
                yield event
            yield Finished.of(future.result())
        finally:
            future.cancel()

    def _run(self, given: Any, is_one: Callable[[Any], bool], make: Any, parameters: dict[str, Any]) -> Any:
        wanted = parameters.pop("progress", None)
        if is_one(given):
            parameters.pop("return_exceptions", None)
            return self._thread.run(make(given, **parameters)(None))
        bar = progress_bar(len(given), wanted)  # in this thread, where a notebook knows its cell
        return self._thread.run(self._llm.batch(given, make, parameters, bar))
