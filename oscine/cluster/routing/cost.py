"""What it would cost to run a request on a replica: the work before its first token, and its share of later steps.

Pure policy over plain records. Knows nothing of events, of queues in front of the replicas, or of Ray.

The form is that of the KV router of NVIDIA Dynamo, whose cost of a worker is weight x prefill blocks (new and queued)
plus the blocks that it decodes on; here in tokens, with requests and the state of the cache as further terms.
"""

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a replica has to do, as far as is known: its last report, and what was placed on it since."""

    replica: str
    queued_tokens: int = 0  # not yet computed of requests that wait or run
    active_tokens: int = 0  # known of the requests that run
    num_requests: int = 0  # that wait or run
    capacity_tokens: int = 0  # of its full pages; 0: unknown
    held_tokens: int = 0  # of full pages that live requests hold
    cached_tokens: int = 0  # of pages that its prefix cache knows


@dataclass(frozen=True, slots=True)
class CostWeights:
    """Of each term, in tokens of prefill: one is what it takes to compute a token of a prompt."""

    missing: float = 1.0  # a token of the prompt that its cache lacks
    # A token that others still want computed there: it comes first. But it has to be computed in any case, so that
    # waiting for pages that are on their way beats computing them a second time.
    queued: float = 0.75
    # A token that decoding requests attend to. It is read once a step, for as many steps as the request lives, wherever
    # that is: unlike a missing token it makes no work, but shared evenly the work is done sooner.
    active: float = 0.03
    request: float = 24.0  # a request that runs beside: its rows in each step
    # A missing token pushes another one out of a full cache, which may be asked for again; in an empty cache, none.
    evicted: float = 0.5
    # A token by which live requests would exceed `full` of the cache: one of them is put back and computed again.
    preempted: float = 4.0
    full: float = 0.9  # share of the cache from where on requests are put back
    slack: float = 64.0  # costs that differ by no more are equal: then the greatest overlap wins, and never chance


def cost(load: ReplicaLoad, num_tokens: int, num_overlap: int, weights: CostWeights) -> float:
    """In tokens of prefill, of a request with num_tokens known tokens, num_overlap of which the replica has cached."""
    missing = num_tokens - num_overlap
    work = (
        weights.missing * missing
        + weights.queued * load.queued_tokens
        + weights.active * load.active_tokens
        + weights.request * load.num_requests
    )
    if not load.capacity_tokens:
        return work
    fill = min(1.0, load.cached_tokens / load.capacity_tokens)
    excess = load.held_tokens + num_tokens - weights.full * load.capacity_tokens
    return work + weights.evicted * fill * missing + weights.preempted * max(0.0, excess)


def rank(
    loads: Sequence[ReplicaLoad], overlap_tokens: dict[str, int], num_tokens: int, key: bytes, weights: CostWeights
) -> list[str]:
    """The replicas, best first. Among equals the greatest overlap wins, then the one that `key` always picks."""
    if not loads:
        return []
    costs = {load.replica: cost(load, num_tokens, overlap_tokens.get(load.replica, 0), weights) for load in loads}
    least = min(costs.values())
    equal = [replica for replica in costs if costs[replica] <= least + weights.slack]
    first = max(equal, key=lambda replica: (overlap_tokens.get(replica, 0), rendezvous(key, replica)))
    others = sorted((replica for replica in costs if replica != first), key=lambda replica: (costs[replica], replica))
    return [first, *others]


def rendezvous(key: bytes, replica: str) -> bytes:
    """The greatest of these is where `key` belongs: it moves when that replica goes, and no other key does."""
    return hashlib.blake2b(key + replica.encode(), digest_size=8).digest()


def sticky_key(digests: Sequence[bytes], overlap_pages: Collection[int]) -> bytes:
    """What tells this prompt from those that are cached: its first page that no replica has, or else its last.

    Prompts that share a beginning that is cached everywhere are so spread; one that comes again stays.
    """
    if not digests:
        return b""
    return digests[min(max(overlap_pages, default=0), len(digests) - 1)]
