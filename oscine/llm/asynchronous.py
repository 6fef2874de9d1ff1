"""The model on the caller's event loop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from oscine.api.serving.placement import place
from oscine.api.serving.schemas import ChatCompletionRequest, CompletionRequest
from oscine.api.serving.service import Service
from oscine.chat.tokenizer import Tokenizer
from oscine.llm import options as llm_options
from oscine.llm.batches import Bar, answer_all, progress_bar
from oscine.llm.errors import LostEngineError, RequestError, translated
from oscine.llm.events import Finished, StreamEvent
from oscine.llm.forms import response_format
from oscine.llm.functions import Tools
from oscine.llm.requests import Emit, Runner, check_names
from oscine.llm.results import ChatResult, TextResult
from oscine.settings.config import NANO
from oscine.system.environment import Environment
from oscine.system.home import give_home
from oscine.types import EngineInfo

Conversation = str | Sequence[Mapping[str, Any]]  # one user's message, or messages as in chat completions
Prompt = str | Sequence[int]  # text or token ids
Result = TypeVar("Result", ChatResult, TextResult)
Request = Callable[[Emit | None], Coroutine[Any, Any, Result]]


class AsyncLLM:
    """A model with an engine of its own. `async with` starts and closes it; else the first request starts it.

    It belongs to the event loop that uses it first.
    """

    def __init__(self, model: str | PathLike[str] = NANO, **options: Any) -> None:
        """`options`: those of `oscine serve`, with underscores. Raises ValueError that names the option."""
        give_home()
        environment = Environment()
        config = llm_options.read(model, options, environment.num_gpus)
        self._service = Service(config)
        place(self._service, config, environment.num_gpus)
        self._served = self._service.models[0]
        engines, scheduler = config.server.data_parallel_size, config.engine.scheduler
        self._at_once = 2 * engines * (scheduler.most_seqs if environment.num_gpus else scheduler.max_num_seqs)
        self._runner = Runner(self._service)
        self._starting: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self) -> Self:
        """Returns when the model is loaded. Raises ValueError or LostEngineError that says why it cannot be."""
        if self._closed:
            raise LostEngineError("The LLM was closed.")
        if self._starting is None:
            self._starting = asyncio.ensure_future(self._service.start())
        with translated():
            await asyncio.shield(self._starting)
        return self

    async def close(self) -> None:
        """Ends the engine. Requests that run get LostEngineError."""
        if self._closed:
            return
        self._closed = True
        if self._starting is not None:
            self._starting.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await self._starting
        await self._service.stop()

    async def __aenter__(self) -> Self:
        try:
            return await self.start()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        await self.close()

    @property
    def info(self) -> EngineInfo:
        """The model as loaded, with `max_model_len` and `vocab_size`; once it has started."""
        with translated():
            return self._served.ready().info

    @property
    def tokenizer(self) -> Tokenizer:
        """Once the model has started."""
        with translated():
            return self._served.ready().tokenizer

    async def load_adapter(self, name: str, folder: str | PathLike[str]) -> None:
        """Loads a LoRA adapter; requests have it with `model=name`. Needs enable_lora=True. Raises ValueError."""
        await self.start()
        if not self._served.options.adapters.enable_lora:
            raise ValueError("adapters need LLM(enable_lora=True)")
        with translated():
            await self._served.load_adapter(name, fspath(folder))

    async def unload_adapter(self, name: str) -> None:
        """Frees the name of a LoRA adapter. Requests that have it go on. Raises ValueError for an unknown name."""
        if name not in self._served.engine.adapters:
            raise ValueError(f"there is no LoRA adapter {name!r}")
        self._served.unload_adapter(name)

    @overload
    async def chat(self, messages: Conversation, **parameters: Any) -> ChatResult: ...

    @overload
    async def chat(self, messages: Sequence[Conversation], **parameters: Any) -> list[ChatResult]: ...

    async def chat(self, messages: Any, **parameters: Any) -> ChatResult | list[ChatResult]:
        """The answer to a conversation, or the answers to a list of conversations in order.

        `parameters`: those of chat completions (`model` is the name of a LoRA adapter), and
        - `tools`: Python functions, which are run when the model calls them, or tools as the HTTP API has them;
        - `run_functions`: False returns the calls instead (default True);
        - `max_tool_calls`: calls that are run at most;
        - `response_format`: also a class of pydantic, a dataclass or a TypedDict; then see `ChatResult.parsed`;
        - `progress`: whether a batch shows a progress bar (default: in terminals and notebooks);
        - `return_exceptions`: whether a batch puts errors among its results instead of ending (default False).
        Raises RequestError, LostEngineError, and what a function raises.
        """
        found: ChatResult | list[ChatResult] = await self._run(messages, is_conversation, self.chat_request, parameters)
        return found

    @overload
    async def generate(self, prompt: Prompt, **parameters: Any) -> TextResult: ...

    @overload
    async def generate(self, prompt: Sequence[Prompt], **parameters: Any) -> list[TextResult]: ...

    async def generate(self, prompt: Any, **parameters: Any) -> TextResult | list[TextResult]:
        """The continuation of a text or of token ids, without a chat format; or of a list of such prompts.

        `parameters`: those of completions, and `response_format`, `progress` and `return_exceptions` as for `chat`.
        """
        found: TextResult | list[TextResult] = await self._run(prompt, is_prompt, self.text_request, parameters)
        return found

    def stream_chat(self, messages: Conversation, **parameters: Any) -> AsyncIterator[StreamEvent]:
        """The events of one answer, the last of them Finished. `parameters` as for `chat`."""
        return _events(self.chat_request(messages, **parameters))

    def stream_generate(self, prompt: Prompt, **parameters: Any) -> AsyncIterator[StreamEvent]:
        """The same for a continuation."""
        return _events(self.text_request(prompt, **parameters))

    async def _run(
        self, given: Any, is_one: Callable[[Any], bool], make: Callable[..., Request[Any]], parameters: dict[str, Any]
    ) -> Any:
        if is_one(given):
            parameters.pop("progress", None)
            parameters.pop("return_exceptions", None)
            return await make(given, **parameters)(None)
        bar = progress_bar(len(given), parameters.pop("progress", None))
        return await self.batch(given, make, parameters, bar)

    async def batch(
        self, given: Sequence[Any], make: Callable[..., Request[Result]], parameters: dict[str, Any], bar: Bar
    ) -> list[Result]:
        """The results of a list. `make`: chat_request or text_request."""
        keep = bool(parameters.pop("return_exceptions", False))
        at_once = max(1, self._at_once // (parameters.get("n") or 1))
        requests = [partial(make(one, **parameters), None) for one in given]
        return await answer_all(requests, at_once, bar, return_exceptions=keep)

    def chat_request(
        self,
        messages: Conversation,
        *,
        tools: Sequence[Any] | None = None,
        run_functions: bool = True,
        max_tool_calls: int | None = None,
        **parameters: Any,
    ) -> Request[ChatResult]:
        """A request that is in order but for its values. Raises RequestError."""
        check_names(parameters, ChatCompletionRequest)
        fields, parse = _fields(parameters)
        talk = [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]

        async def run(emit: Emit | None) -> ChatResult:
            await self.start()
            with translated():
                found = Tools(tools, run=run_functions)
                own = fields | {"messages": talk} | ({"tools": found.client} if found.client else {})
                return await self._runner.chat(own, found, max_tool_calls, parse, emit)

        return run

    def text_request(self, prompt: Prompt, **parameters: Any) -> Request[TextResult]:
        """The same for a continuation."""
        check_names(parameters, CompletionRequest)
        fields, parse = _fields(parameters)
        own = fields | {"prompt": prompt if isinstance(prompt, str) else [*prompt]}

        async def run(emit: Emit | None) -> TextResult:
            await self.start()
            with translated():
                return await self._runner.text(own, parse, emit)

        return run


async def _events(request: Request[Any]) -> AsyncIterator[StreamEvent]:
    events: asyncio.Queue[StreamEvent | None] = asyncio.Queue()
    task = asyncio.ensure_future(request(events.put_nowait))
    task.add_done_callback(lambda task: events.put_nowait(None))
    try:
        while (event := await events.get()) is not None:
            yield event
        yield Finished.of(await task)
    finally:
        task.cancel()


def _fields(parameters: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    given, parse = response_format(parameters.get("response_format"))
    fields = {name: value for name, value in parameters.items() if value is not None}
    return (fields if given is None else fields | {"response_format": given}), parse


def is_conversation(given: Any) -> bool:
    """One conversation, and no list of them. Raises RequestError for what is neither."""
    if isinstance(given, str):
        return True
    if not isinstance(given, Sequence):
        raise RequestError(f"Invalid value for 'messages': a text or a list is wanted, not {given!r:.80}.", "messages")
    return bool(given) and isinstance(given[0], Mapping)


def is_prompt(given: Any) -> bool:
    """One prompt, and no list of them. Raises RequestError for what is neither."""
    if isinstance(given, str):
        return True
    if not isinstance(given, Sequence):
        raise RequestError(f"Invalid value for 'prompt': a text or a list is wanted, not {given!r:.80}.", "prompt")
    return bool(given) and isinstance(given[0], int)
