"""KV transfer of a model on several ranks: each rank fetches its own share of the pages, when rank 0 says so.

A rank has a connection of its own for this, so that its steps and its transfers do not wait for each other. Its memory
is the first message from it. Then orders go to it, and it reports the end of each transfer.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection

from msgspec import Struct, msgpack

from oscine.extensions.disaggregation.nixl import KVTransfer, NixlTransfer, Peer
from oscine.kv_group import KVGroup
from oscine.types import PageMoves, RankMemory, TransferState

_LOOK_S = 0.0005  # between looks of a rank while something moves
_START_LOOK_S = 0.1  # between looks for ranks that fail instead of telling their memory


class _Attend(Struct, frozen=True, tag=True):
    attentive: bool


class _Connect(Struct, frozen=True, tag=True):
    peer: int
    model: str
    groups: list[KVGroup]
    ranks: list[RankMemory]


class _Disconnect(Struct, frozen=True, tag=True):
    peer: int


class _Start(Struct, frozen=True, tag=True):
    transfer: int
    peer: int
    moves: list[PageMoves]


class _Cancel(Struct, frozen=True, tag=True):
    transfer: int


class _Ended(Struct, frozen=True):
    transfer: int
    num_bytes: int
    error: str | None


_Order = _Attend | _Connect | _Disconnect | _Start | _Cancel

_encode = msgpack.Encoder().encode
_decode_order = msgpack.Decoder(_Order).decode
_decode_end = msgpack.Decoder(_Ended).decode
_decode_memory = msgpack.Decoder(RankMemory).decode


# ---- rank 0 ----


@dataclass(slots=True)
class _RankedPeer:
    """An engine whose pages can be read. Other ranks hear of it at the first transfer from it."""

    own: Peer
    introduction: _Connect
    is_known: bool = False  # to the other ranks


class _RankedTransfer:
    """Pages on their way to all ranks. It runs until the transfer of every rank has ended."""

    def __init__(self, ranks: "RankedTransfers", number: int, own: NixlTransfer) -> None:
        self.error: str | None = None  # the first that was seen
        self.ends: dict[int, _Ended] = {}  # of other ranks
        self._ranks, self._number, self._own = ranks, number, own
        self._cancelled = False

    @property
    def state(self) -> TransferState:
        self._ranks.listen()
        own_runs = self._own.state == "running"
        self.error = self.error or self._own.error
        if not (own_runs and self._cancelled):  # else the ranks were cancelled, which the own rank is about to say
            self.error = self.error or next(self._errors(), None)
        if self.error is not None:
            self.cancel()
        if own_runs or len(self.ends) < self._ranks.num_others:
            return "running"
        return "done" if self.error is None else "failed"

    @property
    def num_bytes(self) -> int:
        return self._own.num_bytes + sum(end.num_bytes for end in self.ends.values())

    @property
    def seconds(self) -> float:
        return self._own.seconds

    def cancel(self) -> None:
        if not self._cancelled:
            self._cancelled = True
            self._own.cancel()
            self._ranks.tell(_Cancel(self._number))

    def _errors(self) -> Iterator[str]:
        return (f"rank {rank}: {end.error}" for rank, end in self.ends.items() if end.error is not None)


class RankedTransfers:
    """Transfers of all ranks, as rank 0 starts them and sees their end. Not thread-safe.

    A rank that is lost ends the engine, so its connection needs no errors of its own.
    """

    def __init__(self, own: KVTransfer, others: Sequence[Connection], check: Callable[[], None]) -> None:
        """Waits until every rank has told its memory. `check` raises what keeps a rank from that."""
        self._own, self._others = own, others
        self.model, self.groups, self.transport = own.model, own.groups, own.transport
        self.memories = [*own.memories, *(_memory_of(other, check) for other in others)]
        self._numbers = count()
        self._running: dict[int, _RankedTransfer] = {}

    @property
    def num_others(self) -> int:
        return len(self._others)

    def connect(self, model: str, groups: list[KVGroup], ranks: list[RankMemory]) -> _RankedPeer:
        """As KVTransfer does: what keeps pages from one rank keeps them from all."""
        own = self._own.connect(model, groups, ranks)
        return _RankedPeer(own, _Connect(next(self._numbers), model, groups, ranks))

    def disconnect(self, peer: _RankedPeer) -> None:
        self._own.disconnect(peer.own)
        if peer.is_known:
            self.tell(_Disconnect(peer.introduction.peer))
            peer.is_known = False

    def start(self, peer: _RankedPeer, moves: list[PageMoves]) -> _RankedTransfer:
        if not peer.is_known:
            self.tell(peer.introduction)
            peer.is_known = True
        number = next(self._numbers)
        self.tell(_Start(number, peer.introduction.peer, moves))
        self._running[number] = transfer = _RankedTransfer(self, number, self._own.start(peer.own, moves))
        return transfer

    def attend(self, attentive: bool) -> None:
        self._own.attend(attentive)
        self.tell(_Attend(attentive))

    def tell(self, order: _Order) -> None:
        message = _encode(order)
        for other in self._others:
            with contextlib.suppress(OSError):
                other.send_bytes(message)

    def listen(self) -> None:
        """Takes in which transfers of other ranks have ended."""
        for rank, other in enumerate(self._others, 1):
            with contextlib.suppress(OSError, EOFError):
                while other.poll():
                    end = _decode_end(other.recv_bytes())
                    transfer = self._running[end.transfer]
                    transfer.ends[rank] = end
                    if len(transfer.ends) == self.num_others:
                        del self._running[end.transfer]


def _memory_of(other: Connection, check: Callable[[], None]) -> RankMemory:
    while not other.poll(_START_LOOK_S):
        check()
    return _decode_memory(other.recv_bytes())


# ---- other ranks ----


class TransferFollower:
    """Does what rank 0 says to one rank."""

    def __init__(self, own: KVTransfer, connection: Connection) -> None:
        self._own, self._connection = own, connection
        self._peers: dict[int, Peer] = {}
        self._running: dict[int, NixlTransfer] = {}

    def run(self) -> None:
        """Until rank 0 ends, which raises OSError or EOFError."""
        [memory] = self._own.memories
        self._connection.send_bytes(_encode(memory))
        while True:
            if self._connection.poll(_LOOK_S if self._running else None):
                self._obey(_decode_order(self._connection.recv_bytes()))
            for number, transfer in list(self._running.items()):
                if transfer.state != "running":
                    del self._running[number]
                    self._connection.send_bytes(_encode(_Ended(number, transfer.num_bytes, transfer.error)))

    def _obey(self, order: _Order) -> None:
        match order:
            case _Attend():
                self._own.attend(order.attentive)
            case _Connect():
                self._peers[order.peer] = self._own.connect(order.model, order.groups, order.ranks)
            case _Disconnect():
                self._own.disconnect(self._peers.pop(order.peer))
            case _Start():
                self._running[order.transfer] = self._own.start(self._peers[order.peer], order.moves)
            case _Cancel():
                if order.transfer in self._running:
                    self._running[order.transfer].cancel()
