"""A replica of a model: a Ray Serve actor that owns an engine process, and speaks for it.

Knows the life of one engine, and what Serve asks of a replica. Must not know who places requests, nor how; tokens never
pass here, and torch is loaded in the engine process alone.
"""

import asyncio
import contextlib
import dataclasses
import os
import time
from typing import Any

import ray
from ray import serve

from oscine.cluster.scaling.pool_load import report
from oscine.cluster.spec.placement import Accepted, Placement
from oscine.cluster.spec.snapshot import ReplicaState
from oscine.config import EngineOptions, PeerOptions
from oscine.engine.process.client import EngineClient
from oscine.types import Endpoints, EngineInfo, EngineStats, Role

_POLL_S = 0.05  # while a drain waits for the engine to become idle
_STATES: dict[str, ReplicaState] = {"starting": "starting", "ready": "ready", "restarting": "starting"}


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """One role of a model."""

    model: str  # its first name
    role: Role
    engine: EngineOptions  # whose `peers` are made here
    prefix_seed: str  # hex; equal in all engines of a cluster
    num_threads: int | None = None  # of the engine process; None: as many as it likes
    drain_s: float = 30.0  # that streams may go on here once the replica has to stop; then they move
    key: str = dataclasses.field(default="", repr=False)  # of the cluster


def peer_options(options: ReplicaOptions, host: str) -> PeerOptions:
    transfers = options.role != "aggregated"
    seed, key = options.prefix_seed, options.key
    return PeerOptions(host=host, key=key, kv_events=True, prefix_seed=seed, kv_transfer=transfers)


class Replica:
    """One engine of a model, and what Serve and the router ask of it."""

    def __init__(self, options: ReplicaOptions) -> None:
        self._options = options
        self._name = serve.get_replica_context().replica_id.unique_id
        self._node = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._draining = False
        self._scaled = EngineStats()  # at the last call of record_autoscaling_stats
        self._held_back, self._held_back_s = 0, 0.0  # requests at the router, as of the last one that came; Unix time
        peers = peer_options(options, self._node)
        self._engine = EngineClient(dataclasses.replace(options.engine, peers=peers))

    async def start(self) -> None:
        """Returns when the engine is ready. Raises EngineError, with the reason in one line, when it cannot start."""
        if self._options.num_threads is not None:
            os.environ["OMP_NUM_THREADS"] = str(self._options.num_threads)
        await self._engine.start()
        try:
            await self._engine.wait_ready()
        except BaseException:
            await self._engine.stop()
            raise

    @property
    def _state(self) -> ReplicaState:
        return "draining" if self._draining else _STATES.get(self._engine.state, "lost")

    async def admit(self, placement: object) -> Accepted | None:
        """Where the engine takes the request; None while it takes none. The router has chosen by `placement`."""
        if isinstance(placement, Placement):
            self._held_back, self._held_back_s = placement.held_back, time.time()
        if self._state != "ready":
            return None
        return Accepted(self._name, self._endpoints())

    def _endpoints(self) -> Endpoints:
        """Of the engine's present life: one that is started again listens elsewhere."""
        endpoints = self._info().endpoints
        assert endpoints is not None
        return endpoints

    def _info(self) -> EngineInfo:
        info = self._engine.info
        assert info is not None
        return info

    async def record_routing_stats(self) -> dict[str, Any]:
        return {
            "replica": self._name,
            "model": self._options.model,
            "role": self._options.role,
            "node": self._node,
            "state": self._state,
            "endpoints": dataclasses.asdict(self._endpoints()),
            "info": dataclasses.asdict(self._info()),
        }

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Gauges, and what the counters grew by since the call before: sums, so that they add up over replicas."""
        now, before = self._engine.stats, self._scaled
        self._scaled = now
        return report(now, before) | {
            "max_num_seqs": float(self._info().max_num_seqs),
            "held_back": float(self._held_back),
            "held_back_s": self._held_back_s,
        }

    async def check_health(self) -> None:
        if self._engine.state == "failed":
            raise RuntimeError(f"the engine failed: {self._engine.error}")

    async def shutdown(self) -> None:
        """Lets streams end within drain_s seconds; what is left moves to another replica when the engine is gone."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.drain_s):
                while self._busy():
                    await asyncio.sleep(_POLL_S)
        await self._engine.stop()

    def _busy(self) -> bool:
        stats = self._engine.stats
        return self._engine.state == "ready" and stats.num_running + stats.num_waiting > 0


class ReplicaActor(Replica):
    """The class behind the Serve deployments of a model: Serve awaits its beginning and its end."""

    async def __init__(self, options: ReplicaOptions, *companions: object) -> None:  # type: ignore[misc]
        """`companions`: the model's other roles, because an app is what its first deployment is bound to."""
        super().__init__(options)
        await self.start()

    async def __del__(self) -> None:
        await self.shutdown()
