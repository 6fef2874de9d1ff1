"""Requests with prompts that another engine computes: asks that engine, and fetches the pages that this one lacks.

A request stays here from its arrival until its pages have arrived. Then it is queued like any other, and finds an
ordinary prefix hit. If anything fails, it is queued too, and its prompt is computed here.

    asked    the other engine computes the prompt, or has it
    answered its pages wait to be read; here, new ones for them are looked for
    held     new pages are taken; what was launched before that may still write to them
    fetched  bytes are under way

Fetched data is trusted only while the other engine's lease is sure to last.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from oscine.engine.core.arrivals import Arrival, Arrivals
from oscine.engine.core.extension import EngineExtension, LoopState, MakeExtension, Progress
from oscine.engine.core.request import Request
from oscine.engine.wire.endpoint import KVEndpoint, check_endpoint, check_pages
from oscine.engine.wire.links import PeerLinks
from oscine.engine.wire.messages import Met, Prefill, Prefilled, PrefillRefused, Release
from oscine.executor.start.build import BuiltExecutor
from oscine.extensions.disaggregation.kv_link import Links, Transfer, Transfers
from oscine.extensions.disaggregation.transport import Way, check_transport, way
from oscine.extensions.disaggregation.worth import Worth
from oscine.settings.config import EngineOptions
from oscine.types import EngineStats, PageMoves, PrefillSource, RemotePrefill, StepPlan

_LEASE_SLACK_S = 1.0  # by which a lease outlasts the reading


@dataclass(slots=True)
class _Source:
    """Another engine."""

    transfers: Transfers
    peer: Any = None  # of Transfers, once the engine has introduced itself
    endpoint: KVEndpoint | None = None  # as it told
    way: Way = "tcp"  # by which its pages come
    refusal: str | None = None  # why its pages are of no use here

    def meet(self, endpoint: KVEndpoint | None) -> None:
        """It introduces itself."""
        try:
            if endpoint is None:
                raise ValueError("it gives no pages to others")
            check_endpoint(endpoint)
            check_transport(self.transfers.transport, endpoint.transport)
            self.way = way(self.transfers.transport, endpoint.transport)
            self.peer = self.transfers.connect(endpoint.model, endpoint.groups, endpoint.ranks)
            self.endpoint = endpoint
        except ValueError as error:
            self.refusal = str(error)

    def check(self, answer: Prefilled, num_pages: int) -> None:
        """Raises ValueError for an invalid answer."""
        if self.endpoint is None:
            raise ValueError("it offers pages without an address")
        lengths = [num_pages - group.first_needed(num_pages) for group in self.endpoint.groups]
        check_pages(answer.pages, self.endpoint, lengths)

    def disconnect(self) -> None:
        if self.peer is not None:
            self.transfers.disconnect(self.peer)


@dataclass(slots=True)
class _Fetch:
    """One request and its pages."""

    fetch_id: str
    arrival: Arrival  # all whole pages that can be had; the last token is always computed here
    source: PrefillSource
    asked_s: float
    deadline_s: float
    answer: Prefilled | None = None
    answered_s: float = 0.0
    transfer: Transfer | None = None
    begun_s: float = 0.0  # of the transfer
    patience_s: float = inf  # with the transfer

    @property
    def request(self) -> Request:
        return self.arrival.request

    def moves(self) -> list[PageMoves]:
        arrival = self.arrival
        assert self.answer is not None
        assert arrival.hold is not None
        moves = []
        for group, (lacking, theirs, ours) in enumerate(
            zip(arrival.lacking, self.answer.pages, arrival.hold, strict=True)
        ):
            first = len(arrival.digests) - len(theirs)
            moves.append(PageMoves(group, [theirs[i - first] for i in lacking], [ours[i] for i in lacking]))
        return [move for move in moves if move.target_pages]


class RemotePrefills(EngineExtension):
    """Not thread-safe; everything is called by the loop, on its thread. Nothing here waits."""

    fetches_prompts = True

    def __init__(
        self,
        loop: LoopState,
        links: Links,
        transfers: Transfers,
        clock: Callable[[], float] = time.monotonic,
        worth: Worth | None = None,
    ) -> None:
        """Without `worth` pages are always fetched."""
        self._cache, self._counters = loop.cache, loop.counters
        self._links, self._transfers, self._clock = links, transfers, clock
        self._sources: dict[str, _Source] = {}  # by address
        self._fetches: dict[str, _Fetch] = {}
        self._ready: list[Request] = []
        self._arrivals = Arrivals(loop.cache)
        self._num_asked = 0
        self._worth = worth

    @property
    def requests(self) -> list[Request]:
        """Those that are here."""
        return [*(fetch.request for fetch in self._fetches.values()), *self._ready]

    @property
    def is_busy(self) -> bool:
        """Whether poll() must be called though there is no request."""
        return self._arrivals.is_draining

    def admit(self, request: Request) -> bool:
        """Asks for the pages of a request. False: it is better computed here."""
        source = request.given.prefill
        if source is None or not self._cache.looks_up(request):
            return False
        num_known = self._cache.find(request).num_pages
        num_pages = (len(request.token_ids) - 1) // self._cache.page_size
        num_lacking = len(request.token_ids) - num_known * self._cache.page_size
        if num_pages == num_known or num_lacking < source.min_tokens:
            return False
        self._listen()  # so that nothing is sent to an engine that is gone
        known = self._sources.setdefault(source.address, _Source(self._transfers))
        if known.refusal is not None:
            _count_failure(self._counters, request, source, known.refusal)
            return False
        if self._is_sooner_computed(request.digests[:num_pages], source.address, num_lacking):
            self._counters.fetches_declined += 1
            return False
        now = self._clock()
        self._num_asked += 1
        fetch_id = f"{self._num_asked} {request.request_id}"
        arrival = Arrival(request, request.digests[:num_pages])
        fetch = _Fetch(fetch_id, arrival, source, now, now + source.timeout_s)
        self._fetches[fetch_id] = fetch
        tokens = request.token_ids[: num_pages * self._cache.page_size]
        lease_s, given = source.timeout_s + _LEASE_SLACK_S, request.given
        wanted = Prefill(fetch_id, tokens, lease_s, given.priority, given.cache_salt, given.adapter)
        self._links.send(source.address, wanted)
        return True

    def _is_sooner_computed(self, digests: list[bytes], address: str, num_tokens: int) -> bool:
        if self._worth is None:
            return False
        lacking = zip(self._transfers.groups, self._cache.holds.lacking(digests), strict=True)
        num_bytes = sum(group.page_bytes * group.num_ranks * len(places) for group, places in lacking)
        return self._worth.declines(address, num_bytes, num_tokens)

    def after_step(self, plan: StepPlan, num_drafted: int, seconds: float, *, in_vain: bool) -> None:
        if self._worth is not None:
            self._worth.note_step(plan, seconds)

    def count(self, stats: EngineStats) -> None:
        if self._worth is not None:
            self._worth.count(stats)

    def abandon(self, request: Request) -> bool:
        """A request ends. False if it is not here."""
        if request in self._ready:
            self._ready.remove(request)
            return True
        for fetch in self._fetches.values():
            if fetch.request is request:
                self._give_up(fetch)
                return True
        return False

    def poll(self, progress: Progress) -> list[Request]:
        """Goes on wherever something can be done. Returns requests that can be queued."""
        num_ended, num_launched, _, _ = progress
        self._listen()
        self._arrivals.drain()
        has_room = True
        for fetch in sorted(self._fetches.values(), key=lambda fetch: fetch.request.order):
            if self._clock() > fetch.deadline_s:
                self._fail(fetch, f"{fetch.source.replica} did not deliver within {fetch.source.timeout_s:g} s")
            elif fetch.transfer is not None:
                self._look(fetch, fetch.transfer)
            elif fetch.answer is not None:
                if fetch.arrival.hold is None and has_room:
                    has_room = self._take_pages(fetch, num_ended + num_launched)
                if fetch.arrival.num_lacking and num_ended >= fetch.arrival.fence:
                    self._begin(fetch)
        ready, self._ready = self._ready, []
        return ready

    # ---- what the other engine says ----

    def _listen(self) -> None:
        for address, message in self._links.receive():
            match message:
                case None:
                    lost = self._sources.pop(address)
                    self._fail_all(address, "the connection to {replica} was lost")
                    lost.disconnect()
                    if self._worth is not None:
                        self._worth.forget(address)
                case Met():
                    source = self._sources[address]
                    source.meet(message.endpoint)
                    if source.refusal is not None:
                        self._fail_all(address, source.refusal)
                case Prefilled():
                    self._answer(message)
                case PrefillRefused():
                    fetch = self._fetches.get(message.request_id)
                    if fetch is not None:
                        self._fail(fetch, f"{fetch.source.replica}: {message.message}")

    def _answer(self, answer: Prefilled) -> None:
        fetch = self._fetches.get(answer.request_id)
        if fetch is None or fetch.answer is not None:
            return  # it was released before the answer came, or this is a second answer
        try:
            self._sources[fetch.source.address].check(answer, len(fetch.arrival.digests))
        except ValueError as error:
            self._fail(fetch, f"{fetch.source.replica}: {error}")
            return
        fetch.answer, fetch.answered_s = answer, self._clock()
        fetch.deadline_s = min(fetch.deadline_s, fetch.asked_s + answer.lease_s)

    def _fail_all(self, address: str, failure: str) -> None:
        for fetch in [fetch for fetch in self._fetches.values() if fetch.source.address == address]:
            self._fail(fetch, failure.replace("{replica}", fetch.source.replica))

    # ---- pages ----

    def _take_pages(self, fetch: _Fetch, fence: int) -> bool:
        """Finds room for what is lacking now. False: there is none. Does nothing while another request fetches it."""
        arrivals, arrival = self._arrivals, fetch.arrival
        if arrivals.is_coming(arrival):
            return True
        if not arrivals.take_pages(arrival, fence):
            return False
        if not arrival.num_lacking:
            self._succeed(fetch, num_bytes=0)
        return True

    def _begin(self, fetch: _Fetch) -> None:
        fetch.transfer = self._transfers.start(self._sources[fetch.source.address].peer, fetch.moves())
        fetch.begun_s = self._clock()
        if self._worth is not None:
            places = {i for of_group in fetch.arrival.lacking for i in of_group}
            fetch.patience_s = self._worth.patience_s(len(places) * self._cache.page_size)

    def _look(self, fetch: _Fetch, transfer: Transfer) -> None:
        took_s = self._clock() - fetch.begun_s
        if transfer.state == "done":
            if self._worth is not None:
                self._worth.note_transfer(fetch.source.address, transfer.seconds, transfer.num_bytes)
            self._succeed(fetch, transfer.num_bytes)
        elif transfer.state == "running" and took_s > fetch.patience_s:
            # Computing the prompt now costs at most as much again. What is under way has not been counted.
            pages = zip(self._transfers.groups, fetch.arrival.lacking, strict=True)
            num_bytes = sum(group.page_bytes * group.num_ranks * len(places) for group, places in pages)
            assert self._worth is not None
            self._worth.note_late(fetch.source.address, took_s, transfer.num_bytes or num_bytes // 2)
            self._counters.fetches_declined += 1
            self._fail(fetch, f"the pages of {fetch.source.replica} take longer than computing them")
        elif transfer.state == "failed":
            self._sources[fetch.source.address].disconnect()  # the next one connects anew
            self._fail(fetch, f"the transfer from {fetch.source.replica} failed: {transfer.error}")

    def _succeed(self, fetch: _Fetch, num_bytes: int) -> None:
        """The pages are here, and are held until the request starts."""
        counters, (num_full, *num_sliding) = self._counters, map(len, fetch.arrival.lacking)
        self._arrivals.finish(fetch.arrival)
        self._forget(fetch)
        prefill_s, transfer_s = fetch.answered_s - fetch.asked_s, self._clock() - fetch.answered_s
        of_source = self._sources[fetch.source.address].way
        fetch.request.remote_prefill = RemotePrefill(
            fetch.source.replica, prefill_s, transfer_s, num_full, sum(num_sliding), num_bytes, of_source
        )
        counters.fetches_over_tcp += of_source == "tcp" and num_bytes > 0
        counters.remote_prefills += 1
        counters.fetched_pages += num_full + sum(num_sliding)
        counters.fetched_bytes += num_bytes
        counters.fetch_s += transfer_s
        self._ready.append(fetch.request)

    def _fail(self, fetch: _Fetch, failure: str) -> None:
        """The prompt is computed here."""
        self._give_up(fetch)
        _count_failure(self._counters, fetch.request, fetch.source, failure)
        self._ready.append(fetch.request)

    def _give_up(self, fetch: _Fetch) -> None:
        self._forget(fetch)
        self._arrivals.give_up(fetch.arrival, fetch.transfer)

    def _forget(self, fetch: _Fetch) -> None:
        del self._fetches[fetch.fetch_id]
        if fetch.source.address in self._sources:
            self._links.send(fetch.source.address, Release(fetch.fetch_id))


def _count_failure(counters: EngineStats, request: Request, source: PrefillSource, failure: str) -> None:
    request.remote_prefill = RemotePrefill(source.replica, failure=failure)
    counters.remote_prefill_failures += 1


def of_engine(built: BuiltExecutor, options: EngineOptions) -> MakeExtension:
    """Where the options want pages to move between engines."""
    transfers = built.transfers
    assert transfers is not None
    worth = Worth() if options.executor != "fake" else None  # a fake executor computes any prompt at once
    return lambda loop: RemotePrefills(loop, PeerLinks(options.peers.key), transfers, worth=worth)
