"""A closed loop of clients in front of one engine, as benchmarks of servers run it, with the step times of a table.

Each client sends its next request when it has the last answer. The engine computes decodes first, and prompts in the
order of arrival, as many tokens per step as its budget permits. Steps without a prompt or an end are run at once.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from oscine.timing.features import StepFeatures, pairs_of

Vector = NDArray[np.float64]


class Load(NamedTuple):
    """What the clients send."""

    clients: int
    prompt: int  # tokens at most; lengths are uniform between `least` and 1 times these
    answer: int  # tokens at most
    least: float = 0.8
    requests_per_client: int = 10


class Server(NamedTuple):
    """The limits of the engine."""

    step_tokens: int = 8192  # per step, at most
    kv_tokens: int = 1 << 60  # that the cache holds


class StepCost(NamedTuple):
    """Seconds are base + slope * context; `parts` and `part_slopes` the same, by the parts that they are a sum of."""

    base_s: float
    slope_s: float
    last_context: int
    parts: Vector
    part_slopes: Vector


@dataclass(slots=True)
class _Request:
    prompt: int
    answer: int
    sent_s: float
    computed: int = 0
    first_s: float = 0.0
    first: Vector | None = None


class Outcome(NamedTuple):
    """Medians over all requests, and the parts that the median time per token is made of."""

    tpot_s: float
    ttft_s: float
    tpot_parts: Vector


class ClosedLoop:
    """A simulation of one load. `cost`: of a step; `seed`: of the lengths."""

    def __init__(self, cost: Callable[[StepFeatures], StepCost], load: Load, server: Server, seed: int = 0) -> None:
        self._cost, self._load, self._server = cost, load, server
        rng, count = np.random.default_rng(seed), load.clients * load.requests_per_client
        self._lengths = deque(
            zip(
                rng.integers(int(load.prompt * load.least), load.prompt + 1, count).tolist(),
                rng.integers(int(load.answer * load.least), load.answer + 1, count).tolist(),
                strict=True,
            )
        )
        self._now_s = 0.0
        self._parts: Vector = np.zeros(1)
        self._waiting: deque[_Request] = deque()
        self._prompts: deque[_Request] = deque()
        self._running: list[tuple[int, int, _Request]] = []  # a heap: tick of the last token, order of the first ones
        self._tick = self._context = self._held = 0
        self._tpots: list[tuple[float, Vector]] = []
        self._ttfts: list[float] = []

    def run(self) -> Outcome:
        """All requests, from the first to the last; call it once."""
        self._send(self._load.clients)
        while self._waiting or self._prompts or self._running:
            self._admit()
            self._step()
        return Outcome(median(one for one, _ in self._tpots), median(self._ttfts), _middle(self._tpots))

    def _send(self, count: int) -> None:
        for _ in range(min(count, len(self._lengths))):
            self._waiting.append(_Request(*self._lengths.popleft(), self._now_s))

    def _admit(self) -> None:
        """As many as the cache holds in full."""
        while self._waiting:
            needed = self._waiting[0].prompt + self._waiting[0].answer
            if self._held and self._held + needed > self._server.kv_tokens:
                return
            self._held += needed
            self._prompts.append(self._waiting.popleft())

    def _step(self) -> None:
        """One step with prompts, or all steps up to the next end."""
        rows = len(self._running)
        left, tokens, pairs, chunks = self._server.step_tokens - rows, 0, 0, 0
        done: list[_Request] = []
        for request in self._prompts:
            length = min(left, request.prompt - request.computed)
            if length <= 0:
                break
            pairs += pairs_of(request.computed, length)
            tokens, chunks, left = tokens + length, chunks + 1, left - length
            request.computed += length
            if request.computed == request.prompt:
                done.append(request)
        count = 1 if chunks or not rows else self._running[0][0] - self._tick
        step = StepFeatures(rows, self._context + rows, tokens, pairs, chunks, rows + len(done))
        self._advance(step, count)
        for request in done:
            self._prompts.popleft()
            self._first_token(request)
        self._end()

    def _advance(self, step: StepFeatures, count: int) -> None:
        """Runs `count` such steps; with each one, each decode reads a token more."""
        rows = step.decode_rows
        while count:
            cost = self._cost(step)
            fitting = count if not rows else max(1, (cost.last_context - step.decode_context) // rows + 1)
            n = min(count, fitting)
            context = n * step.decode_context + rows * (n * (n - 1) // 2)  # summed over the steps
            self._now_s += n * cost.base_s + cost.slope_s * context
            self._parts = self._parts + n * cost.parts + cost.part_slopes * context
            step = step._replace(decode_context=step.decode_context + n * rows)
            self._context += n * rows
            self._tick += n
            count -= n

    def _first_token(self, request: _Request) -> None:
        request.first_s, request.first = self._now_s, self._parts
        self._ttfts.append(self._now_s - request.sent_s)
        self._context += request.prompt
        heappush(self._running, (self._tick + max(request.answer - 1, 1), len(self._ttfts), request))

    def _end(self) -> None:
        ended = 0
        while self._running and self._running[0][0] == self._tick:
            request = heappop(self._running)[2]
            ended += 1
            more = max(request.answer - 1, 1)
            assert request.first is not None
            self._tpots.append(((self._now_s - request.first_s) / more, (self._parts - request.first) / more))
            self._context -= request.prompt + more
            self._held -= request.prompt + request.answer
        self._send(ended)


def _middle(found: list[tuple[float, Vector]]) -> Vector:
    """The mean parts of the middle half, by time: what the median is about."""
    ordered = sorted(found, key=lambda one: one[0])
    quarter = len(ordered) // 4
    chosen = ordered[quarter : len(ordered) - quarter]
    mean: Vector = np.mean([parts for _, parts in chosen], axis=0)
    return mean
