"""The Serve deployment "ingress": the API server over engines that are clusters.

The server has a thread and an event loop of its own, so nothing of Ray runs between a token and its client.
"""

import asyncio
import contextlib
import logging
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import ray
from ray.serve.handle import DeploymentHandle

from oscine.api.apis import make_service
from oscine.api.server import Server, ServerError
from oscine.api.telemetry.logs import start_logging
from oscine.extensions.cluster.ray.names import router_address
from oscine.extensions.replicas.client.dispatcher import MigrationCounters, MigrationLimits
from oscine.extensions.replicas.client.engine import ClusterEngine
from oscine.extensions.replicas.client.followed_models import FollowedModels
from oscine.extensions.replicas.client.metrics import ClusterMetrics
from oscine.extensions.replicas.client.router import RouterClient
from oscine.extensions.replicas.spec.deployment import ModelSpec
from oscine.extensions.replicas.standby import StandbyRouter
from oscine.settings.config import Config, ServerOptions, ToolOptions
from oscine.system.environment import Environment

logger = logging.getLogger(__name__)

T = TypeVar("T")
_POLL_S = 0.02
_CONNECT_S = 5.0  # to the port, where another ingress may serve it


class Ingress:
    """The class behind the Serve deployment; ready once it listens, even if no model is."""

    def __init__(self, server: ServerOptions, tools: ToolOptions, key: str, router: DeploymentHandle[Any]) -> None:
        """`key`: the cluster's. Raises ServerError when it cannot listen."""
        start_logging(server.log_level, server.log_format)
        config = Config(server=replace(server, traces=Environment().traces), tools=tools)
        self._standby = StandbyRouter(key)
        self._placer = RouterClient(router_address(lambda: router), key=key, substitute=self._standby)
        self._service = make_service(config)
        metrics = ClusterMetrics(self._placer.snapshot, self._migrations, self._standby)
        self._service.metrics.watch(metrics, metrics.refresh)
        self._server = Server(config, self._service, reuse_port=True, before_listening=self._before_listening)
        self._anywhere = server.host in ("0.0.0.0", "::")
        self._prefix_seed, self._key = "", key
        self._models = FollowedModels(self._service)
        self._first: list[ModelSpec] = []  # the models at the start
        self._listen_within_s = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None  # of the server, once it runs
        self._error: str | None = None  # why it does not any more
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
                self._loop = runner.get_loop()
                runner.run(self._serve())
        except Exception as error:
            if not isinstance(error, ServerError):
                logger.exception("the server has ended")
            self._error = str(error) or type(error).__name__

    async def _serve(self) -> None:
        try:
            self._placer.watch()
            await self._server.run_service(lambda info: None)
        finally:
            self._placer.close()
            await self._standby.close()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """The models now. Returns once the server listens; models start, and are replaced, after that.

        `listen_within_s` of `user_config`: where other ingresses have the port, a new one leaves the clients to them
        until its models are ready, up to this time. Raises ServerError when the server ends before it listens.
        """
        models, self._prefix_seed = msgspec.convert(user_config["models"], list[ModelSpec]), user_config["prefix_seed"]
        if self._loop is not None:
            await self._in_server(lambda: self._follow(models))
            return
        self._first, self._listen_within_s = models, user_config["listen_within_s"]
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            await asyncio.sleep(_POLL_S)
        if not self._server.started:
            raise ServerError(self._error or "the server was stopped before it listened")

    def _follow(self, models: list[ModelSpec]) -> None:
        self._standby.reconfigure(models)
        self._models.update(models, self._engine, self._prefix_seed)

    async def _before_listening(self) -> None:
        self._follow(self._first)
        if not self._listen_within_s or not await _is_served(self._server.listener):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._listen_within_s):
                while self._models.pending:
                    await asyncio.sleep(_POLL_S)

    async def _in_server(self, call: Callable[[], T]) -> T:
        """Calls it on the server's event loop."""

        async def called() -> T:
            return call()

        assert self._loop is not None
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(called(), self._loop))

    async def pending(self) -> list[str]:
        """Models that are not yet as `reconfigure` was told."""
        return await self._in_server(lambda: self._models.pending)

    def _engine(self, model: ModelSpec) -> ClusterEngine:
        limits = MigrationLimits(max_losses=model.migration_retries)
        return ClusterEngine(self._placer, model.name, prefix_seed=self._prefix_seed, key=self._key, limits=limits)

    async def secrets(self) -> tuple[str, str]:
        """The prefix seed and the key, for `oscine cluster up`. Both stay the same as long as the cluster runs."""
        return self._prefix_seed, self._key

    def _migrations(self) -> dict[str, MigrationCounters]:
        engines = self._models.engines.items()
        return {name: engine.migrations for name, engine in engines if isinstance(engine, ClusterEngine)}

    async def url(self) -> str:
        """Where it listens; the address of its machine, if that is any."""
        node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        url = self._server.url
        return re.sub(r"//.*:", f"//{node}:", url) if self._anywhere else url

    async def check_health(self) -> None:
        """Also that the server's loop goes round: Serve waits for the answer, and not for long."""
        if not self._thread.is_alive():
            raise RuntimeError(f"the server has ended: {self._error}")
        await self._in_server(lambda: None)

    async def __del__(self) -> None:  # Serve's call before it ends the actor
        """Refuses new requests, and lets those that run end within drain_s seconds."""
        if self._loop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._server.request_stop)
            await asyncio.to_thread(self._thread.join)


async def _is_served(address: socket.socket) -> bool:
    """Whether another socket of this machine listens where this one, which does not, is bound."""
    host, port = address.getsockname()[:2]
    try:
        async with asyncio.timeout(_CONNECT_S):
            _, writer = await asyncio.open_connection(host, port)  # 0.0.0.0 and :: are this machine
    except OSError:  # as TimeoutError is
        return False
    writer.close()
    return True
