"""What one replica of a pool can do, learnt from what the replicas did.

Two things are measured, because they belong to the machine and the model and change little with the load: how long a
further token takes while so many sequences run, and how many tokens of prompts a second are computed while there are
always some to compute. Plain values; knows no policy.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from oscine.cluster.scaling.pool_load import ReplicaLoad

_NEWEST = 0.2  # weight of a new measurement: noise of one window is damped, another load is learnt in ten seconds
_FEWEST_TOKENS = 20  # that a mean is taken of
_LEAST_S = 1e-6  # of a further token; no engine is so quick, and less is no measurement
_PROMPT_MEMORY_S = 60.0  # of time that prompts were computed: admissions come in lumps of whole prompts
_FULL = 0.95  # of sequences or pages: then requests wait for these, and not for their prompts' turn
_COMING_MEMORY_S = 20.0  # prompts of very different lengths make a rate over less time jump
# Where one sequence alone takes more than this of the level, further replicas do not bring it about.
_HOPELESS = 0.9
_CONTRADICTION = 0.8  # more sequences that took less than this of the time: nothing else than another kind of load


@dataclass(frozen=True, slots=True)
class TokenTime:
    """What was measured with about so many sequences: one record for each power of two."""

    power: int
    sequences: float
    seconds: float  # from one token of a sequence to the next


@dataclass(frozen=True, slots=True)
class MeasuredCapacity:
    token_times: tuple[TokenTime, ...] = ()  # by power
    prompt_tokens: float = 0.0  # computed
    prompt_s: float = 0.0  # in so many seconds, both fading
    coming_tokens_s: float = 0.0  # of prompts, that all replicas together computed lately

    @property
    def prompt_tokens_s(self) -> float | None:
        """Tokens of prompts a second that a replica computes; None until one had always some to compute."""
        return self.prompt_tokens / self.prompt_s if self.prompt_s > 0 and self.prompt_tokens > 0 else None

    def learn(self, loads: Iterable[ReplicaLoad], elapsed_s: float) -> "MeasuredCapacity":
        """`elapsed_s`: since the last time."""
        learnt, coming = self, 0.0
        for load in loads:
            learnt = learnt._learn_token_time(load)._learn_prompts(load)
            coming += load.computed_tokens_s
        kept = math.exp(-elapsed_s / _COMING_MEMORY_S)
        return replace(learnt, coming_tokens_s=kept * self.coming_tokens_s + (1 - kept) * coming)

    def sequences(self, level_s: float, *, cautious: bool) -> float:
        """That a replica runs at once with a further token in level_s; infinite where sequences do not matter.

        The time of a step is a constant and a part that grows with the sequences: a line through what was measured.
        Where there is one measurement only, the constant is not known. Then, and where that measurement is above the
        level, all of it is taken to grow; that is the worst case of fewer replicas, so `cautious` wants it anyway.
        """
        if not self.token_times or not self.attainable(level_s):
            return math.inf
        if len(self.token_times) > 1:
            constant_s, each_s = self._line()
            return (level_s - constant_s) / each_s if each_s > 0 else math.inf
        (only,) = self.token_times
        return only.sequences * level_s / only.seconds if cautious or only.seconds > level_s else math.inf

    def attainable(self, level_s: float) -> bool:
        """Whether fewer sequences per replica bring the ITL below level_s, by the measurements."""
        if len(self.token_times) > 1:
            return self._line()[0] < _HOPELESS * level_s
        return all(t.sequences > 1.0 or t.seconds < _HOPELESS * level_s for t in self.token_times)

    def _line(self) -> tuple[float, float]:
        """Least squares, neither part below zero."""
        n = len(self.token_times)
        mean_x = sum(t.sequences for t in self.token_times) / n
        mean_y = sum(t.seconds for t in self.token_times) / n
        spread = sum((t.sequences - mean_x) ** 2 for t in self.token_times)
        each_s = sum((t.sequences - mean_x) * (t.seconds - mean_y) for t in self.token_times) / max(spread, 1e-9)
        if each_s <= 0:
            return mean_y, 0.0
        constant_s = mean_y - each_s * mean_x
        return (constant_s, each_s) if constant_s >= 0 else (0.0, mean_y / mean_x)

    def _learn_token_time(self, load: ReplicaLoad) -> "MeasuredCapacity":
        least_s = _LEAST_S * load.inter_tokens
        if load.inter_tokens < _FEWEST_TOKENS or load.inter_token_s < least_s or load.running < 0.5:
            return self
        seconds, sequences = load.inter_token_s / load.inter_tokens, max(load.running, 1.0)
        power = round(math.log2(sequences))
        old = next((t for t in self.token_times if t.power == power), TokenTime(power, sequences, seconds))
        new = TokenTime(
            power,
            old.sequences + _NEWEST * (sequences - old.sequences),
            old.seconds + _NEWEST * (seconds - old.seconds),
        )
        kept = [t for t in self.token_times if t.power != power and not _contradicts(t, new)]
        return replace(self, token_times=tuple(sorted([*kept, new], key=lambda t: t.power)))

    def _learn_prompts(self, load: ReplicaLoad) -> "MeasuredCapacity":
        """Only where prompts wait for nothing but their turn: neither for a free sequence nor for pages."""
        waits_for_else = 0 < load.max_num_seqs * _FULL <= load.most_running or load.kv_usage > _FULL
        if load.least_queued_tokens <= 0 or waits_for_else or load.window_s <= 0:
            return self
        kept = math.exp(-load.window_s / _PROMPT_MEMORY_S)
        return replace(
            self,
            prompt_tokens=self.prompt_tokens * kept + load.computed_tokens_s * load.window_s,
            prompt_s=self.prompt_s * kept + load.window_s,
        )


def _contradicts(old: TokenTime, new: TokenTime) -> bool:
    """The old measurement is of a load that is no more: of shorter contexts, say."""
    less, more = (old, new) if old.power < new.power else (new, old)
    return more.seconds < _CONTRADICTION * less.seconds
