"""Two loops on PagedExecutors, one of which fetches pages from the other, with wires and transfers made of lists.

Bytes move page by page, one page per step, and are read when they move. A page that the other side gave up too early,
or that this side reused meanwhile, has the wrong content, which a PagedExecutor notices. Messages are encoded as on the
real wire.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from oscine.engine.core.extension import LoopState
from oscine.engine.core.page_holds import Hold
from oscine.engine.process.prefills import Prefills
from oscine.engine.wire.endpoint import KVEndpoint
from oscine.engine.wire.messages import FromPeer, Meet, ToClient, decode_to_client, decode_to_engine, encode
from oscine.extensions.disaggregation.prefill_service import PrefillService, _Job
from oscine.extensions.disaggregation.remote_prefill import RemotePrefills
from oscine.kv_group import KVGroup
from oscine.types import (
    GenerationOutput,
    GenerationRequest,
    PageMoves,
    PrefillSource,
    RankMemory,
    Region,
    RemotePrefill,
    SamplingParams,
    Transport,
)
from tests.engine.harness import PAGE, Run, Setting
from tests.engine.pool_check import check_pools

ADDRESS = "tcp://there"
DECODE = b"decode engine"


@dataclass
class PageTransfer:
    """Moves one page a tick; one that is cancelled moves one more."""

    source: "Prefiller"
    target: Run
    left: list[tuple[int, int, int]]  # group, page there, page here
    state: Literal["running", "done", "failed"] = "running"
    error: str | None = None
    num_bytes: int = 0
    cancelled: bool = False
    seconds: float = 0.0

    def cancel(self) -> None:
        self.cancelled = True

    def tick(self) -> None:
        self.seconds += 1.0
        if self.source.is_dead:
            self.state, self.error = "failed", "the other side is gone"
            return
        if self.left:
            group, there, here = self.left.pop(0)
            self.target.executor.memory[group][here] = list(self.source.run.executor.memory[group][there])
            self.num_bytes += 1
        if self.cancelled:
            self.state, self.error = "failed", "cancelled"
        elif not self.left:
            self.state = "done"


@dataclass
class PageTransfers:
    """A Transfers: `fails` of the transfers to come fail in the middle."""

    source: "Prefiller"
    groups: list[KVGroup]
    target: Run = field(init=False)  # set before the first transfer
    transport: Transport = field(default_factory=lambda: Transport("here"))
    running: list[PageTransfer] = field(default_factory=list)
    fails: int = 0

    def connect(self, model: str, groups: list[KVGroup], ranks: list[RankMemory]) -> str:
        if model != "m":
            raise ValueError(f"pages differ in model: {model} there, m here")
        return model

    def disconnect(self, peer: str) -> None:
        assert peer == "m"

    def start(self, peer: str, moves: list[PageMoves]) -> PageTransfer:
        left = [(m.group, *pair) for m in moves for pair in zip(m.source_pages, m.target_pages, strict=True)]
        assert left, "a transfer of nothing"
        transfer = PageTransfer(self.source, self.target, left)
        self.running.append(transfer)
        transfer.tick()  # bytes may move at once
        return transfer

    def tick(self) -> None:
        for transfer in list(self.running):
            transfer.tick()
            if self.fails and transfer.state == "running":
                self.fails -= 1
                transfer.state, transfer.error = "failed", "bad luck"
            if transfer.state != "running":
                self.running.remove(transfer)


class Wire:
    """A Links to one engine. What was sent arrives with the next step of the other side."""

    def __init__(self) -> None:
        self.is_open = self.is_cut = False
        self.to_there: list[bytes] = []
        self.to_here: list[bytes | None] = []

    def send(self, address: str, message: FromPeer) -> None:
        assert address == ADDRESS
        if not self.is_open:
            self.is_open = True
            self.to_there.append(encode(Meet()))
        if not self.is_cut:
            self.to_there.append(encode(message))

    def receive(self) -> Iterator[tuple[str, ToClient | None]]:
        while self.to_here:
            data = self.to_here.pop(0)
            if data is None:
                self.is_open = self.is_cut = False
            yield ADDRESS, None if data is None else decode_to_client(data)

    def cut(self) -> None:
        """The other side is gone; this side hears of it when it listens."""
        self.to_there.clear()
        self.is_cut = self.is_open
        self.to_here = [None] if self.is_open else []


class Prefiller:
    """The engine that is asked."""

    def __init__(self, setting: Setting, model: str | None = "m") -> None:
        self.run = Run(setting)
        self.is_dead = self.is_stuck = False
        sizes = zip(setting.num_pages, setting.groups, strict=True)
        memory = RankMemory(b"", "DRAM", 0, [Region(0, count, group.page_bytes) for count, group in sizes])
        self.is_attentive = False
        self.service: Prefills = Prefills()
        if model is not None:
            endpoint = KVEndpoint(model, setting.groups, [memory])
            self.service = PrefillService(self.run.loop, endpoint, self._attend, lambda: self.run.now)

    def _attend(self, whether: bool) -> None:
        self.is_attentive = whether

    @property
    def jobs(self) -> list[_Job]:
        return [*self.service._jobs.values()] if isinstance(self.service, PrefillService) else []

    def step(self, wire: Wire) -> None:
        self.run.now += 1.0
        if self.is_dead or self.is_stuck:
            return
        while wire.to_there:
            message = decode_to_engine(wire.to_there.pop(0))
            assert isinstance(message, FromPeer)
            self.service.handle(DECODE, message)
        self.service.expire()
        if self.run.loop.has_work:
            assert self.service.take(self.run.loop.step()) == []
        wire.to_here += [encode(message) for _, message in self.service.news]
        self.service.news.clear()
        leases = [job.hold for job in self.jobs if job.hold is not None]
        assert self.is_attentive == bool(leases)
        check_pages(self.run, leases)


class Pair:
    """Drives both. Requests are added to the decoding engine, `here`."""

    def __init__(
        self, here: Setting, there: Setting | None = None, model: str | None = "m", *, fetches: bool = True
    ) -> None:
        self.there, self.wire = Prefiller(there or here, model), Wire()
        self.transfers = PageTransfers(self.there, list(here.groups))

        def fetch(loop: LoopState) -> RemotePrefills:
            return RemotePrefills(loop, self.wire, self.transfers, lambda: self.here.now)

        self.here = self.transfers.target = Run(here, extensions=[fetch] if fetches else ())
        found = (one for one in self.here.loop.extensions if isinstance(one, RemotePrefills))
        self.fetches = next(found, None)

    def add(
        self, name: str, prompt: list[int], *, min_tokens: int = PAGE, timeout_s: float = 1000.0, max_tokens: int = 4,
        priority: int = 0, cache_salt: str = "", **sampling: object
    ) -> None:  # fmt: skip
        params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
        source = PrefillSource("there", ADDRESS, min_tokens, timeout_s)
        request = GenerationRequest(name, prompt, params, priority, prefill=source, cache_salt=cache_salt)
        self.here.requests[name], self.here.outputs[name] = request, []
        self.here.loop.add(request)

    def step(self) -> None:
        self.there.step(self.wire)
        self.transfers.tick()
        self.here.now += 1.0
        self.here._take(self.here.loop.step())
        holds = list(self.here.cache.holds._waiting.values())
        if (fetches := self.fetches) is not None:
            holds += [fetch.arrival.hold for fetch in fetches._fetches.values() if fetch.arrival.hold is not None]
            holds += [hold for hold, _ in fetches._arrivals._draining]
        check_pages(self.here, holds)

    def kill_there(self) -> None:
        self.there.is_dead = True
        self.wire.cut()

    def finish(self, limit: int = 3000) -> None:
        """Until nothing is left on either side, leases that nobody releases included."""
        for _ in range(limit):
            if not (self.here.loop.has_work or (self.there.jobs and not self.there.is_dead)):
                break
            self.step()
        assert not self.here.loop.has_work, "no progress"
        for name in self.here.requests:
            self.here.check_outputs(name)
        for run in (self.here, self.there.run):
            if run is self.here or not self.there.is_dead:
                assert run.cache.holds.num_holds == sum(pool.num_used for pool in run.cache.pools) == 0
        assert self.fetches is None or not self.fetches._arrivals._coming

    def news(self, name: str) -> RemotePrefill | None:
        found: list[GenerationOutput] = self.here.outputs[name]
        assert all(output.prefill is None for output in found[1:])
        return found[0].prefill


def check_pages(run: Run, holds: list[Hold]) -> None:
    """Holders are the running requests and the holds, and each page is held, cached or free, once."""
    assert run.cache.holds.num_holds == len(holds)
    found = []
    for group in range(len(run.cache.pools)):
        held: Counter[int] = Counter(page for hold in holds for page in hold[group].values())
        for request in run.loop._scheduler.running.values():
            held.update(request.pages[group][request.first_held[group] :])
        found.append(held)
    check_pools(run.cache.pools, found)
