"""The cost of a request on a replica: the work before its first token, and its share of later steps.

Pure policy over plain records.

The form is that of NVIDIA Dynamo's KV router: weight x prefill blocks (new and queued) plus decode blocks. Here the
unit is tokens, and requests and the state of the cache are further terms.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The known load of a replica: its last report, and the requests placed on it since."""

    replica: str
    queued_tokens: int = 0  # prompt tokens not yet computed, of waiting and running requests
    active_tokens: int = 0  # tokens of running requests
    num_requests: int = 0  # waiting and running
    capacity_tokens: int = 0  # of full pages, if it had no others; 0: unknown
    held_tokens: int = 0  # of these, those in whose memory live requests hold pages of any kind
    cached_tokens: int = 0  # of these, those whose memory has cached pages that no request holds
    # What cost() needs, the same for all requests:
    work: float = field(init=False, compare=False, repr=False)  # cost of the other requests
    per_missing: float = field(init=False, compare=False, repr=False)  # cost of a token that the cache lacks
    room: float = field(init=False, compare=False, repr=False)  # tokens beyond which a request would be preempted

    def __post_init__(self) -> None:
        fill, room, capacity = 0.0, inf, self.capacity_tokens
        if capacity:
            fill = min(1.0, (self.held_tokens + self.cached_tokens) / capacity)
            room = FULL * capacity - self.held_tokens
        work = QUEUED * self.queued_tokens + ACTIVE * self.active_tokens + REQUEST * self.num_requests
        for name, value in (("work", work), ("per_missing", 1.0 + EVICTED * fill), ("room", room)):
            object.__setattr__(self, name, value)


# The weight of each term, in tokens of prefill: 1 is the cost of one prompt token that the cache lacks.

# Per queued token of other requests, which is computed first. It is below 1, because queued tokens must be computed in
# any case. So waiting for pages that are being computed is better than computing them a second time.
QUEUED = 0.75
# Per token in the context of decoding requests. It is read once per step for the life of its request, on any replica.
# So unlike a missing token it adds no work, but an even share of this work ends sooner.
ACTIVE = 0.03
REQUEST = 24.0  # per other request on the replica: its rows in each step
# Per missing token in a full cache: it evicts another one, and a copy on another replica takes memory in vain. A cache
# that is partly free has this share of it.
EVICTED = 1.0
# Per token by which live requests would exceed the share FULL of the cache: one of them would be preempted and computed
# again.
PREEMPTED = 4.0
# Per token whose pages another machine must send. 1 would be as slow as computing them: over TCP at 1 GB/s
# pages of 120b take nine tenths of that time, over RDMA a few hundredths.
FAR = 0.25
FULL = 0.9  # share of the cache above which requests are preempted
SLACK = 64.0  # costs within this difference are equal: then the greatest overlap wins, never chance


def cost(load: ReplicaLoad, num_tokens: int, num_overlap: int) -> float:
    """The cost, in tokens of prefill, of a request with num_tokens known tokens, of which the replica has cached
    num_overlap."""
    found = load.work + load.per_missing * (num_tokens - num_overlap)
    excess = num_tokens - load.room
    return found + PREEMPTED * excess if excess > 0 else found


def rank(
    loads: Sequence[ReplicaLoad],
    overlap_tokens: dict[str, int],
    num_tokens: int,
    key: bytes,
    moved: Mapping[str, int] | None = None,
) -> Iterator[str]:
    """The replicas, best first. Among equals the greatest overlap wins, then the one that `key` always picks.

    moved: tokens whose pages a replica would send to another machine. The first is found without sorting.
    """
    if not loads:
        return
    costs = [cost(load, num_tokens, overlap_tokens.get(load.replica, 0)) for load in loads]
    if moved:
        costs = [found + FAR * moved.get(load.replica, 0) for found, load in zip(costs, loads, strict=True)]
    most = min(costs) + SLACK
    equal = [load.replica for load, found in zip(loads, costs, strict=True) if found <= most]
    first = max(equal, key=lambda replica: (overlap_tokens.get(replica, 0), rendezvous(key, replica)))
    yield first
    others = sorted(zip(costs, [load.replica for load in loads], strict=True))
    yield from (replica for _, replica in others if replica != first)


def rendezvous(key: bytes, replica: str) -> bytes:
    """Rendezvous hashing: `key` belongs to the replica with the greatest value. If a replica goes, only its own keys
    move."""
    return hashlib.blake2b(key + replica.encode(), digest_size=8).digest()


def sticky_key(digests: Sequence[bytes], overlap_pages: Collection[int]) -> bytes:
    """The key of a prompt: its first page that no replica has, or else its last page. So prompts with a common
    beginning that is cached everywhere are spread, and a repeated prompt stays on its replica.
    """
    if not digests:
        return b""
    return digests[min(max(overlap_pages, default=0), len(digests) - 1)]
