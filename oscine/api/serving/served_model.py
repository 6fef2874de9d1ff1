"""One model of a server: its engine, names, vocabulary and running requests. All models by their names."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from oscine.api.common.asgi import Receive
from oscine.api.common.errors import unavailable
from oscine.api.common.keys import Caller
from oscine.api.common.record import current
from oscine.api.common.work import REQUESTS
from oscine.api.serving.admission import Admission
from oscine.api.serving.names import meant_by
from oscine.api.serving.prompt import Prompts
from oscine.api.serving.tokenizer import ServedTokenizer
from oscine.api.telemetry.metrics import Metrics
from oscine.chat.tokenizer import Tokenizer
from oscine.chat.vocabulary import tokenizer_folder
from oscine.engine.process.client import Engine, EngineDied
from oscine.engine.wire.stream import RequestStream
from oscine.settings.config import EngineOptions
from oscine.types import AdapterInfo, EngineInfo, GenerationRequest

ModelState = Literal["unloaded", "starting", "ready", "asleep", "restarting", "draining", "failed", "stopped"]
_LIVE_STATES = ("ready", "restarting")
ANY_NAME = "*"  # as a name of a model: requests may use any name
_FAREWELL_S = 1.0  # for cancelled requests to tell their clients


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """What an endpoint needs of a model that takes requests."""

    info: EngineInfo
    tokenizer: Tokenizer
    prompts: Prompts
    served: "ServedModel"
    adapter: str = ""  # AdapterInfo.identity, where requests name an adapter of the model


class ServedModel:
    """`start` returns when it is ready; requests that come before are refused with 503. `stop` comes last."""

    def __init__(
        self,
        engine: Engine,
        options: EngineOptions,
        names: Sequence[str],
        metrics: Metrics,
        *,
        cache_salt_by_key: bool = False,
    ) -> None:
        """`options`: of the engine; they give its vocabulary and the number of requests that it accepts.

        `names`: names of the model for clients; if empty, its own. `cache_salt_by_key`: API keys share no cached
        prefixes.
        """
        self.engine, self.options = engine, options
        self.root = _root(options)
        self.has_any_name = ANY_NAME in names
        self.names = tuple(name for name in names if name != ANY_NAME) or (self.root,)
        self.metrics = metrics.of_model(self.names[0])
        scheduler = options.scheduler
        self.admission = Admission(scheduler.max_num_seqs + scheduler.max_waiting, scheduler.max_queued_tokens)
        self.draining = False
        self.on_demand = False  # loaded when a request names it, and unloaded again
        self.cache_salt_by_key = cache_salt_by_key
        self._ready: ReadyModel | None = None  # once it has started
        self._failure: str | None = None  # why it did not
        self._live: set[str] = set()
        self._adapter_uses: Counter[str] = Counter()  # identity -> sequences of requests that are admitted
        self._leaving_adapters: set[str] = set()  # identities of those without a name

    async def start(self) -> EngineInfo:
        """Raises EngineError or ValueError, in one line, when the model cannot be served. May be tried again."""
        self._failure = None
        try:
            return await self._start()
        except Exception as error:
            self._failure = str(error) or type(error).__name__
            raise

    async def _start(self) -> EngineInfo:
        folder = await asyncio.to_thread(tokenizer_folder, self.options)  # errors here need no engine
        await self.engine.start()
        load = asyncio.to_thread(ServedTokenizer, folder)
        info, tokenizer = await asyncio.gather(self.engine.wait_ready(), load, return_exceptions=True)
        if isinstance(info, BaseException):
            raise info  # what the engine says is wrong with the model is the better message
        if isinstance(tokenizer, BaseException):
            raise tokenizer
        if tokenizer.max_prompt_id >= info.vocab_size:
            ids = f"ids up to {tokenizer.max_prompt_id}, and the model has only {info.vocab_size} tokens"
            raise ValueError(f"{tokenizer.path} is not the vocabulary of {info.model}: it has {ids}")
        self._ready = self._made_ready(info, tokenizer)
        self.admission.max_sequences = self.max_num_seqs + self.options.scheduler.max_waiting
        return info

    @property
    def max_num_seqs(self) -> int:
        """Sequences that run at once: of a ready engine as many as it has room for, of several engines the options'."""
        given, info = self.options.scheduler, self.engine.info
        return info.max_num_seqs if info is not None and "max_num_seqs" in given.by_memory else given.max_num_seqs

    def _made_ready(self, info: EngineInfo, tokenizer: Tokenizer) -> ReadyModel:
        prompts = Prompts(tokenizer, info.max_model_len, self.options.scheduler.max_queued_tokens)
        return ReadyModel(info, tokenizer, prompts, self)

    async def stop(self) -> None:
        await self.engine.stop()

    async def drain(self, within_s: float) -> None:
        """Refuses new requests, lets running ones finish in time, then cancels the rest."""
        self.draining = True
        try:
            async with asyncio.timeout(within_s):
                await self.admission.wait_empty()
        except TimeoutError:
            self.cancel_all()
            with suppress(TimeoutError):  # a client that does not read cannot be told
                async with asyncio.timeout(_FAREWELL_S):
                    await self.admission.wait_empty()

    def cancel_all(self) -> None:
        for request_id in self._live:
            self.engine.cancel(request_id)

    @property
    def state(self) -> ModelState:
        if self.draining:
            return "draining"
        if self._failure is not None:
            return "failed"
        if self._ready is None and self.engine.state in _LIVE_STATES:
            return "starting"
        return self.engine.state

    @property
    def error(self) -> str | None:
        """Why it could not be started, or why its engine last failed."""
        return self._failure or self.engine.error

    @property
    def is_served(self) -> bool:
        """Whether requests are taken: those of a model on demand wait for it."""
        return self.state == "ready" or (self.on_demand and not self.draining)

    def ready(self, threads: ThreadPoolExecutor = REQUESTS, name: str = "") -> ReadyModel:
        """The model, whose long prompts are made in `threads`. Raises APIError 503 unless requests can be served.

        `name`: as the request has it; it may be one of an adapter.
        """
        state = self.state
        if state == "asleep":
            raise unavailable("The model is asleep: POST /wake_up wakes it.", code=state)
        if state != "ready" or self._ready is None:
            reason = f": {self.error}" if self.error else ""
            raise unavailable(f"The server is {state}{reason}.", code=state)
        info = self.engine.info
        if info is not None and info.max_model_len != self._ready.info.max_model_len:  # a cluster was updated
            self._ready = self._made_ready(info, self._ready.tokenizer)
        adapter = self.adapter_of(name)
        identity = "" if adapter is None else adapter.identity
        return replace(self._ready, prompts=self._ready.prompts.using(threads), adapter=identity)

    def adapter_of(self, name: str) -> AdapterInfo | None:
        """The adapter that a request names, perhaps in Ollama's spelling."""
        there = {} if name in self.names else self.engine.adapters
        return there.get(name) or there.get(name.removesuffix(":latest"))

    async def load_adapter(self, name: str, path: str) -> None:
        """Raises ValueError, in one line, for one that cannot be loaded, and EngineDied."""
        info = await self.engine.load_adapter(name, path)
        self._leaving_adapters.discard(info.identity)

    async def replace_adapter(self, name: str, path: str) -> None:
        """Another adapter gets the name once it is loaded. Raises as load_adapter does; then nothing has changed."""
        identity = self.engine.adapters[name].identity
        info = await self.engine.load_adapter(name, path, in_place=True)
        self._leaving_adapters.discard(info.identity)
        if info.identity != identity:
            self._leaving_adapters.add(identity)
            self._drop_unused(identity)

    def unload_adapter(self, name: str) -> None:
        """Its name is free at once. Requests that have it go on; the engine drops it when they have ended.

        Raises KeyError, and ValueError in one line.
        """
        identity = self.engine.forget_adapter(name).identity
        self._leaving_adapters.add(identity)
        self._drop_unused(identity)

    def _drop_unused(self, identity: str) -> None:
        if identity in self._leaving_adapters and not self._adapter_uses[identity]:
            self._leaving_adapters.discard(identity)
            self.engine.drop_adapter(identity)

    @contextmanager
    def uses(self, identities: Sequence[str]) -> Iterator[None]:
        """While requests run that have these adapters; between their turns too."""
        self._adapter_uses.update(identities)
        try:
            yield
        finally:
            self._adapter_uses.subtract(identities)
            for identity in {*identities}:
                self._drop_unused(identity)

    @contextmanager
    def admit(self, requests: Sequence[GenerationRequest], caller: Caller) -> Iterator[None]:
        """A place for each sequence of one HTTP request, until the context ends.

        Raises APIError: 503 when there is none, 429 when its API key has used what it may. Choices of one prompt share
        their list of tokens; a key is charged for it once.
        """
        self.ready()
        lengths = [len(request.prompt_token_ids) for request in requests]
        prompts = {id(request.prompt_token_ids): length for request, length in zip(requests, lengths, strict=True)}
        with ExitStack() as held:
            held.enter_context(self.admission.hold(len(requests), sum(lengths)))
            if caller.key is not None:
                tokens = sum(prompts.values())
                held.enter_context(caller.key.hold(len(requests), tokens, in_batch=caller.in_batch))
            if adapters := [request.adapter for request in requests if request.adapter]:
                held.enter_context(self.uses(adapters))
            self.metrics.admitted(requests)
            yield

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Raises APIError 503 when the engine is gone. The stream must be closed, and then forgotten with `forget`."""
        record = current.get()
        if record is not None:
            record.sampling = record.sampling or request.sampling
        try:
            stream = self.engine.submit(request)
        except EngineDied as error:
            message = f"The engine is not available: {error}."
            raise unavailable(message, code="engine_unavailable", retry_after_s=error.retry_after_s) from None
        self._live.add(request.request_id)
        return stream

    def forget(self, stream: RequestStream) -> None:
        self._live.discard(stream.request_id)


def _root(options: EngineOptions) -> str:
    """The name of a model that was given no other."""
    model = options.model
    if model.random_shapes is not None:
        shapes, is_skewed = model.random_shapes
        name = f"random-{Path(shapes).stem}{'-skewed' if is_skewed else ''}"
    else:
        name = model.model
    return Path(name).resolve().name if Path(name).is_dir() else name


class ServedModels:
    """Models by their names. Those that leave have no names, and still have requests."""

    def __init__(self) -> None:
        self._by_name: dict[str, ServedModel] = {}
        self._leaving: set[ServedModel] = set()

    def add(self, model: ServedModel) -> None:
        """Raises ValueError for a name that another model has."""
        names = (*model.names, ANY_NAME) if model.has_any_name else model.names
        for name in names:
            if name in self._by_name:
                raise ValueError(f"there is a model {name!r} already")
        self._by_name |= dict.fromkeys(names, model)

    def let_go(self, model: ServedModel) -> None:
        """Frees the names of a model, which then leaves."""
        self._by_name = {name: other for name, other in self._by_name.items() if other is not model}
        self._leaving.add(model)

    def replace(self, old: ServedModel, new: ServedModel) -> None:
        """Raises ValueError as `add` does; then nothing is changed."""
        before = self._by_name
        self.let_go(old)
        try:
            self.add(new)
        except ValueError:
            self._by_name = before
            self._leaving.discard(old)
            raise

    def forget(self, model: ServedModel) -> None:
        """A model that leaves has no request any more."""
        self._leaving.discard(model)

    @property
    def models(self) -> list[ServedModel]:
        """In the order in which they came, without those that leave."""
        return list(dict.fromkeys(self._by_name.values()))

    @property
    def all(self) -> list[ServedModel]:
        return [*self.models, *self._leaving]

    @property
    def names(self) -> list[str]:
        """Of models, then of their adapters."""
        adapters = (name for model in self.models for name in model.engine.adapters)
        return list(dict.fromkeys([*(name for name in self._by_name if name != ANY_NAME), *adapters]))

    def _of_adapter(self, name: str) -> ServedModel | None:
        """The first model with such an adapter."""
        return next((model for model in self.models if model.adapter_of(name) is not None), None)

    @property
    def running(self) -> int:
        """The number of sequences that are admitted and not over."""
        return sum(model.admission.sequences for model in self.all)

    def cancel_all(self) -> None:
        for model in self.all:
            model.cancel_all()

    def find(self, name: str | None) -> ServedModel | None:
        """Without a name: the only model. Raises APIError 503 where there is no model yet."""
        known = self._by_name
        if name is not None:
            own = known.get(name) or self._of_adapter(name)
            return own or known.get(ANY_NAME) or known.get(meant_by(name, known) or "")
        models = self.models
        if not models:
            raise unavailable("The server has no model yet.", code="starting")
        return models[0] if len(models) == 1 else None


@dataclass(frozen=True, slots=True)
class PullProgress:
    """How far a download is."""

    status: str
    digest: str | None = None
    total: int = 0  # bytes
    completed: int = 0


class Demand(Protocol):
    """Loads models when requests name them: the extension models has one. It belongs to the server's event loop."""

    def use(self, model: ServedModel, receive: Receive | None) -> AbstractAsyncContextManager[None]:
        """The model is loaded, and stays, until the context ends.

        Raises APIError 503 if that takes too long or fails, and ClientLeftError if the client leaves meanwhile.
        """
        ...

    def keep(self, model: ServedModel, seconds: float) -> None:
        """How long the model stays after its last request; settings.models.FOREVER: until others need room."""
        ...

    def expires_at(self, model: ServedModel) -> float | None:
        """Seconds since 1970 of its end in memory, if no further request comes. None: it has none."""
        ...

    async def unload(self, model: ServedModel) -> None:
        """Takes the model out of memory once its requests have ended, also out of that of the host."""
        ...

    def pull(self, name: str) -> AsyncIterator[PullProgress]:
        """Downloads a model, which is served then. Raises APIError."""
        ...

    async def delete(self, model: ServedModel) -> None:
        """Unloads the model, removes its files, and serves it no longer. Raises APIError."""
        ...
