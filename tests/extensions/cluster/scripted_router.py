"""A router that answers as a test says, behind a real RouterService."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

from oscine.extensions.replicas.routing.service import RouterService
from oscine.extensions.replicas.spec.placement import NoPlace, Place, Placement
from oscine.extensions.replicas.spec.snapshot import ClusterSnapshot, ReplicaReport, ReplicaSnapshot, RouterCounters
from oscine.types import Endpoints, EngineInfo, EngineStats, PrefillSource

PLACEMENT = Placement("r", "model", [b"x" * 16, bytes(16)], 3, 5, tenant="t", moved=True, exclude=["b"])
PLACE = Place("a", "tcp://127.0.0.1:1", PrefillSource("p", "tcp://[::1]:2", 64, 2.0), 64, 0.5)
INFO = EngineInfo(
    "model",
    4096,
    320,
    page_size=64,
    max_num_seqs=64,
    ready_s=0.5,
    endpoints=Endpoints("tcp://127.0.0.1:1", None, "tcp://127.0.0.1:3"),
)
SNAPSHOT = ClusterSnapshot(
    1.0,
    [ReplicaSnapshot("a", "model", "decode", "node", "lost", EngineStats(num_running=2, requests=5), itl_s=0.25)],
    [RouterCounters("model", placed=7, queue_s=0.5)],
    {"model": 3},
)


class ScriptedRouter:
    """Stands in for a Router. A request with an event waits for it; `error` is raised, if there is one."""

    def __init__(self) -> None:
        self.asked: list[Placement] = []
        self.cancelled: list[str] = []  # ids of requests
        self.gates: dict[str, asyncio.Event] = {}
        self.error: Exception | None = None
        self.replicas: dict[str, ReplicaReport] = {}

    async def place(self, placement: Placement) -> Place:
        self.asked.append(placement)
        try:
            if placement.request_id in self.gates:
                await self.gates[placement.request_id].wait()
        except asyncio.CancelledError:
            self.cancelled.append(placement.request_id)
            raise
        if self.error is not None:
            raise self.error
        return PLACE

    def place_now(self, placement: Placement) -> Place | None:
        return None

    async def describe(self, model: str) -> EngineInfo:
        if model != "model":
            raise NoPlace(f"the model {model!r} is not deployed", retry_after_s=7.5, overloaded=True)
        return INFO

    async def snapshot(self) -> ClusterSnapshot:
        return SNAPSHOT

    async def enlist(self, replica: str, report: ReplicaReport) -> NoReturn:
        self.replicas[replica] = report
        try:
            while True:
                await asyncio.Event().wait()
        finally:
            if self.replicas[replica] is report:
                del self.replicas[replica]

    def queued(self) -> dict[str, int]:
        return {"model": 3}


@asynccontextmanager
async def served(router: ScriptedRouter, key: str = "") -> AsyncIterator[RouterService]:
    service = RouterService(router, "127.0.0.1", key)
    try:
        yield service
    finally:
        await service.close()
