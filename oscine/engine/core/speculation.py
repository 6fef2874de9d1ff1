"""How many drafts each sequence verifies: as many as make tokens come fastest, by what was measured.

A step that verifies drafts has more rows, and takes longer. It is worth it if enough drafts are accepted. So three
things are measured all the time: the seconds of a step by its rows, plain and with drafts; how often the draft at each
position is accepted, over all sequences and per sequence; and how often there is a draft at each position. What the
drafter costs is part of the seconds of steps with drafts.

No estimate is trusted without limit. Each step with drafts is compared with the time that plain steps would have taken
for its tokens. The difference goes to an account, and plain steps add half a percent of their time, those of a lone
sequence a percent: its few tokens leave less time to find out. Drafts that lose time are paid from the account,
exploration included. While it is empty, all steps are plain.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import accumulate, islice, repeat
from operator import mul
from typing import Protocol

from oscine.types import StepPlan

ALLOWANCE, ALLOWANCE_ALONE = 0.005, 0.01  # of the time of plain steps, for exploration; of a lone sequence
_MOST_SAVED, _MOST_OWED = 10.0, 3.0  # plain steps that the account holds at most
_SAVED_AT_START, _SAVED_ALONE = 2.0, 4.0
_LATEST = 15  # steps of one size whose times count
_LONG = 1024  # steps with drafts, after which the time of a size that none of them had is forgotten
_PERIOD = 8  # steps between two decisions, and one more for each 64 sequences
_EXPLORES_EVERY = 4  # decisions, while drafts pay
_PLAIN_EVERY = 64  # steps with drafts, until the time of a plain step is measured again
_WINDOW = 64.0  # samples that an acceptance rate is averaged over, about
_OWN_WINDOW = 24.0  # the same of one sequence
_PRIOR = 4.0  # samples that the rate of all sequences counts for in the rate of one
_FARTHEST = 2.0  # rows that are tried, as a multiple of the most that were measured
_OPTIMISM = 0.95  # of the time expected of a number of rows that was never measured: so it will be
_MARGIN = 1.01  # gain below which drafts are not worth it
_LEVELS = 8  # of acceptance, that sequences are grouped by


class Drafting(Protocol):
    """What the controller knows of one sequence: see Request."""

    num_drafts: int
    draft_trials: float
    drafts_accepted: float


@dataclass(slots=True)
class StepTimes:
    """Typical seconds of a step by its rows. Sizes above 16 rows are put together in steps of about 6 %."""

    skips_first: bool = False  # of each size: it may prepare what later steps reuse
    seconds: dict[int, float] = field(default_factory=dict)
    _latest: dict[int, deque[float]] = field(default_factory=dict)
    _noted: dict[int, int] = field(default_factory=dict)  # by size: the number of the last step
    _num_steps: int = 0

    @staticmethod
    def size_of(rows: int) -> int:
        return rows - rows % (1 << max(0, rows.bit_length() - 5))

    def note(self, rows: int, seconds: float) -> float | None:
        """Returns the typical seconds, if they are known: the median of the latest steps; of two, the faster one."""
        size = self.size_of(rows)
        self._num_steps += 1
        self._noted[size] = self._num_steps
        latest = self._latest.get(size)
        if latest is None:
            latest = self._latest[size] = deque(maxlen=_LATEST)
            if self.skips_first:
                return None
        latest.append(seconds)
        self.seconds[size] = typical = sorted(latest)[(len(latest) - 1) // 2]
        return typical

    def forget_old(self) -> None:
        """Sizes without a step for long become unknown, so that they are tried again."""
        for size in [size for size in self.seconds if self._num_steps - self._noted[size] > _LONG]:
            del self.seconds[size]
            self._latest[size].clear()

    def of(self, rows: int) -> float | None:
        return self.seconds.get(self.size_of(rows))


@dataclass(slots=True)
class StepCurve:
    """Expected seconds of a step with drafts: measured sizes, and straight lines between them.

    A step is not expected to take longer than one with more rows: its time was measured in a bad moment.
    """

    sizes: list[int]
    seconds: list[float]
    measured: Collection[int]

    @classmethod
    def of(cls, batch: int, plain: StepTimes, drafting: StepTimes) -> "StepCurve":
        points = plain.seconds | drafting.seconds
        size = StepTimes.size_of(batch)
        sizes = [size, *sorted(larger for larger in points if larger > size)]
        seconds = [*accumulate((points[size] for size in reversed(sizes)), min)][::-1]
        return cls(sizes, seconds, drafting.seconds)

    def at(self, rows: float) -> float:
        i = bisect_left(self.sizes, rows)
        if i == len(self.sizes):
            slope = max(0.0, self.seconds[-1] - self.seconds[0]) / max(1, self.sizes[-1] - self.sizes[0])
            expected = self.seconds[-1] + slope * (rows - self.sizes[-1])
        elif i == 0:
            return self.seconds[0]
        else:
            low, high = self.sizes[i - 1], self.sizes[i]
            share = (rows - low) / (high - low)
            expected = self.seconds[i - 1] + share * (self.seconds[i] - self.seconds[i - 1])
        return expected if StepTimes.size_of(round(rows)) in self.measured else expected * _OPTIMISM


class _Shares:
    """A rate per position, over about the latest _WINDOW samples of it.

    Without samples it is the rate of the position before, if `chained`. Else, and for the first one, it is `start`.
    """

    def __init__(self, count: int, start: float, chained: bool = True) -> None:
        self._start, self._chained = start, chained
        self._samples, self._hits = [0.0] * count, [0.0] * count
        self._new_samples, self._new_hits = [0] * (count + 1), [0] * (count + 1)

    def note(self, num_samples: int, num_hits: int) -> None:
        """The first positions had a sample, and the first of these were hits."""
        self._new_samples[num_samples] += 1
        self._new_hits[num_hits] += 1

    def fold(self) -> None:
        """Takes in what was noted since the last call."""
        for sums, new in ((self._samples, self._new_samples), (self._hits, self._new_hits)):
            reached = list(accumulate(reversed(new[1:])))[::-1]
            for i, count in enumerate(reached):
                sums[i] += count
            new[:] = [0] * len(new)
        for i, samples in enumerate(self._samples):
            if samples > _WINDOW:
                self._samples[i] = _WINDOW
                self._hits[i] *= _WINDOW / samples

    @property
    def by_position(self) -> list[float]:
        rates, expected = [], self._start
        for hits, samples in zip(self._hits, self._samples, strict=True):
            rates.append((hits + expected) / (samples + 1))
            if self._chained:
                expected = rates[-1]
        return rates


class _Rates:
    """How often there are drafts, and how often each is accepted if all before it are. Older samples count less."""

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.of_all = 0.6  # of all compared drafts, how many were accepted
        self.existing = _Shares(max_drafts, 1.0)  # drafts, of those that were asked for
        self.following = _Shares(max_drafts, 1.0, chained=False)  # the same where all before were accepted
        self.accepted = _Shares(max_drafts, self.of_all)  # of the drafts that were compared
        self._trials, self._num_accepted = _PRIOR, _PRIOR * self.of_all
        self._num_new = 0

    def note(self, most: int, num_drafted: int, num_accepted: int) -> int:
        """Returns how many drafts were compared: those accepted, and one that was not."""
        self._num_new += 1
        num_tried = min(num_accepted + 1, num_drafted)
        self.existing.note(most, num_drafted)
        self.following.note(min(num_accepted + 1, most), num_tried)
        self.accepted.note(num_tried, num_accepted)
        keep = _WINDOW / (_WINDOW + num_tried)
        self._trials = self._trials * keep + num_tried
        self._num_accepted = self._num_accepted * keep + num_accepted
        return num_tried

    def fold(self) -> None:
        """Takes in what was noted since the last call."""
        if self._num_new:
            for shares in (self.existing, self.following, self.accepted):
                shares.fold()
            self.of_all = max(0.02, self._num_accepted / self._trials)
            self._num_new = 0


class SpeculationController:
    """Sets Request.num_drafts of running requests. Call note_drafts for the sequences of a step, then note_step."""

    def __init__(self, max_drafts: int) -> None:
        self._rates = _Rates(max_drafts)
        self._plain = StepTimes()  # of steps in which no sequence could have drafts
        self._drafting = StepTimes(skips_first=True)  # of all others
        self._saved: float | None = None  # the account, in seconds; None: no step was measured yet
        self._by_level = [0] * (_LEVELS + 1)  # drafts of a sequence, by its level of acceptance
        self._explorers: list[Drafting] = []  # have more drafts in one step than they would have
        self._num_explored = 0
        self._steps_left = 0  # until the next decision
        self._num_decisions = 0
        self._batch = 0  # sequences, at the last decision
        self._num_asked = self._num_accepted = 0  # since the last step: sequences that could have drafts, drafts
        self._steps_since_plain = 0

    def begin(self, request: Drafting) -> None:
        """A request has its first token."""
        request.num_drafts = self._by_level[self._level(request)]
        self._steps_left = min(self._steps_left, 1 + self._batch // 64)

    def note_drafts(self, request: Drafting, most: int, num_drafted: int, num_accepted: int) -> None:
        """One step of a sequence: its limit `most` >= 1 of drafts, how many it had, and how many were accepted."""
        self._num_asked += 1
        self._num_accepted += num_accepted
        num_tried = self._rates.note(most, num_drafted, num_accepted)
        if num_tried:
            keep = _OWN_WINDOW / (_OWN_WINDOW + num_tried)
            request.draft_trials = request.draft_trials * keep + num_tried
            request.drafts_accepted = request.drafts_accepted * keep + num_accepted

    def note_step(self, plan: StepPlan, num_drafted: int, seconds: float) -> None:
        """A step has ended that took so long. Steps that compute prompts are not compared."""
        num_asked, num_accepted = self._num_asked, self._num_accepted
        self._num_asked = self._num_accepted = 0
        batch = len(plan.sequences)
        if plan.new or not batch or plan.sequences[-1].num_tokens > 1:  # sequences with one token come first
            return
        if not num_asked and not num_drafted:
            follows_drafts, self._steps_since_plain = self._steps_since_plain > 0, 0
            typical = self._plain.of(batch)
            if follows_drafts and typical is not None:  # what the change costs is a cost of drafts
                self._save(typical - min(seconds, 2 * typical), typical)
                return
            typical = self._plain.note(batch, seconds)
            assert typical is not None
            self._save((ALLOWANCE_ALONE if batch == 1 else ALLOWANCE) * typical, typical)
            return
        self._steps_since_plain += 1
        typical = self._drafting.of(batch + num_drafted)  # without this step, which may be far off
        self._drafting.note(batch + num_drafted, seconds)
        plain = self._plain.of(batch)
        if plain is not None:
            most = 2 * (plain if typical is None else typical)
            self._save(plain * (1 + num_accepted / batch) - min(seconds, most), plain)

    def decide(self, running: Collection[Drafting]) -> None:
        """Before a step is scheduled. Most calls do nothing: a decision holds for some steps."""
        self._steps_left -= 1
        is_overdrawn = self._saved is not None and self._saved < 0 and any(self._by_level)
        if (self._steps_left > 0 and not is_overdrawn) or not running:
            return
        self._num_decisions += 1
        self._batch = batch = len(running)
        self._steps_left = _PERIOD + batch // 64
        explorers, self._explorers = self._explorers, []
        for request in explorers:
            request.num_drafts = 0
        plain = self._plain.of(batch)
        if plain is None or self._saved is None or self._steps_since_plain >= _PLAIN_EVERY:
            self._steps_left = 2  # the first follows drafts
            self._drafting.forget_old()
            self._set(running, [0] * (_LEVELS + 1))
            return
        self._rates.fold()
        curve = StepCurve.of(batch, self._plain, self._drafting)
        may_draft = self._saved > 0 and len(curve.sizes) > 1
        best = self._best(running, curve, plain) if may_draft else [0] * (_LEVELS + 1)
        self._set(running, best)
        if explorers:
            return
        if not any(best):
            self._explore(running, curve, plain)
        elif self._saved >= _MOST_SAVED * plain and self._num_decisions % _EXPLORES_EVERY == 0:
            self._explore_more(running)

    def _save(self, seconds: float, plain: float) -> None:
        at_start = _SAVED_ALONE if self._batch == 1 else _SAVED_AT_START
        saved = at_start * plain if self._saved is None else self._saved
        self._saved = max(-_MOST_OWED * plain, min(_MOST_SAVED * plain, saved + seconds))

    def _set(self, running: Collection[Drafting], by_level: list[int]) -> None:
        if any(by_level) or any(self._by_level):
            for request in running:
                request.num_drafts = by_level[self._level(request)]
        self._by_level = by_level

    def _best(self, running: Collection[Drafting], curve: StepCurve, plain: float) -> list[int]:
        """Drafts by level. The draft that adds most tokens is added first, as long as tokens come faster."""
        counts = Counter(map(self._level, running))
        batch, rates, following = len(running), self._rates.accepted.by_position, self._rates.following.by_position
        existing = list(accumulate(self._rates.existing.by_position, min))
        of_asking = existing[0]
        following[0] = 1.0  # a sequence that has drafts has the first
        of_steps = 1 - (1 - of_asking) ** batch  # steps in which any sequence has drafts
        per_sequence = (1 + (batch - 1) * of_asking) / batch  # sequences with drafts in such a step
        scale = 1 / self._rates.of_all
        candidates: list[tuple[float, int, float]] = []  # tokens of a sequence, level, rows of all its sequences
        for level in counts:
            chances = (min(0.99, rate * scale * level / _LEVELS) for rate in rates)
            accepted = accumulate(map(mul, chances, following), mul)
            having = (counts[level] * per_sequence * share / of_asking for share in existing)
            candidates += zip(accepted, repeat(level), having, strict=False)
        candidates.sort(reverse=True)
        without_s = curve.at(batch)
        rows = tokens = float(batch)
        most, num_best = batch / plain * _MARGIN, 0
        for i, (probability, level, num_rows) in enumerate(candidates, 1):
            rows += num_rows
            if rows > _FARTHEST * curve.sizes[-1] + 1:
                break
            tokens += counts[level] * per_sequence * probability
            seconds = without_s + of_steps * (curve.at(rows) - without_s)
            per_second = (batch + of_steps * (tokens - batch)) / seconds
            if per_second > most:
                most, num_best = per_second, i
        chosen = Counter(level for _, level, _ in candidates[:num_best])
        return [chosen[level] for level in range(_LEVELS + 1)]

    def _explore(self, running: Collection[Drafting], curve: StepCurve, plain: float) -> None:
        """A quarter of the sequences and all of them, in turns, have drafts in the next step, if the account can pay.
        The drafter takes some time for any number of drafts, so few of them alone look too expensive."""
        assert self._saved is not None
        count = max(1, len(running) // 4) if self._num_explored % 2 == 0 else len(running)
        num_drafts = self._rates.max_drafts if self._num_explored % 4 == 2 else 1
        loss = max(0.0, curve.at(len(running) + count * num_drafts) - plain)
        if self._saved <= min(loss, _MOST_SAVED / 2 * plain):  # a time that was measured too long does not end it all
            return
        self._send(running, count)
        for request in self._explorers:
            request.num_drafts = num_drafts

    def _explore_more(self, running: Collection[Drafting]) -> None:
        """Drafts pay, and the account is full. A few sequences have more of them in the next step: the time of so many
        rows may have been measured in a bad moment."""
        self._send(running, max(1, len(running) // 4))
        most = self._rates.max_drafts
        for request in self._explorers:
            request.num_drafts = most if self._num_explored % 2 else min(most, 1 + request.num_drafts)

    def _send(self, running: Collection[Drafting], count: int) -> None:
        """Takes so many sequences in turn, for one step."""
        start = self._num_explored * count % len(running)
        self._explorers = list(islice(running, start, start + count))
        self._num_explored += 1
        self._steps_left = 1

    def _level(self, request: Drafting) -> int:
        """The rate of accepted drafts, of its own as far as it is known, in parts of _LEVELS."""
        accepted = request.drafts_accepted + _PRIOR * self._rates.of_all
        return int(accepted / (request.draft_trials + _PRIOR) * _LEVELS + 0.5)
