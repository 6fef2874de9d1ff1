"""What all endpoints share: the engine, the tokenizer, the names of the model, and who may be served now.

Knows no HTTP and no wire format.
"""

import asyncio
import datetime
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from oscine.api.engine_metrics import EngineCollector
from oscine.api.errors import APIError, unavailable
from oscine.api.keys import ApiKeys
from oscine.api.limits import Admission, Bodies
from oscine.api.metrics import Metrics
from oscine.api.prompt import Prompts
from oscine.api.reasoning_memory import ReasoningMemory
from oscine.api.record import current
from oscine.api.response_service import ResponseService
from oscine.api.tracing import Tracing
from oscine.api.vocabulary import tokenizer_folder
from oscine.chat.tokenizer import Tokenizer
from oscine.config import Config
from oscine.engine.client import Engine, EngineDied
from oscine.engine.stream import RequestStream
from oscine.tools.builtin import BuiltinTools
from oscine.types import EngineInfo, GenerationRequest

_LIVE_STATES = ("ready", "restarting")
_FAREWELL_S = 1.0  # for cancelled requests to tell their clients


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """What an endpoint needs of a model that takes requests."""

    info: EngineInfo
    tokenizer: Tokenizer
    prompts: Prompts


class Service:
    """One served model. `start` returns when it is ready; endpoints may be called before and are refused with 503.

    Raises ValueError, in one line, for a file of keys or for traces that cannot be had.
    """

    def __init__(self, config: Config, engine: Engine) -> None:
        self.config = config
        self.engine = engine
        options = config.engine.model
        model = f"random-{Path(options.random_weights).stem}" if options.random_weights else options.model
        self.model = Path(model).resolve().name if Path(model).is_dir() else model
        self.names = config.server.served_model_names or (self.model,)
        self.metrics = Metrics(self.names[0])
        self.metrics.watch_engine(EngineCollector(engine, config.engine, self.names[0]))
        self.keys = ApiKeys(config.server)
        self.tracing = Tracing(config.server.traces) if config.server.traces else None
        scheduler = config.engine.scheduler
        self.admission = Admission(scheduler.max_num_seqs + scheduler.max_waiting, scheduler.max_queued_tokens)
        self.reasoning = ReasoningMemory()
        self.responses = ResponseService(config.server)
        self.tools = BuiltinTools(config.tools)
        self.bodies = Bodies()
        self.draining = False
        self.started = int(time.time())
        self._tokenizer: Tokenizer | None = None
        self._prompts: Prompts | None = None
        self._live: set[str] = set()

    async def start(self) -> EngineInfo:
        """Raises EngineError or ValueError, in one line, when the model cannot be served."""
        await self.responses.start()
        await self.tools.start()
        await self.engine.start()
        load = asyncio.to_thread(lambda: Tokenizer(tokenizer_folder(self.config.engine)))
        info, tokenizer = await asyncio.gather(self.engine.wait_ready(), load, return_exceptions=True)
        if isinstance(info, BaseException):
            raise info  # what the engine says is wrong with the model is the better message
        if isinstance(tokenizer, BaseException):
            raise tokenizer
        if tokenizer.max_prompt_id >= info.vocab_size:
            ids = f"ids up to {tokenizer.max_prompt_id}, and the model has only {info.vocab_size} tokens"
            raise ValueError(f"{tokenizer.path} is not the vocabulary of {info.model}: it has {ids}")
        self._tokenizer = tokenizer
        self._prompts = Prompts(tokenizer, info.max_model_len, self.config.engine.scheduler.max_queued_tokens)
        return info

    async def stop(self) -> None:
        await self.responses.stop()
        await self.engine.stop()
        await self.tools.stop()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.stop)

    async def drain(self) -> None:
        """Refuses new requests, lets those that run finish within drain_s seconds, then cancels what is left."""
        self.draining = True
        try:
            async with asyncio.timeout(self.config.server.drain_s):
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
    def uptime_s(self) -> float:
        return time.time() - self.started

    @property
    def state(self) -> str:
        """starting, ready, restarting, draining, failed or stopped."""
        if self.draining:
            return "draining"
        if self._tokenizer is None and self.engine.state in _LIVE_STATES:
            return "starting"
        return self.engine.state

    @property
    def date(self) -> str:
        """What the model is told; the same all day, so that prompts keep their common prefix."""
        return self.config.server.date or datetime.datetime.now(datetime.UTC).date().isoformat()

    def served_name(self, name: str | None) -> str:
        """The name to answer with. Raises APIError 404 for a name that is not served."""
        record = current.get()
        if record is not None:
            record.model = name or self.names[0]
        if name is None:
            return self.names[0]
        if name not in self.names:
            raise APIError(
                f"The model '{name}' does not exist; this server has {', '.join(self.names)}.",
                status=404,
                param="model",
                code="model_not_found",
            )
        return name

    def ready(self) -> ReadyModel:
        """Raises APIError 503 unless requests can be served now."""
        state = self.state
        info = self.engine.info
        if state != "ready" or self._tokenizer is None or self._prompts is None or info is None:
            reason = f": {self.engine.error}" if self.engine.error else ""
            raise unavailable(f"The server is {state}{reason}.", code=state)
        return ReadyModel(info, self._tokenizer, self._prompts)

    @contextmanager
    def admit(self, requests: Sequence[GenerationRequest]) -> Iterator[None]:
        """A place for each sequence of one HTTP request, until the context ends.

        Raises APIError: 503 when there is none, 429 when its API key has used what it may. Choices of one prompt share
        their list of tokens; a key is charged for it once.
        """
        self.ready()
        lengths = [len(request.prompt_token_ids) for request in requests]
        prompts = {id(request.prompt_token_ids): length for request, length in zip(requests, lengths, strict=True)}
        record = current.get()
        with ExitStack() as held:
            held.enter_context(self.admission.hold(len(requests), sum(lengths)))
            if record is not None and record.key is not None:
                held.enter_context(record.key.hold(len(requests), sum(prompts.values())))
            self.metrics.admitted(requests)
            yield

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Raises APIError 503 when the engine is gone. The stream must be closed, and then forgotten with `forget`."""
        record = current.get()
        if record is not None:
            record.sampling = record.sampling or request.sampling
            if record.key is not None:
                request = replace(request, priority=record.key.bounded_priority(request.priority))
        try:
            stream = self.engine.submit(request)
        except EngineDied as error:
            raise unavailable(f"The engine is not available: {error}.", code="engine_unavailable") from None
        self._live.add(request.request_id)
        return stream

    def forget(self, stream: RequestStream) -> None:
        self._live.discard(stream.request_id)
