"""Limits of one API key: requests and tokens per minute, sequences at once.

Tokens are not reserved. Those of a prompt are taken when it is admitted, and the bucket must have them. Generated
tokens are taken as they come, which can leave a debt; the next request waits until it is paid. A reservation of
`max_tokens` would refuse most requests, as most ask for the whole context and use a hundredth of it.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from oscine.api.common.errors import APIError, retry_after

_MINUTE_S = 60.0
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """None: unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and generated
    max_parallel: int | None = None  # sequences; each of `n` choices is one


class Bucket:
    """Holds at most a minute's worth, and is refilled evenly. It may be overdrawn."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.capacity = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._at_s = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.capacity, self._level + (now - self._at_s) * self.capacity / _MINUTE_S)
        self._at_s = now
        return self._level

    def take(self, amount: int) -> None:
        self._level = self.level - amount

    def kept_from_batches(self, amount: float) -> float:
        """The amount that lines of a batch leave to other requests: half, if the lines fit the other half."""
        return min(self.capacity / 2, self.capacity - amount)

    def wait_s(self, amount: float) -> float:
        """Seconds until the bucket holds this amount."""
        return max(0.0, amount - self.level) * _MINUTE_S / self.capacity


class KeyUse:
    """The usage of a key; lives as long as the key's name."""

    def __init__(
        self,
        name: str,
        limits: KeyLimits,
        priority: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_admin: bool = False,
    ) -> None:
        """`priority`: the base of the key's requests; None: they may have any. `is_admin`: it has the right `admin`."""
        self.name = name
        self.is_admin = is_admin
        self.limits = limits
        self.priority = priority
        self._clock = clock
        self._requests = Bucket(limits.requests_per_minute, clock) if limits.requests_per_minute else None
        self._tokens = Bucket(limits.tokens_per_minute, clock) if limits.tokens_per_minute else None
        self._parallel = 0

    def change(self, limits: KeyLimits, priority: int | None) -> None:
        """New limits for an existing key: full buckets where a limit changed, sequences counted as before."""
        fresh = KeyUse(self.name, limits, priority, self._clock)
        if limits.requests_per_minute != self.limits.requests_per_minute:
            self._requests = fresh._requests
        if limits.tokens_per_minute != self.limits.tokens_per_minute:
            self._tokens = fresh._tokens
        self.limits, self.priority = limits, priority

    def bounded_priority(self, asked: int) -> int:
        """Lower runs sooner. A client's own value can only put a request behind others of its key."""
        return asked if self.priority is None else self.priority + max(asked, 0)

    def take_request(self, *, in_batch: bool = False) -> None:
        """Raises APIError 429 if none is left, or if tokens are owed. Lines of a batch leave half to other requests."""
        if self._tokens is not None and self._tokens.level < 0:
            raise _exceeded(f"the {self._tokens.capacity} tokens per minute", "tokens", self._tokens.wait_s(0))
        if self._requests is not None:
            needed = 1 + self._requests.kept_from_batches(1) if in_batch else 1
            if self._requests.level < needed:
                wait_s = self._requests.wait_s(needed)
                raise _exceeded(f"the {self._requests.capacity} requests per minute", "requests", wait_s)
            self._requests.take(1)

    def give_back_request(self) -> None:
        """Gives the request back: it will be sent again."""
        if self._requests is not None:
            self._requests.take(-1)

    @contextmanager
    def hold(self, sequences: int, prompt_tokens: int, *, in_batch: bool = False) -> Iterator[None]:
        """Takes the tokens of a prompt, and holds places for its sequences until the context ends. Raises APIError
        429. Lines of a batch leave half of both to other requests."""
        most = self.limits.max_parallel
        if most is not None:
            may = max(most // 2, sequences) if in_batch else most
            if sequences > most:
                raise APIError(f"The request asks for {sequences} sequences; this API key may run {most} at once.")
            if self._parallel + sequences > may:
                raise _exceeded(f"the {most} sequences at once", "parallel", 1.0)
        self._take_prompt(prompt_tokens, in_batch)
        self._parallel += sequences
        try:
            yield
        finally:
            self._parallel -= sequences

    def _take_prompt(self, tokens: int, in_batch: bool) -> None:
        bucket = self._tokens
        if bucket is None:
            return
        if tokens > bucket.capacity:
            raise APIError(f"The prompt has {tokens} tokens; this API key may use {bucket.capacity} per minute.")
        needed = tokens + bucket.kept_from_batches(tokens) if in_batch else tokens
        if needed > bucket.level:
            raise _exceeded(f"the {bucket.capacity} tokens per minute", "tokens", bucket.wait_s(needed))
        bucket.take(tokens)

    def take_generated(self, tokens: int) -> None:
        """Called for each output of the engine."""
        if self._tokens is not None:
            self._tokens.take(tokens)

    def headers(self) -> Headers:
        """OpenAI's headers: the limits, the remaining amounts, and the time until the buckets are full."""
        found: Headers = []
        for what, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is not None:
                left = max(0, math.floor(bucket.level))
                found += [
                    (b"x-ratelimit-limit-" + what, b"%d" % bucket.capacity),
                    (b"x-ratelimit-remaining-" + what, b"%d" % left),
                    (b"x-ratelimit-reset-" + what, _duration(bucket.wait_s(bucket.capacity))),
                ]
        return found


def _exceeded(limit: str, what: str, wait_s: float) -> APIError:
    return APIError(
        f"This API key has used {limit} that it may. Try again in {wait_s:.3g} s.",
        status=429,
        type=what,
        code="rate_limit_exceeded",
        headers=retry_after(wait_s),
    )


def _duration(seconds: float) -> bytes:
    """Like 120ms, 7.66s or 6m0s."""
    if seconds < 1:
        return b"%dms" % math.ceil(seconds * 1000)
    minutes, rest = divmod(seconds, 60)
    return f"{minutes:.0f}m{rest:.0f}s".encode() if minutes else f"{rest:.3g}s".encode()
