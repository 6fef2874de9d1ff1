"""How pages move between engines, as an engine sees it: NIXL of one rank does it, or that of several ranks."""

from collections.abc import Iterable
from typing import Any, Protocol

from oscine.engine.wire.messages import FromPeer, ToClient
from oscine.kv_group import KVGroup
from oscine.types import PageMoves, RankMemory, TransferState, Transport


class Links(Protocol):
    """Connections to engines that compute prompts: PeerLinks, or those of a simulation."""

    def send(self, address: str, message: FromPeer) -> None: ...

    def receive(self) -> Iterable[tuple[str, ToClient | None]]:
        """All that has arrived, by address; None: the connection is lost, and a next one will be a new one."""
        ...


class Transfer(Protocol):
    """Pages on their way to this engine. Their memory must stay theirs until the state is no longer "running"."""

    @property
    def state(self) -> TransferState: ...

    @property
    def error(self) -> str | None:
        """Of one that failed, in one line."""
        ...

    @property
    def num_bytes(self) -> int:
        """That have arrived."""
        ...

    @property
    def seconds(self) -> float:
        """That one that has ended took, whenever that was looked at."""
        ...

    def cancel(self) -> None:
        """Ends as failed as soon as nothing is being written any more."""
        ...


class Transfers(Protocol):
    """Reads pages of other engines, and lets them read the pages of this one. Nothing here waits."""

    model: str  # what makes equal tokens have equal keys and values
    groups: list[KVGroup]
    memories: list[RankMemory]  # of each rank
    transport: Transport

    def connect(self, model: str, groups: list[KVGroup], ranks: list[RankMemory]) -> Any:
        """A peer, by what describes its pages. Raises ValueError saying what keeps them from moving here."""
        ...

    def disconnect(self, peer: Any) -> None:
        """What is on its way from the peer fails. The next transfer from it connects anew."""
        ...

    def start(self, peer: Any, moves: list[PageMoves]) -> Transfer:
        """Until it has ended, the source's pages must keep what they hold, and the target's must not be used."""
        ...

    def attend(self, attentive: bool) -> None:
        """Whether others may be reading from here now, which over some networks needs this side to take part."""
        ...
