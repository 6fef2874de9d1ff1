"""An Oscine engine as a worker of NVIDIA Dynamo, behind its frontend, KV router and prefill router.

Implements Dynamo's contract of engines (dynamo.common.backend). Dynamo's Worker registers the model, serves the
endpoint, relays KV events and drains on SIGTERM. request.py converts requests. Needs the extra `dynamo`; only the
engine process loads torch.

A handoff: Dynamo sends a request to a prefill worker, which computes the prompt and answers with the address of its
engine. Then a decode worker gets the request. Its engine fetches the pages from that address, as in a cluster of
Oscine.
"""

import argparse
import asyncio
import logging
import os
import secrets
import signal
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import uvloop
from dynamo._core import Context
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, Worker, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot, ZmqSource
from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup, DynamoRuntimeConfig
from dynamo.common.constants import DisaggregationMode
from dynamo.common.utils.runtime import parse_endpoint
from dynamo.llm.exceptions import EngineShutdown, HttpError, InvalidArgument
from prometheus_client import CollectorRegistry

from oscine.api.common.errors import APIError
from oscine.api.telemetry.engine_metrics import EngineCollector
from oscine.chat.tokenizer import Tokenizer
from oscine.engine.process.client import EngineClient, EngineDied, EngineError, EngineOverloaded
from oscine.executor.start.parts import KV_EVENTS
from oscine.extensions.dynamo.options import DynamoOptions
from oscine.extensions.dynamo.request import Chunks, ModelFacts, generation_request, prefill_request
from oscine.settings.config import EngineOptions, PeerOptions
from oscine.system.extensions import is_there
from oscine.types import Endpoints, EngineStats, GenerationOutput, GenerationRequest, PrefillSource

logger = logging.getLogger(__name__)

_WATCH_S = 0.1  # between two checks of the engine's load and life
_RANK = 0  # of data parallelism: a worker is one engine
_MODES = {
    "aggregated": DisaggregationMode.AGGREGATED,
    "prefill": DisaggregationMode.PREFILL,
    "decode": DisaggregationMode.DECODE,
}


def run(options: DynamoOptions) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises ValueError for an option, and EngineError, in one line, when the engine cannot start or ends unasked.
    """
    engine = DynamoEngine(options)
    worker = Worker(engine, worker_config(options))
    try:
        uvloop.run(worker.run())
    except Exception as error:  # the runtime has no narrower one
        raise EngineError(str(error)) from error
    if engine.failure is not None:
        raise EngineError(engine.failure)


def worker_config(options: DynamoOptions) -> WorkerConfig:
    """The frontend renders and tokenizes prompts, so that its router can compare them, and parses harmony.

    Raises ValueError that names the option.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    DynamoRuntimeArgGroup().add_arguments(parser)
    try:
        runtime = DynamoRuntimeConfig.from_cli_args(parser.parse_args(options.runtime))
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    runtime.validate()
    runtime.dyn_reasoning_parser = runtime.dyn_reasoning_parser or "gpt_oss"
    runtime.dyn_tool_call_parser = runtime.dyn_tool_call_parser or "harmony"
    component = "prefill" if options.role == "prefill" else "backend"
    names = parse_endpoint(runtime.endpoint or f"dyn://{runtime.namespace}.{component}.generate")
    return WorkerConfig.from_runtime_config(
        runtime,
        model_name=str(options.folder),
        served_model_name=options.name,
        disaggregation_mode=_MODES[options.role],
        **dict(zip(("namespace", "component", "endpoint"), names, strict=True)),
    )


@dataclass(frozen=True, slots=True)
class _Measured:
    """The source of the metrics."""

    names: tuple[str, ...]
    engine: EngineClient
    options: EngineOptions


