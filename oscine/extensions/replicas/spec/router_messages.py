"""What crosses the socket between the router and its clients, the ingresses and replicas, as MessagePack.

The records of oscine.extensions.replicas.spec.placement and snapshot travel as they are; nothing that arrives can name
code. Answers come in any order, each with the id of its question.
"""

from msgspec import Struct, msgpack

from oscine.engine.wire.version import version_of
from oscine.extensions.replicas.spec.placement import Place, Placement
from oscine.extensions.replicas.spec.snapshot import ClusterSnapshot, ReplicaReport
from oscine.types import EngineInfo


class _Numbered(Struct, frozen=True):
    id: int  # of a question, unique among those of its sender; its answer has the same


class FindPlace(_Numbered, frozen=True, tag="find_place"):
    """Answered by Found, which may take as long as the request may wait."""

    placement: Placement


class Describe(_Numbered, frozen=True, tag="describe"):
    """Answered by Described, once a replica was ready."""

    model: str


class Look(_Numbered, frozen=True, tag="look"):
    """Answered by Seen."""


class Enlist(_Numbered, frozen=True, tag="enlist"):
    """A replica takes requests as long as this question is open. A later one with the same name replaces the report."""

    replica: str  # its name
    report: ReplicaReport
    version: str = ""  # of its messages; see `own_version`


class Watch(_Numbered, frozen=True, tag="watch"):
    """Answered by Enlisted, at once and after each change, as long as this question is open."""

    version: str = ""  # of the sender's messages; see `own_version`


class CancelQuestion(_Numbered, frozen=True, tag="cancel"):
    """The answer is of no use any more."""


class Found(_Numbered, frozen=True, tag="found"):
    place: Place


class Described(_Numbered, frozen=True, tag="described"):
    info: EngineInfo


class Seen(_Numbered, frozen=True, tag="seen"):
    snapshot: ClusterSnapshot


class Enlisted(_Numbered, frozen=True, tag="enlisted"):
    """All replicas that have enlisted, by name."""

    replicas: dict[str, ReplicaReport]


class PlaceRefused(_Numbered, frozen=True, tag="refused"):
    """NoPlace, instead of any other answer."""

    message: str
    retry_after_s: float
    overloaded: bool


class Waiting(Struct, frozen=True, tag="waiting"):
    """The router is there, and has open questions of this client; said every WAITING_S."""

    queued: dict[str, int] = {}  # model -> requests that wait for a place; models without any are left out


WAITING_S = 1.0

Question = FindPlace | Describe | Look | Enlist | Watch
Answer = Found | Described | Seen | PlaceRefused
ToRouter = Question | CancelQuestion
FromRouter = Answer | Waiting | Enlisted


def own_version() -> str:
    """Of the messages that this process sends: a replica, its router and an ingress must have the same."""
    return version_of(ToRouter, FromRouter)


decode_to_router = msgpack.Decoder(ToRouter).decode
decode_from_router = msgpack.Decoder(FromRouter).decode
