"""Latency counters: the time to the first token of a request, and the time between further tokens.

It does not look at every token: the time between the first and the last token of a request is the sum of all waits
between them. Times are passed in.
"""

from collections.abc import Iterable

from oscine.engine.core.request import Request
from oscine.types import EngineStats


class Latencies:
    def __init__(self) -> None:
        self._first_tokens = 0
        self._first_token_s = 0.0
        self._inter_tokens = 0  # of requests that ended
        self._inter_token_s = 0.0
        self._now_s = 0.0  # when the last step was committed

    def begin_commit(self, now_s: float) -> None:
        """Tokens that are committed from here on were sampled now."""
        self._now_s = now_s

    def first_token(self, request: Request) -> None:
        request.first_token_s = self._now_s
        self._first_tokens += 1
        self._first_token_s += self._now_s - request.arrival_s

    def end(self, request: Request) -> None:
        """A request ends, with this step or between two."""
        if request.first_token_s is not None:
            self._inter_tokens += _further_tokens(request)
            self._inter_token_s += self._now_s - request.first_token_s

    def report(self, live: Iterable[Request], stats: EngineStats) -> None:
        """`live`: all requests that have not ended."""
        sampled = [(request, request.first_token_s) for request in live if request.first_token_s is not None]
        stats.first_tokens, stats.first_token_s = self._first_tokens, self._first_token_s
        stats.inter_tokens = self._inter_tokens + sum(_further_tokens(request) for request, _ in sampled)
        stats.inter_token_s = self._inter_token_s + sum(self._now_s - first_s for _, first_s in sampled)


def _further_tokens(request: Request) -> int:
    return len(request.token_ids) - request.num_given - 1
