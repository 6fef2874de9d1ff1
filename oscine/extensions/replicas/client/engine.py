"""All replicas of one model as one engine."""

import asyncio
import logging
from collections.abc import Mapping

from oscine.engine.process.client import EngineState
from oscine.engine.wire.stream import EngineDied, EngineError, RequestStream
from oscine.extensions.replicas.client.dispatcher import LONGEST_RETRY_S, Dispatcher, MigrationLimits, retry_s
from oscine.extensions.replicas.client.prompt_digests import PromptDigests
from oscine.extensions.replicas.spec.placement import NoPlace, Placer
from oscine.types import AdapterInfo, EngineInfo, EngineStats, GenerationOutput, GenerationRequest

logger = logging.getLogger(__name__)

_REFRESH_S = 10.0  # between two looks at what is served: a rolling update may have changed it


class ClusterEngine:
    """Implements oscine.engine.process.client.Engine.

    Ready as soon as the model can be served, even where no replica runs just now. An engine that breaks, is full or
    goes away costs its streams a pause: they go on elsewhere from the tokens that they have.
    """

    def __init__(
        self,
        placer: Placer,
        model: str,
        *,
        prefix_seed: str = "",
        key: str = "",
        limits: MigrationLimits | None = None,
    ) -> None:
        """`model`: its name for the placer. `prefix_seed`, `key`: the same as those of its engines."""
        self.state: EngineState = "starting"
        self.error: str | None = None
        self.info: EngineInfo | None = None
        self._placer, self._model, self._digests = placer, model, PromptDigests(prefix_seed)
        limits = limits or MigrationLimits()
        self._dispatcher = Dispatcher(placer, model, self._digests, key=key, limits=limits, on_placed=self._note_placed)
        self.migrations = self._dispatcher.migrations
        self._discovering: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()  # set once the state is not "starting" any more

    @property
    def restarts(self) -> int:
        """Replicas that were lost."""
        return self._dispatcher.num_broken

    @property
    def gpus(self) -> tuple[str, ...]:
        """None: the replicas may be on other machines."""
        return ()

    @property
    def stats(self) -> EngineStats:
        """Of all replicas that this ingress has a link to, added up."""
        return self._dispatcher.reports.total()

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """Those that its engines loaded at their start."""
        there = () if self.info is None else self.info.adapters or ()
        return {adapter.name: adapter for adapter in there}

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> AdapterInfo:
        raise ValueError("the adapters of a cluster are in its deployment file: lora_modules of an engine")

    def forget_adapter(self, name: str) -> AdapterInfo:
        raise ValueError("the adapters of a cluster are in its deployment file: lora_modules of an engine")

    def drop_adapter(self, identity: str) -> None:
        pass

    async def start(self) -> None:
        self._dispatcher.open()
        self._discovering = asyncio.create_task(self._discover())

    async def stop(self) -> None:
        if self.state == "stopped":
            return
        self._end("stopped", "the engine was stopped")
        self._dispatcher.close()

    def give_up(self, error: str) -> None:
        """No engine will ever serve again."""
        if self.state not in ("stopped", "failed"):
            self._end("failed", error)

    def _end(self, state: EngineState, error: str) -> None:
        self._enter(state, error)
        if self._discovering is not None:
            self._discovering.cancel()
        self._dispatcher.fail_all(error)

    async def wait_ready(self) -> EngineInfo:
        await self._changed.wait()
        if self.info is None or self.state != "ready":
            raise EngineError(self.error)
        return self.info

    def submit(self, request: GenerationRequest) -> RequestStream:
        if self.state != "ready":
            raise EngineDied(self.error or "the cluster is starting")
        return self._dispatcher.submit(request)

    def cancel(self, request_id: str) -> None:
        live = self._dispatcher.abandon(request_id)
        if live is not None:
            live.stream.put(GenerationOutput(request_id, finish_reason="cancelled"))

    async def _discover(self) -> None:
        while True:
            await asyncio.sleep(await self._describe())

    async def _describe(self) -> float:
        """Returns the seconds until another look; until then what was known before is true enough."""
        try:
            info = await self._placer.describe(self._model)
        except NoPlace as no:
            if self.state == "starting":
                self.error = no.message
                return retry_s(no)
        except Exception:
            logger.exception("it is not known what %s is", self._model)
            if self.state == "starting":
                return LONGEST_RETRY_S
        else:
            self.info = info
            self._digests.reset(info.page_size)
            if self.state == "starting":
                self._enter("ready", None)
        return _REFRESH_S

    def _enter(self, state: EngineState, error: str | None) -> None:
        self.state, self.error = state, error
        self._changed.set()

    def _note_placed(self, error: str | None) -> None:
        self.error = error
