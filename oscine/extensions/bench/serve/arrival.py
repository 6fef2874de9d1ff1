"""When sessions are sent: a fixed number in flight (closed loop), or at a rate, however fast answers come (open)."""

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, slots=True)
class Arrival:
    """A closed loop has a concurrency. An open loop has a rate; its concurrency, if given, is a bound."""

    concurrency: int | None = None  # sessions in flight
    rate: float | None = None  # sessions per second, on average
    burst: int = 1  # sessions that arrive together; the rate stays the same
    constant: bool = False  # equal intervals in place of those of a Poisson process
    times_s: tuple[float, ...] = ()  # of sessions of an open loop, if they are given; then `rate` is their mean

    def offsets_s(self, count: int, seed: int) -> list[float]:
        """Seconds from the start to each arrival: all 0 in a closed loop."""
        if self.times_s:
            return [*self.times_s[:count]]
        if self.rate is None:
            return [0.0] * count
        num_bursts = -(-count // self.burst)
        mean_s = self.burst / self.rate
        gaps_s = np.full(num_bursts, mean_s)
        if not self.constant:
            gaps_s = np.random.default_rng(seed).exponential(mean_s, num_bursts)
        starts_s = np.cumsum(gaps_s) - gaps_s[0]  # the first burst arrives at the start
        offsets_s: list[float] = np.repeat(starts_s, self.burst)[:count].tolist()
        return offsets_s

    def share(self, index: int, count: int) -> "Arrival":
        """The share of the concurrency for client `index` of `count`. Arrivals at a rate are divided elsewhere."""
        if self.concurrency is None:
            return self
        own = self.concurrency // count + (index < self.concurrency % count)
        return replace(self, concurrency=own)
