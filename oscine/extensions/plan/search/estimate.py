"""What a layout does with a load, in closed form.

An engine with n decoding sequences and answers of m tokens ends n / m of them per step, and begins as many. So a share
f = 1 - exp(-k n / m) of its steps has prompts, where a prompt needs k steps, with n / (m f) prompts each:

    TPOT = (1 - f) decode step + f mixed step          requests per second = n / (m TPOT)

With a share q of the prompt tokens that steps could take, a prompt waits q s / 2 (1 - q) as in a queue with one server
and services of s, after half a step. The number of sequences follows from the rate, or from the users by Little's law:
users = n + rate (TTFT + think).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, exp, inf
from typing import NamedTuple

from oscine.timing.features import StepFeatures, pairs_of
from oscine.timing.table import StepTable

_MOST_QUEUED = 0.98  # share of prompt tokens, above which a wait has no end


class Demand(NamedTuple):
    """Of all clients, in means."""

    prompt: int  # tokens that are not cached
    cached: int  # tokens before them
    answer: int
    users: int | None = None  # of a closed loop, else
    rate: float = 0.0  # requests per second
    think_s: float = 0.0  # between an answer and the next request
    burst: int = 1

    @property
    def context(self) -> int:
        """Of a decode, on average."""
        return self.cached + self.prompt + self.answer // 2


class Working(NamedTuple):
    """An engine with so many decoding sequences."""

    rows: float
    requests_s: float
    tpot_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """What engines do together, in means."""

    tok_s: float  # of all engines
    tpot_s: float
    ttft_s: float  # infinite where the load is above what the engines can do
    rows: float  # decoding sequences per engine


@dataclass(frozen=True)
class EngineModel:
    """Engines with these limits under this demand."""

    table: StepTable
    demand: Demand
    max_num_seqs: int
    step_tokens: int  # of a step of the engine

    def estimate(self, engines: int) -> Estimate:
        """Raises NotMeasuredError."""
        found = self._of_users(engines) if self.demand.users is not None else self._of_rate(engines)
        return Estimate(found.requests_s * self.demand.answer * engines, found.tpot_s, found.ttft_s, found.rows)

    def working(self, rows: int) -> Working:
        """With so many sequences all the time."""
        if (known := self._known.get(rows)) is None:
            known = self._known[rows] = self._work(rows)
        return known

    def _work(self, rows: int) -> Working:
        demand = self.demand
        most, begun = max(1, self.step_tokens - rows), rows / demand.answer
        steps = ceil(demand.prompt / most)
        mixed = 1 - exp(-begun * steps)
        prompts = min(most / demand.prompt, begun / mixed)  # of a mixed step
        mixed_s = self._mixed_s(rows, prompts)
        tpot_s = (1 - mixed) * self._decode_s(rows) + mixed * mixed_s
        share = begun * demand.prompt / most
        if share > 1:  # not so many sequences begin
            tpot_s = mixed_s
        share, service_s = min(share, _MOST_QUEUED), steps * mixed_s
        wait_s = share * service_s / (2 * (1 - share)) + (demand.burst - 1) / 2 * mixed_s * demand.prompt / most
        requests_s = min(begun, most / demand.prompt) / tpot_s
        return Working(rows, requests_s, tpot_s, tpot_s / 2 + wait_s + service_s)

    def _decode_s(self, rows: int) -> float:
        return self.table.step_s(self._decodes(rows))

    def _decodes(self, rows: int) -> StepFeatures:
        return StepFeatures(rows, rows * self.demand.context, sampled=rows)

    def _mixed_s(self, rows: int, prompts: float) -> float:
        """Of a step with so many prompts, or with a part of one."""
        demand = self.demand
        tokens = max(1, round(prompts * demand.prompt))
        pairs = round(pairs_of(demand.cached, demand.prompt) * tokens / demand.prompt)
        step = self._decodes(rows)._replace(prompt_tokens=tokens, prompt_pairs=pairs)
        return self.table.step_s(step._replace(prompt_sequences=max(1, round(prompts)), sampled=rows + 1))

    @cached_property
    def _known(self) -> dict[int, Working]:
        return {}

    def _of_users(self, engines: int) -> Working:
        assert self.demand.users is not None
        own, think_s = self.demand.users / engines, self.demand.think_s
        most = max(1, min(self.max_num_seqs, int(own)))

        def users(found: Working) -> float:
            return found.rows + found.requests_s * (found.ttft_s + think_s)

        rows = self._first(most, lambda found: users(found) >= own)
        found = self.working(rows)
        if rows == self.max_num_seqs and users(found) < own:  # the others wait for a place
            return found._replace(ttft_s=found.ttft_s + (own - users(found)) / found.requests_s)
        if users(found) > own:
            return found._replace(requests_s=own / (found.ttft_s + think_s + self.demand.answer * found.tpot_s))
        return found

    def _of_rate(self, engines: int) -> Working:
        own = self.demand.rate / engines
        rows = self._first(self.max_num_seqs, lambda found: found.requests_s >= own)
        found = self.working(rows)
        if found.requests_s < own:
            return found._replace(ttft_s=inf)
        return found._replace(requests_s=own)

    def _first(self, most: int, is_enough: Callable[[Working], bool]) -> int:
        """The fewest rows that are enough, or the most."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if is_enough(self.working(middle)) else (middle + 1, high)
        return low


def without_prompts(model: EngineModel) -> EngineModel:
    """Of a decode engine, whose prompts are computed elsewhere."""
    return replace(model, demand=model.demand._replace(prompt=1, cached=model.demand.cached + model.demand.prompt - 1))
