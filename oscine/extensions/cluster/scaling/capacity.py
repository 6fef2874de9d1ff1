"""What one replica of a pool can do, learnt from what the replicas did. Plain values; knows no policy."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from oscine.extensions.cluster.scaling.pool_load import ReplicaLoad

_MEMORY_S = 120.0  # of measurements: noise evens out, and another kind of load is learnt in two minutes
_COMING_MEMORY_S = 20.0  # of prompts that come: their lengths differ, so a rate over less time jumps
_FEWEST_TOKENS = 20  # that a mean is taken of
_LEAST_S = 1e-6  # of a further token; less is no measurement
_FULL = 0.95  # of sequences or pages: then requests wait for these, and not for their prompts' turn
_ORIGIN = 0.1  # weight of a measurement of no time for no sequences
_SUMS = ("weight", "x", "y", "xx", "xy")  # fields of Capacity
_HOPELESS = 0.9  # of a level: where one sequence alone takes longer, further replicas do not help


@dataclass(frozen=True, slots=True)
class Capacity:
    """Fading sums. A token takes a constant time and a part that grows with the sequences: a line.

    While the sequences hardly vary, the line passes through the origin: the worst case of fewer replicas.
    """

    weight: float = 0.0  # of measurements of further tokens
    x: float = 0.0  # sequences
    y: float = 0.0  # seconds per further token
    xx: float = 0.0
    xy: float = 0.0
    prompt_tokens: float = 0.0  # computed while there were always some to compute
    prompt_s: float = 0.0  # in so many seconds
    coming_tokens_s: float = 0.0  # of prompts, that all replicas together computed lately

    @property
    def prompt_tokens_s(self) -> float | None:
        """Prompt tokens per second that a replica computes; None until one had always some to compute."""
        return self.prompt_tokens / self.prompt_s if self.prompt_s > 0 and self.prompt_tokens > 0 else None

    def sequences(self, level_s: float) -> float:
        """Sequences of a replica with a further token in level_s; infinite where fewer bring it no sooner."""
        if not self.weight:
            return math.inf
        weight = self.weight + _ORIGIN
        spread = weight * self.xx - self.x * self.x
        each_s = max(0.0, (weight * self.xy - self.x * self.y) / spread) if spread > 0 else 0.0
        constant_s = (self.y - each_s * self.x) / weight
        if each_s <= 0 or constant_s + each_s > _HOPELESS * level_s:
            return math.inf
        return (level_s - constant_s) / each_s

    def learn(self, loads: Iterable[ReplicaLoad], elapsed_s: float) -> "Capacity":
        """`elapsed_s`: since the last time."""
        kept, coming = math.exp(-elapsed_s / _MEMORY_S), 0.0
        learnt = replace(self, **{name: kept * getattr(self, name) for name in _SUMS})
        for load in loads:
            learnt = learnt._with_tokens(load)._with_prompts(load)
            coming += load.computed_tokens_s
        kept = math.exp(-elapsed_s / _COMING_MEMORY_S)
        return replace(learnt, coming_tokens_s=kept * self.coming_tokens_s + (1 - kept) * coming)

    def _with_tokens(self, load: ReplicaLoad) -> "Capacity":
        if load.inter_tokens < _FEWEST_TOKENS or load.inter_token_s < _LEAST_S * load.inter_tokens:
            return self
        x, y = max(load.running, 1.0), load.inter_token_s / load.inter_tokens
        sums = (self.weight + 1, self.x + x, self.y + y, self.xx + x * x, self.xy + x * y)
        return replace(self, **dict(zip(_SUMS, sums, strict=True)))

    def _with_prompts(self, load: ReplicaLoad) -> "Capacity":
        """Only where prompts wait for nothing but their turn: neither for a free sequence nor for pages."""
        waits_for_else = 0 < load.max_num_seqs * _FULL <= load.most_running or load.kv_usage > _FULL
        if load.least_queued_tokens <= 0 or waits_for_else or load.window_s <= 0:
            return self
        kept = math.exp(-load.window_s / _MEMORY_S)
        return replace(
            self,
            prompt_tokens=self.prompt_tokens * kept + load.computed_tokens_s * load.window_s,
            prompt_s=self.prompt_s * kept + load.window_s,
        )
