"""Estimates the speed of each layout of several GPUs: ranks, separate engines, or engines that share experts.

The estimate follows from step times and from the number of sequences that the memory of each layout holds. An engine
that answers S requests together runs

    prompts:  S * prompt tokens, in steps of as many tokens as it computes at once
    answers:  one decode step of S rows per token of an answer, with the mean context
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from oscine.extensions.timing.machine import Group, NotMeasuredError, StepTimes

MARGIN = 0.05  # relative error of an estimate


class Layout(NamedTuple):
    """`engines` of `ranks` GPUs each."""

    engines: int
    ranks: int = 1
    shares_experts: bool = False

    @property
    def group(self) -> Group:
        return Group("experts", self.engines) if self.shares_experts else Group("tensor", self.ranks)

    def __str__(self) -> str:
        of_each = f"{self.ranks} GPUs" if self.ranks > 1 else "one GPU"
        named = f"1 engine of {of_each}" if self.engines == 1 else f"{self.engines} engines of {of_each} each"
        return f"{named} that share their experts" if self.shares_experts else named


class Load(NamedTuple):
    """Requests of equal size that arrive together."""

    prompt: int  # tokens
    answer: int
    requests: int | None = None  # None: as many as the caches hold

    @property
    def tokens(self) -> int:
        """The mean length of a sequence while it generates."""
        return self.prompt + self.answer // 2


@dataclass(frozen=True, slots=True)
class Candidate:
    layout: Layout
    sequences: int  # the most that an engine runs at once, by its limits and its memory
    step_tokens: int  # the most in a step of an engine


@dataclass(frozen=True, slots=True)
class Estimate:
    layout: Layout
    sequences: int  # per engine under the load
    output_tok_s: float  # of all requests that run at once
    tok_s_user: float  # of each of them, prompts included
    origin: str


def estimate(times: StepTimes, candidate: Candidate, load: Load) -> Estimate:
    """Raises NotMeasuredError."""
    layout, group = candidate.layout, candidate.layout.group
    asked = candidate.sequences if load.requests is None else -(-load.requests // layout.engines)
    sequences = max(1, min(asked, candidate.sequences))
    tokens = sequences * load.prompt
    step = min(tokens, candidate.step_tokens)
    prompts_s = times.prompts_s(group, step, load.prompt) * tokens / step
    answers_s = load.answer * times.decode_s(group, sequences, load.tokens)
    tok_s_user = load.answer / (prompts_s + answers_s)
    running = layout.engines * sequences if load.requests is None else min(load.requests, layout.engines * sequences)
    return Estimate(layout, sequences, running * tok_s_user, tok_s_user, times.origin(group))


def best_first(times: StepTimes, candidates: Iterable[Candidate], load: Load) -> list[Estimate]:
    """Sorted by output tokens per second.

    Of those within MARGIN of the best, the one with the most independent GPUs comes first. Candidates without known
    step times are left out.
    """
    found = []
    for candidate in candidates:
        try:
            found.append(estimate(times, candidate, load))
        except NotMeasuredError:
            continue

    found.sort(key=lambda one: one.output_tok_s, reverse=True)
    least = found[0].output_tok_s * (1 - MARGIN) if found else 0.0
    first = min(
        (one for one in found if one.output_tok_s >= least), key=lambda one: one.layout.group.num_gpus, default=None
    )
    return found if first is None else [first, *(one for one in found if one is not first)]