class DynamoEngine(LLMEngine):  # type: ignore[misc]  # untyped, and not installed where types are checked
    """The engine that Dynamo's Worker calls, on one event loop."""

    def __init__(self, options: DynamoOptions) -> None:
        alone = options.role == "aggregated"  # no other worker reaches it
        peers = PeerOptions(
            host=options.peer_host,
            key=options.key or (secrets.token_hex(32) if alone else ""),
            kv_events=options.engine.cache.prefix_caching and is_there(KV_EVENTS.name),
            kv_events_endpoint="tcp://*:*",  # on the loopback: Dynamo's relay on this machine has no keys
            kv_transfer=not alone,
        )
        self._options = options
        self._engine = EngineClient(replace(options.engine, peers=peers))
        self._model: ModelFacts  # once the engine is ready
        self._worker_id = ""
        self._requests: dict[str, str] = {}  # Dynamo's id of a live request -> the engine's
        self._publisher: Any = None  # publishes the load; made by Dynamo
        self._watching: asyncio.Task[None] | None = None
        self.failure: str | None = None  # why the engine ended unasked

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple["DynamoEngine", WorkerConfig]:
        # Required by Dynamo's contract; only its own launcher calls it, which is not used here.
        raise NotImplementedError("oscine.cli reads the command line; see run()")

    # ---- life ----

    async def start(self, worker_id: object) -> EngineConfig:
        self._worker_id = str(worker_id)
        await self._engine.start()
        try:
            info = await self._engine.wait_ready()
        except EngineError as error:
            raise EngineShutdown(str(error)) from None
        tokenizer = await asyncio.to_thread(Tokenizer, self._options.folder)
        self._model = ModelFacts(tokenizer, info.max_model_len, info.vocab_size)
        self._watching = asyncio.create_task(self._watch())
        shape = LlmRegistration(
            context_length=info.max_model_len,
            kv_cache_block_size=info.page_size,
            total_kv_blocks=self._engine.stats.full_pages_total or None,
            max_num_seqs=info.max_num_seqs,
            max_num_batched_tokens=info.max_num_batched_tokens,
        )
        return EngineConfig(model=str(self._options.folder), served_model_name=self._options.name, llm=shape)

    async def cleanup(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await self._engine.stop()

    async def is_quiescent(self) -> bool:
        """Whether no page is held, for a request or for another engine that fetches it."""
        stats = self._engine.stats
        return not (stats.num_running or stats.num_waiting or stats.full_pages_used or stats.sliding_pages_used)

    async def health_check_payload(self) -> dict[str, Any]:
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=self._model.tokenizer.start)
        return payload

    # ---- what the router reads ----

    async def kv_event_sources(self) -> list[ZmqSource]:
        endpoint = self._endpoints().kv_events
        if endpoint is None:
            return []
        return [ZmqSource(endpoint=endpoint, topic=PeerOptions().kv_events_topic, dp_rank=_RANK)]

    async def register_prometheus(self, metrics: Any) -> None:
        """Oscine's own metrics, beside Dynamo's on the worker's /metrics (DYN_SYSTEM_PORT)."""
        registry = CollectorRegistry()
        measured = _Measured((self._options.name,), self._engine, self._options.engine)
        registry.register(EngineCollector(lambda: [measured], transfers=self._options.role == "decode"))
        register_engine_registry(metrics, registry)

    def component_metrics_dp_ranks(self) -> list[int]:
        return [_RANK]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._publisher = publisher

    async def _watch(self) -> None:
        """Publishes the load as it changes. The worker ends with its engine, since a router's picture of its cache is
        void then."""
        published: EngineStats | None = None
        while self._engine.state == "ready":
            if self._publisher is not None and self._engine.stats is not published:
                published = self._engine.stats
                self._publisher.publish(_RANK, _load(published))
            await asyncio.sleep(_WATCH_S)
        self.failure = self._engine.error or "the engine ended"
        logger.error("the worker ends: %s", self.failure)
        os.kill(os.getpid(), signal.SIGTERM)  # Dynamo's way to stop: it takes the worker out of discovery first
        await self._engine.stop()

    # ---- requests ----

    async def generate(self, asked: dict[str, Any], context: Context) -> AsyncIterator[dict[str, Any]]:
        """Raises Dynamo's exceptions: InvalidArgument is the client's fault, EngineShutdown lets a request migrate."""
        try:
            request = await generation_request(asked, uuid.uuid4().hex, self._model)
        except APIError as error:
            raise InvalidArgument(error.message) from None
        chunks = Chunks(len(request.prompt_token_ids))
        self._requests[context.id()] = request.request_id
        try:
            async with self._engine.submit(self._placed(request, asked)) as stream:
                async for outputs in stream:
                    for output in outputs:
                        yield self._chunk(chunks, output)
        except EngineOverloaded as error:
            raise HttpError(503, str(error)) from None  # any other exception takes the worker out of routing
        except EngineDied as error:
            raise EngineShutdown(str(error)) from None
        finally:
            self._requests.pop(context.id(), None)

    async def abort(self, context: Context) -> None:
        """Cancels a request after its client has left. The frontend also does this at a stop string."""
        request_id = self._requests.get(context.id())
        if request_id is not None:
            self._engine.cancel(request_id)

    def _placed(self, request: GenerationRequest, asked: dict[str, Any]) -> GenerationRequest:
        """The request as this role runs it."""
        if self._options.role == "prefill":
            return prefill_request(request)
        source = (asked.get("prefill_result") or {}).get("disaggregated_params")
        if self._options.role != "decode" or source is None:  # without a prefill worker the frontend decodes alone
            return request
        least, timeout_s = self._options.prefill_min_tokens, self._options.prefill_timeout_s
        return replace(request, prefill=PrefillSource(source["replica"], source["address"], least, timeout_s))

    def _chunk(self, chunks: Chunks, output: GenerationOutput) -> dict[str, Any]:
        if output.finish_reason == "error":
            # A failed engine sets `error` before it fails its requests. Without it the request itself is at fault.
            raise EngineShutdown(self._engine.error) if self._engine.error else InvalidArgument(output.error)
        if self._options.role == "prefill" and output.finish_reason in ("stop", "length"):
            return chunks.handoff(output, {"replica": self._worker_id, "address": self._endpoints().requests})
        return chunks.chunk(output)

    def _endpoints(self) -> Endpoints:
        assert self._engine.info is not None
        assert self._engine.info.endpoints is not None
        return self._engine.info.endpoints


def _load(stats: EngineStats) -> ComponentSnapshot:
    """In full-attention pages, which are what the router counts a prompt in. Windows take the memory of some."""
    total = stats.full_pages_total
    return ComponentSnapshot(
        kv_used_blocks=round(stats.kv_usage * total),
        kv_total_blocks=total,
        gpu_cache_usage=stats.kv_usage,
        kv_cache_hit_rate=stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else None,
        dp_rank=_RANK,
    )
