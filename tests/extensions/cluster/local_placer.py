"""The engines of a machine, placed by count instead of by policy, so that a test knows which has which request."""

import asyncio
import os
import secrets
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from oscine.engine.process.client import EngineClient
from oscine.extensions.replicas.client.dispatcher import MigrationLimits
from oscine.extensions.replicas.client.engine import ClusterEngine
from oscine.extensions.replicas.spec.placement import NoPlace, Place, Placement
from oscine.settings.config import EngineOptions, PeerOptions
from oscine.types import EngineInfo

SEED = "5eed"
RETRY_S = 0.25


class ScriptedPlacer:
    """Implements Placer: `answer` says where each request goes; what it was asked is kept."""

    def __init__(self, answer: Callable[[Placement], Place]) -> None:
        self.answer = answer
        self.asked: list[Placement] = []

    async def place(self, placement: Placement) -> Place:
        self.asked.append(placement)
        return self.answer(placement)

    async def describe(self, model: str) -> EngineInfo:
        return EngineInfo(model, max_model_len=4096, vocab_size=320, ready_s=0.1, page_size=64, max_num_seqs=64)


def guest(address: str, key: str = "") -> ClusterEngine:
    """A client, as an ingress has it, of the engine that listens there. Its requests fail with that engine, soon."""
    placer = ScriptedPlacer(lambda _: Place("engine", address, None, 0, 0.0))
    return ClusterEngine(placer, "model", key=key, limits=MigrationLimits(max_losses=0, timeout_s=1.0))


class Fleet:
    """Implements Placer over engines of this machine: the one with the fewest requests. Refusals come at once.

    It knows at once which it killed; those that end otherwise, as a router does, when their connections break.
    """

    def __init__(self, options: list[EngineOptions]) -> None:
        self.seed = SEED
        peers = PeerOptions(host="127.0.0.1", key=secrets.token_hex(32), prefix_seed=SEED)
        self.engines = {str(i): EngineClient(replace(one, peers=peers)) for i, one in enumerate(options)}
        self.placed: Counter[str] = Counter()
        self.where: dict[str, list[str]] = {}  # request id -> replicas, in order
        self._killed: set[int] = set()  # processes

    async def start(self) -> None:
        await asyncio.gather(*(engine.start() for engine in self.engines.values()))

    async def stop(self) -> None:
        await asyncio.gather(*(engine.stop() for engine in self.engines.values()))

    async def place(self, placement: Placement) -> Place:
        ready = [
            name for name, engine in self.engines.items() if engine.state == "ready" and not self._is_killed(engine)
        ]
        free = [name for name in ready if name not in placement.exclude]
        if not free:
            raise NoPlace("nobody has room", retry_after_s=RETRY_S, overloaded=bool(ready))
        name = min(free, key=self.placed.__getitem__)
        self.placed[name] += 1
        self.where.setdefault(placement.request_id, []).append(name)
        return Place(name, self.address(name), None, 0, 0.0)

    def address(self, name: str) -> str:
        return self.engines[name].address

    async def describe(self, model: str) -> EngineInfo:
        for engine in self.engines.values():
            if engine.info is not None:
                return engine.info
        raise NoPlace(f"{model} is loading", retry_after_s=0.1, overloaded=False)

    async def wait_ready(self) -> None:
        """All of them, those that were killed too."""
        while any(map(self._is_killed, self.engines.values())):
            await asyncio.sleep(0.01)
        await asyncio.gather(*(engine.wait_ready() for engine in self.engines.values()))

    def kill(self, name: str) -> None:
        pid = self.engines[name].pid
        assert pid is not None
        self._killed.add(pid)
        os.kill(pid, signal.SIGKILL)

    def _is_killed(self, engine: EngineClient) -> bool:
        return engine.pid in self._killed

    @property
    def running(self) -> int:
        stats = [engine.stats for engine in self.engines.values()]
        return sum(one.num_running + one.num_waiting for one in stats)

    @property
    def pages_held(self) -> int:
        return sum(engine.stats.full_pages_used for engine in self.engines.values())


@asynccontextmanager
async def clustered(
    *options: EngineOptions, limits: MigrationLimits | None = None
) -> AsyncIterator[tuple[Fleet, ClusterEngine]]:
    """Engines with these options, ready, and all of them as one."""
    async with AsyncExitStack() as stack:
        fleet = Fleet(list(options))
        stack.push_async_callback(fleet.stop)
        await fleet.start()
        await fleet.wait_ready()
        cluster = ClusterEngine(fleet, "model", prefix_seed=fleet.seed, limits=limits)
        stack.push_async_callback(cluster.stop)
        await cluster.start()
        await cluster.wait_ready()
        yield fleet, cluster
