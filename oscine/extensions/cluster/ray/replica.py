"""A replica of a model: a Ray Serve actor that owns an engine process, and speaks for it.

It enlists its engine with the router over ZeroMQ, and reports its load to Serve's autoscaling. Requests and tokens
never pass here, and torch is loaded in the engine process alone.
"""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable

import ray
from ray import serve

from oscine.engine.process.client import EngineClient
from oscine.extensions.cluster.ray.names import router_address
from oscine.extensions.cluster.scaling.pool_load import report
from oscine.extensions.replicas.client.router import RouterClient
from oscine.extensions.replicas.spec.snapshot import STATE_OF_ENGINE, ReplicaReport
from oscine.settings.config import EngineOptions, PeerOptions
from oscine.types import EngineInfo, EngineStats, Role

_POLL_S = 0.05  # while a drain waits for the engine to become idle


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """One role of a model."""

    model: str  # its first name
    role: Role
    engine: EngineOptions  # whose `peers` are made here
    prefix_seed: str  # hex; equal in all engines of a cluster
    drain_s: float = 30.0  # that streams may go on here once the replica has to stop; then they move
    key: str = dataclasses.field(default="", repr=False)  # of the cluster


class Replica:
    """One engine of a model, and what Serve and the router ask of it."""

    def __init__(self, options: ReplicaOptions, where: Callable[[], Awaitable[str]]) -> None:
        """`where`: see RouterClient."""
        self._options = options
        self._name = serve.get_replica_context().replica_id.unique_id
        self._node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._draining = False
        self._scaled = EngineStats()  # at the last call of record_autoscaling_stats
        peers = PeerOptions(
            host=self._node,
            key=options.key,
            kv_events=True,
            prefix_seed=options.prefix_seed,
            kv_transfer=options.role != "aggregated",
        )
        self._engine = EngineClient(dataclasses.replace(options.engine, peers=peers))
        self._router = RouterClient(where, key=options.key)
        self._following: asyncio.Task[None] | None = None  # the changes of the engine
        self._enlisted: asyncio.Task[None] | None = None  # as the router was told last

    async def start(self) -> None:
        """Returns when the engine is ready. Raises EngineError, with the reason in one line, when it cannot start."""
        await self._engine.start()
        try:
            await self._engine.wait_ready()
        except BaseException:
            self._router.close()
            await self._engine.stop()
            raise
        self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            self._enlist()
            await self._engine.changed()

    def _enlist(self) -> None:
        """Tells the router where the engine is now and in which state."""
        earlier = self._enlisted
        self._enlisted = asyncio.create_task(self._router.enlist(self._name, self.report()))
        if earlier is not None:
            asyncio.get_running_loop().call_soon(earlier.cancel)  # after the new report has been sent

    def report(self) -> ReplicaReport:
        options, info = self._options, self._info()
        state = "draining" if self._draining else STATE_OF_ENGINE.get(self._engine.state, "lost")
        return ReplicaReport(options.model, options.role, self._node, state, info.endpoints, info)

    def _info(self) -> EngineInfo:
        info = self._engine.info
        assert info is not None
        return info

    async def is_there(self) -> None:
        """Nothing more: see oscine.extensions.cluster.ray.router.Demand."""

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Gauges, and what the counters grew by since the call before: sums, so that they add up over replicas."""
        now, before = self._engine.stats, self._scaled
        self._scaled = now
        return report(now, before) | {
            "max_num_seqs": float(self._info().max_num_seqs),
            "held_back": float(self._router.queued.get(self._options.model, 0)),
            "held_back_s": time.time(),
        }

    async def check_health(self) -> None:
        if self._engine.state == "failed":
            raise RuntimeError(f"the engine failed: {self._engine.error}")
        for task in (self._following, self._enlisted):
            if task is not None and task.done() and not self._draining:
                raise RuntimeError("the router does not hear of the replica") from task.exception()

    async def shutdown(self) -> None:
        """Lets streams end within drain_s seconds; what is left moves to another replica when the engine is gone."""
        self._draining = True
        if self._following is not None:
            self._enlist()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.drain_s):
                while self._engine.state == "ready" and self._engine.stats.num_running + self._engine.stats.num_waiting:
                    await asyncio.sleep(_POLL_S)
        for task in (self._following, self._enlisted):
            if task is not None:
                task.cancel()
        self._router.close()
        await self._engine.stop()


class ReplicaActor(Replica):
    """The class behind the Serve deployments of a model: Serve awaits its beginning and its end."""

    async def __init__(self, options: ReplicaOptions, *companions: object) -> None:  # type: ignore[misc]
        """`companions`: the model's other roles, because an app is what its first deployment is bound to."""
        super().__init__(options, router_address())
        await self.start()

    async def __del__(self) -> None:
        await self.shutdown()
