"""What a layout does with a load, in closed form.

An engine with n decoding sequences makes steps of D(n) seconds, and the prompt of a request lengthens some of them by
P(n) in all. Of answers with m tokens, x = n / TPOT / m requests per second end, so

    TPOT = D + x P TPOT = D + n P / m                 x = n / (m D + n P)

With the share q = x P of prompts, a prompt waits as in a queue with one server for q P / 2 (1 - q), after the step that
runs. The number of sequences follows from the rate, or from the users by Little's law: users = n + x (TTFT + think).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from oscine.timing.features import StepFeatures, pairs_of
from oscine.timing.table import StepTable

_MOST_QUEUED = 0.98  # share of prompts, above which they never end


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
    tok_s: float  # of all engines
    tpot_s: float
    ttft_s: float  # infinite where the load is above what the engines can do
    rows: float  # decoding sequences per engine


@dataclass(frozen=True)
class EngineModel:
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
        decode_s, prompt_s, whole_s = self._times(rows)
        answer = self.demand.answer
        tpot_s = decode_s + rows * prompt_s / answer
        requests_s = rows / (answer * tpot_s)
        share = min(requests_s * prompt_s, _MOST_QUEUED)
        wait_s = share * whole_s / (2 * (1 - share)) + (self.demand.burst - 1) / 2 * whole_s
        return Working(rows, requests_s, tpot_s, decode_s / 2 + wait_s + whole_s)

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
        if found.requests_s < own or own * self._times(rows)[1] > _MOST_QUEUED:
            return found._replace(ttft_s=inf)
        return found._replace(requests_s=own)

    def _first(self, most: int, is_enough: Callable[[Working], bool]) -> int:
        """The fewest rows that are enough, or the most."""
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if is_enough(self.working(middle)) else (middle + 1, high)
        return low

    def _times(self, rows: int) -> tuple[float, float, float]:
        """Seconds of a decode step, that a prompt adds to steps, and of these steps."""
        if (known := self._known.get(rows)) is None:
            known = self._known[rows] = self._compute_times(rows)
        return known

    @cached_property
    def _known(self) -> dict[int, tuple[float, float, float]]:
        return {}

    def _compute_times(self, rows: int) -> tuple[float, float, float]:
        demand, step_s = self.demand, self.table.step_s
        decodes = StepFeatures(rows, rows * demand.context, demand.context, sampled=rows)
        decode_s, whole_s, steps, done = step_s(decodes), 0.0, 0, 0
        most = max(1, self.step_tokens - rows)
        while done < demand.prompt:
            chunk = min(most, demand.prompt - done)
            pairs = pairs_of(demand.cached + done, chunk)
            whole_s += step_s(
                decodes._replace(prompt_tokens=chunk, prompt_pairs=pairs, prompt_sequences=1, sampled=rows + 1)
            )
            done, steps = done + chunk, steps + 1
        return decode_s, max(whole_s - steps * decode_s, 1e-9), whole_s


def without_prompts(model: EngineModel) -> EngineModel:
    """Of a decode engine, whose prompts are computed elsewhere."""
    return replace(model, demand=model.demand._replace(prompt=1, cached=model.demand.cached + model.demand.prompt - 1))
