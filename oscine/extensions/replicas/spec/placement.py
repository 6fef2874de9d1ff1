"""What the ingress asks the router for each request, and the answer: where the request runs."""

from dataclasses import dataclass, field
from typing import Protocol

from oscine.types import EngineInfo, PrefillSource


@dataclass(frozen=True, slots=True)
class Placement:
    """A request that wants a place."""

    request_id: str
    model: str  # of the deployment file
    digests: list[bytes]  # of the leading whole pages of its known tokens; see oscine.engine.core.prefix_index
    num_tokens: int  # known: prompt, and what was generated before a replica was lost
    max_tokens: int  # still to generate at most
    priority: int = 0  # lower is placed sooner
    tenant: str = ""  # on whose behalf
    moved: bool = False  # it has lost a replica, and its client waits for the rest: placed before newcomers
    exclude: list[str] = field(default_factory=list)  # replicas that have just failed it


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request runs."""

    replica: str  # its name in the cluster
    address: str  # ZeroMQ endpoint of its engine
    prefill: PrefillSource | None  # the engine that may compute the prompt
    num_overlap_tokens: int  # the router believes to be in its prefix cache
    queue_s: float  # seconds that the request waited for a place


class NoPlace(Exception):  # noqa: N818  (reads as what happened)
    """The request cannot be placed now. The message is one line and safe to show to a client."""

    def __init__(self, message: str, *, retry_after_s: float, overloaded: bool) -> None:
        """`overloaded`: there are replicas, and too much to do for them; else there are none."""
        super().__init__(message)
        self.message, self.retry_after_s, self.overloaded = message, retry_after_s, overloaded


class Placer(Protocol):
    """The router, from where the ingress is. Survives restarts of the router: calls wait for it, within bounds."""

    async def place(self, placement: Placement) -> Place:
        """Waits for a place. Raises NoPlace."""
        ...

    async def describe(self, model: str) -> EngineInfo:
        """Of any replica of the model, once one was ready. Raises NoPlace when it cannot be served."""
        ...
