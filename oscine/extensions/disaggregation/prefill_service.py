"""What this engine does for others: it computes their prompts, and keeps the pages until they have been read.

A reader may die or fail at any time, and it cannot be known whether it still reads. So a lease makes reading safe:
promised pages are kept until they are released or their time is over. A reader does not trust what it gets later.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from oscine.engine.core.loop import EngineLoop
from oscine.engine.core.page_holds import Hold
from oscine.engine.process.prefills import GIVES_NONE, Prefills
from oscine.engine.wire.endpoint import KVEndpoint
from oscine.engine.wire.messages import FromPeer, Meet, Met, Prefill, Prefilled, PrefillRefused, Release
from oscine.extensions.disaggregation.kv_link import Transfers
from oscine.types import GenerationOutput, GenerationRequest, SamplingParams

_LONGEST_LEASE_S = 300.0
_LOOK_MS = 100  # how often leases are looked at while the engine has nothing else to do


@dataclass(slots=True)
class _Job:
    """A prompt of another engine's: computed if it has no hold yet, leased if it has."""

    peer: bytes
    wanted: Prefill
    digests: list[bytes] = field(default_factory=list)
    hold: Hold | None = None
    end_s: float = 0.0  # of the lease

    @property
    def key(self) -> tuple[bytes, str]:
        return self.peer, self.wanted.request_id


class PrefillService(Prefills):
    """Not thread-safe. `news` is to be sent to the peers named in it."""

    def __init__(
        self,
        loop: EngineLoop,
        endpoint: KVEndpoint,
        attend: Callable[[bool], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`attend(whether)`: pages may be read now."""
        super().__init__()
        self._loop, self._cache, self._endpoint, self._attend, self._clock = loop, loop.cache, endpoint, attend, clock
        self._jobs: dict[tuple[bytes, str], _Job] = {}
        self._computed: dict[str, _Job] = {}  # by the id of the loop's request
        self._num_computed = 0

    @property
    def patience_ms(self) -> int | None:
        return _LOOK_MS if self._jobs else None

    def handle(self, peer: bytes, message: FromPeer) -> None:
        match message:
            case Meet():
                self.news.append((peer, Met(self._endpoint)))
            case Prefill():
                self._prefill(_Job(peer, message))
            case Release():
                self._forget((peer, message.request_id))

    def take(self, outputs: list[GenerationOutput]) -> list[GenerationOutput]:
        """Takes in what became of the prompts; call it right after each step. Returns all other outputs."""
        if not self._computed:
            return outputs
        others = []
        for output in outputs:
            job = self._computed.pop(output.request_id, None)
            if job is None:
                others.append(output)
            elif self._jobs.get(job.key) is not job:
                continue  # it was released meanwhile
            elif output.finish_reason == "length":
                self._promise(job)
            else:
                self._refuse(job, output.error or "the prompt was cancelled")
        return others

    def lose(self, peer: bytes) -> None:
        """A peer is gone: what it asked for is not computed any more; its leases end when they end."""
        for key in [key for key, job in self._jobs.items() if key[0] == peer and job.hold is None]:
            self._forget(key)

    def expire(self) -> None:
        now = self._clock()
        for key in [key for key, job in self._jobs.items() if job.hold is not None and job.end_s <= now]:
            self._forget(key)

    def _prefill(self, job: _Job) -> None:
        cache, tokens = self._cache, job.wanted.token_ids
        if not cache.prefix_caching:
            return self._refuse(job, GIVES_NONE)
        if not tokens or len(tokens) % cache.page_size or job.key in self._jobs:
            return self._refuse(job, "a prefill needs whole pages and an id of its own")
        self._jobs[job.key] = job
        wanted = job.wanted
        cache.index.extend_digests(
            job.digests, tokens, len(tokens) // cache.page_size, wanted.cache_salt, wanted.adapter
        )
        if not any(cache.holds.lacking(job.digests)):
            return self._promise(job)
        if self._loop.is_full:
            return self._refuse(job, "too many requests are waiting")
        self._num_computed += 1
        request_id = f"\0prefill {self._num_computed}"  # no client's
        self._computed[request_id] = job
        request = GenerationRequest(
            request_id,
            tokens,
            SamplingParams(max_tokens=0),
            wanted.priority,
            cache_salt=wanted.cache_salt,
            adapter=wanted.adapter,
        )
        return self._loop.add(request)

    def _promise(self, job: _Job) -> None:
        """Right after they were computed, or found."""
        holds = self._cache.holds
        if any(holds.lacking(job.digests)):  # older pages of this content were known instead of the ones just computed
            self._refuse(job, "pages of the prompt were evicted while others were computed")
            return
        job.hold = hold = holds.take(job.digests)
        lease_s = min(_LONGEST_LEASE_S, job.wanted.lease_s)  # in this order also for what is no number
        job.end_s = self._clock() + lease_s
        self._attend(True)
        pages = [[of_group[i] for i in sorted(of_group)] for of_group in hold]
        self.news.append((job.peer, Prefilled(job.wanted.request_id, pages, lease_s)))

    def _refuse(self, job: _Job, message: str) -> None:
        self.news.append((job.peer, PrefillRefused(job.wanted.request_id, message)))
        if self._jobs.get(job.key) is job:
            del self._jobs[job.key]

    def _forget(self, key: tuple[bytes, str]) -> None:
        """Frees what a job holds, or stops computing it; unknown keys are of jobs that have just ended."""
        job = self._jobs.pop(key, None)
        if job is None:
            return
        if job.hold is not None:
            self._cache.holds.release(job.hold)
        for request_id in [request_id for request_id, other in self._computed.items() if other is job]:
            self._loop.cancel(request_id)
        if not any(other.hold for other in self._jobs.values()):
            self._attend(False)


def of_engine(loop: EngineLoop, transfers: Transfers) -> PrefillService:
    """What other engines may have computed here."""
    endpoint = KVEndpoint(transfers.model, transfers.groups, transfers.memories, transfers.transport)
    return PrefillService(loop, endpoint, transfers.attend)
