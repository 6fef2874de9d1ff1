"""A replica of a model: a Ray Serve actor that owns an engine process, or several, and speaks for them.

It enlists its engines with the router over ZeroMQ, and reports their load to Serve's autoscaling. Requests and tokens
never pass here, and torch is loaded in the engine processes alone.
"""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Awaitable, Callable

import ray
from ray import serve

from oscine.checkpoint.hub import find_model, is_on_hub
from oscine.engine.process.client import EngineClient
from oscine.executor.start.parts import GROUP
from oscine.extensions.cluster.ray.names import router_address, router_of
from oscine.extensions.cluster.ray.weights import RayDirectory
from oscine.extensions.cluster.scaling.pool_load import report
from oscine.extensions.replicas.client.reports import Reports
from oscine.extensions.replicas.client.router import RouterClient
from oscine.extensions.replicas.spec.snapshot import STATE_OF_ENGINE, ReplicaReport
from oscine.extensions.replicas.weights import WeightPeers
from oscine.settings.config import EngineOptions, PeerOptions
from oscine.system.extensions import part
from oscine.types import EngineInfo, EngineStats, Role

_POLL_S = 0.05  # while a drain waits for the engine to become idle


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """One role of a model."""

    model: str  # its first name
    role: Role
    engines: tuple[EngineOptions, ...]  # whose `peers` are made here
    prefix_seed: str  # hex; equal in all engines of a cluster
    drain_s: float = 30.0  # that streams may go on here once the replica has to stop; then they move
    key: str = dataclasses.field(default="", repr=False)  # of the cluster
    wire_version: str = ""  # of its router: see Deployment
    share_experts: bool = False  # each engine has a part of them, and so they live and end together


class Replica:
    """Engines of a model, and what Serve and the router ask of them. The router sees each engine as a replica."""

    def __init__(self, options: ReplicaOptions, where: Callable[[], Awaitable[str]]) -> None:
        """`where`: see RouterClient."""
        self._options = options
        self._node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._draining = False
        self._reports = Reports()
        self._scaled = EngineStats()  # at the last call of record_autoscaling_stats
        peers = PeerOptions(
            host=self._node,
            key=options.key,
            kv_events=True,
            prefix_seed=options.prefix_seed,
            kv_transfer=options.role != "aggregated",
        )
        count, name = len(options.engines), serve.get_replica_context().replica_id.unique_id
        members = part(GROUP)(count).members if options.share_experts else [None] * count
        self._engines = {
            name if count == 1 else f"{name}.{i}": EngineClient(dataclasses.replace(one, peers=peers), member)
            for i, (one, member) in enumerate(zip(options.engines, members, strict=True))
        }
        self._router = RouterClient(where, key=options.key)
        self._peers: WeightPeers | None = None  # machines with the same weights, if these are of the hub
        self._following: list[asyncio.Task[None]] = []  # the changes of each engine
        self._enlisted: dict[str, asyncio.Task[None]] = {}  # as the router was told last

    async def start(self) -> None:
        """Returns when the engines are ready.

        Raises EngineError or ValueError, with the reason in one line, if one cannot start.
        """
        engines = self._engines.values()
        try:
            await self._fetch_weights()
            await asyncio.gather(*(engine.start() for engine in engines))
            await asyncio.gather(*(engine.wait_ready() for engine in engines))
        except BaseException:
            self._router.close()
            await self._stop_engines()
            await self._close_peers()
            raise
        self._following = [asyncio.create_task(self._follow(name)) for name in self._engines]

    async def _fetch_weights(self) -> None:
        """Before the engines start, which then find them in the cache of this machine."""
        model = self._options.engines[0].model
        if is_on_hub(model):
            stop = threading.Event()
            directory = RayDirectory(self._options.wire_version, stop)
            self._peers = WeightPeers(self._node, self._options.key, directory, stop)
            await asyncio.to_thread(find_model, model, self._peers)

    async def _close_peers(self) -> None:
        if self._peers is not None:
            await asyncio.to_thread(self._peers.close)

    async def _stop_engines(self) -> None:
        await asyncio.gather(*(engine.stop() for engine in self._engines.values()))

    async def _follow(self, name: str) -> None:
        while True:
            self._enlist(name)
            await self._engines[name].changed()

    def _enlist(self, name: str) -> None:
        """Tells the router where the engine is now and in which state."""
        earlier = self._enlisted.get(name)
        self._enlisted[name] = asyncio.create_task(self._router.enlist(name, self.report(name)))
        if earlier is not None:
            asyncio.get_running_loop().call_soon(earlier.cancel)  # after the new report has been sent

    def report(self, name: str) -> ReplicaReport:
        options, engine = self._options, self._engines[name]
        info = _info(engine)
        state = "draining" if self._draining else STATE_OF_ENGINE.get(engine.state, "lost")
        return ReplicaReport(options.model, options.role, self._node, state, info.endpoints, info)

    async def is_there(self) -> None:
        """Nothing more: see oscine.extensions.cluster.ray.router.Demand."""

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Gauges, and what the counters grew by since the call before: sums, so that they add up over replicas."""
        for name, engine in self._engines.items():
            self._reports.take(name, engine.stats)
        now, before = self._reports.total(), self._scaled
        self._scaled = now
        return report(now, before) | {
            "max_num_seqs": float(sum(_info(engine).max_num_seqs for engine in self._engines.values())),
            "held_back": float(self._router.queued.get(self._options.model, 0)),
            "held_back_s": time.time(),
        }

    async def check_health(self) -> None:
        for engine in self._engines.values():
            if engine.state == "failed":
                raise RuntimeError(f"the engine failed: {engine.error}")
        for task in (*self._following, *self._enlisted.values()):
            if task.done() and not self._draining:
                raise RuntimeError("the router does not hear of the replica") from task.exception()

    async def shutdown(self) -> None:
        """Lets streams end within drain_s seconds; what is left moves to another replica when the engines are gone."""
        self._draining = True
        if self._following:
            for name in self._engines:
                self._enlist(name)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.drain_s):
                while any(map(_is_busy, self._engines.values())):
                    await asyncio.sleep(_POLL_S)
        for task in (*self._following, *self._enlisted.values()):
            task.cancel()
        self._router.close()
        await self._stop_engines()
        await self._close_peers()


def _info(engine: EngineClient) -> EngineInfo:
    assert engine.info is not None
    return engine.info


def _is_busy(engine: EngineClient) -> bool:
    return engine.state == "ready" and bool(engine.stats.num_running + engine.stats.num_waiting)


class ReplicaActor(Replica):
    """The class behind the Serve deployments of a model: Serve awaits its beginning and its end."""

    async def __init__(self, options: ReplicaOptions, *companions: object) -> None:  # type: ignore[misc]
        """`companions`: the model's other roles, because an app is what its first deployment is bound to."""
        super().__init__(options, router_address(router_of(options.wire_version)))
        await self.start()

    async def __del__(self) -> None:
        await self.shutdown()
