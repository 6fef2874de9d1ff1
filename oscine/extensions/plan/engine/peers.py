"""Engines that compute prompts for others: production's protocol over messages and copies that only take time."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from oscine.engine.wire.endpoint import KVEndpoint
from oscine.engine.wire.messages import FromPeer, Meet, ToPeer
from oscine.extensions.plan.clock.agenda import NEVER, Agenda, Clock, ns_of
from oscine.kv_group import KVGroup, Slots
from oscine.types import PageMoves, RankMemory, Region, TransferState, Transport

Handle = Callable[[str, FromPeer], None]  # of the name of the peer


class Network:
    """Between the engines of a simulation. An engine sends the pages of one reader after those of the other."""

    def __init__(self, agenda: Agenda, latency_s: float, bytes_per_s: float, host_bytes_per_s: float) -> None:
        """`host_bytes_per_s`: between an engine and its host."""
        self.host_bytes_per_s = host_bytes_per_s
        self._agenda, self._latency_ns, self._bytes_per_s = agenda, ns_of(latency_s), bytes_per_s
        self._servers: dict[str, Handle] = {}  # by address
        self._readers: dict[str, Links] = {}  # by name
        self._free_ns: defaultdict[str, int] = defaultdict(int)  # when an engine has sent all requested pages

    def serve(self, address: str, handle: Handle) -> None:
        self._servers[address] = handle

    def join(self, links: "Links") -> None:
        self._readers[links.name] = links

    def leave(self, name: str, address: str) -> None:
        """An engine is gone. Its readers hear that the connection is lost."""
        self._readers.pop(name, None)
        if self._servers.pop(address, None) is not None:
            for reader in self._readers.values():
                self._agenda.at(self._agenda.clock.ns, partial(reader.lose, address))

    def request(self, reader: str, address: str, message: FromPeer, now_ns: int) -> None:
        def arrive() -> None:
            if (handle := self._servers.get(address)) is not None:
                handle(reader, message)

        self._agenda.at(now_ns + self._latency_ns, arrive)

    def answer(self, reader: str, address: str, message: ToPeer, now_ns: int) -> None:
        def arrive() -> None:
            if (links := self._readers.get(reader)) is not None:
                links.take(address, message)

        self._agenda.at(now_ns + self._latency_ns, arrive)

    def is_there(self, address: str) -> bool:
        return address in self._servers

    def copied_ns(self, source: str, num_bytes: int, now_ns: int) -> int:
        """When a copy that is requested now will have ended."""
        begin_ns = max(now_ns, self._free_ns[source])
        self._free_ns[source] = begin_ns + ns_of(num_bytes / self._bytes_per_s)
        return self._free_ns[source] + self._latency_ns


class Links:
    """Stands for the PeerLinks of one engine."""

    def __init__(self, name: str, network: Network, clock: Clock, wake: Callable[[], None]) -> None:
        self.name, self._network, self._clock, self._wake = name, network, clock, wake
        self._known: set[str] = set()  # addresses
        self._inbox: list[tuple[str, ToPeer | None]] = []
        network.join(self)

    def send(self, address: str, message: FromPeer) -> None:
        if not self._network.is_there(address):
            self._inbox.append((address, None))
            return
        if address not in self._known:
            self._known.add(address)
            self._network.request(self.name, address, Meet(), self._clock.ns)
        self._network.request(self.name, address, message, self._clock.ns)

    def receive(self) -> Iterator[tuple[str, ToPeer | None]]:
        while self._inbox:
            yield self._inbox.pop(0)

    def take(self, address: str, message: ToPeer) -> None:
        if address in self._known:
            self._inbox.append((address, message))
            self._wake()

    def lose(self, address: str) -> None:
        if address in self._known:
            self._known.remove(address)
            self._inbox.append((address, None))
            self._wake()


class Copy:
    """A Transfer."""

    error: str | None = None

    def __init__(self, clock: Clock, end_ns: int, num_bytes: int, is_there: Callable[[], bool]) -> None:
        self.num_bytes = num_bytes
        self.seconds = (end_ns - clock.ns) / 1e9
        self._clock, self._end_ns, self._is_there = clock, end_ns, is_there

    @property
    def state(self) -> TransferState:
        if self._clock.ns >= self._end_ns:
            return "failed" if self.error else "done"
        if not self._is_there():
            self.error, self._end_ns = "the engine is gone", 0
            return "failed"
        return "running"

    def cancel(self) -> None:
        self.error = "cancelled"


class Copies:
    """Stands for the Transfers of one engine: it knows how many bytes a page has, and where its source is."""

    def __init__(
        self,
        address: str,
        network: Network,
        clock: Clock,
        model: str,
        groups: Sequence[KVGroup],
        memory: Sequence[Slots],
    ) -> None:
        self.model, self.groups = model, [*groups]
        num_pages = {
            g: slots.count * each for slots in memory for g, each in zip(slots.groups, slots.per_slot, strict=True)
        }
        regions = [Region(0, num_pages[place], group.page_bytes) for place, group in enumerate(groups)]
        self.memories = [RankMemory(address.encode(), "DRAM", 0, regions)] * groups[0].num_ranks
        self.transport = Transport(address, "", has_rdma=True)
        self._network, self._clock = network, clock

    @property
    def endpoint(self) -> KVEndpoint:
        return KVEndpoint(self.model, self.groups, self.memories, self.transport)

    def connect(self, model: str, groups: list[KVGroup], ranks: list[RankMemory]) -> str:
        if model != self.model:
            raise ValueError(f"it has the model {model}, and not {self.model}")
        return ranks[0].agent.decode()

    def disconnect(self, peer: Any) -> None:
        """Nothing was connected."""

    def start(self, peer: str, moves: list[PageMoves]) -> Copy:
        num_bytes = sum(len(move.source_pages) * self._bytes(move.group) for move in moves)
        end_ns = self._network.copied_ns(peer, num_bytes, self._clock.ns) if self._network.is_there(peer) else NEVER
        return Copy(self._clock, end_ns, num_bytes, partial(self._network.is_there, peer))

    def attend(self, attentive: bool) -> None:
        """Nothing to take part in."""

    def _bytes(self, group: int) -> int:
        """Of a page, over all ranks."""
        return self.groups[group].page_bytes * self.groups[group].num_ranks
