"""How many drafts each sequence verifies: the numbers with the most tokens per second (decisions/0039).

    tokens per second = (sequences + drafts that will be accepted) / seconds of the step

The seconds, drafter included, were measured when the engine started (DecodeTimes). Two things are learnt while it runs:
how often the draft at each position is accepted, over all sequences and per sequence; and how much slower steps are
than in the table, as contexts grow.

Drafts that are never tried have no known acceptance. So some steps, the trials, have more drafts than seem best. Trials
may cost _SHARE of the time. Drafts that are accepted beyond expectation pay for further trials.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping
from itertools import accumulate
from operator import mul
from typing import Protocol

from oscine.engine.core.extension import EngineExtension, MakeExtension
from oscine.executor.start.build import BuiltExecutor
from oscine.settings.config import EngineOptions
from oscine.types import DecodeTimes, StepPlan

_SHARE = 0.003  # of the time, for trials
_PERIOD = 4  # steps between two decisions: one takes 0.15 ms for 256 sequences
_WINDOW = 64.0  # samples that averages cover: acceptance of all and of one sequence, times of steps
_PRIOR = 4.0  # weight, in samples, of the rate of the position before; a lone sequence has few samples of later ones
_UNMEASURED = {1: DecodeTimes(1.0, (1.0, 1.3))}  # if nothing was measured: a draft takes 0.3 plain steps
_LEVELS = 8  # levels per 1.0 of relative acceptance; sequences of one level have the same number of drafts


class Drafting(Protocol):
    """What the controller knows of one sequence: see Request."""

    num_drafts: int
    draft_steps: float
    drafts_expected: float
    drafts_accepted: float


class StepTable:
    """Seconds of a step by its number of sequences, linearly interpolated between the measured numbers."""

    def __init__(self, times: Mapping[int, DecodeTimes], max_drafts: int) -> None:
        self._sizes = sorted(times)
        self._rows = [self._row(times[size], max_drafts) for size in self._sizes]

    @staticmethod
    def _row(times: DecodeTimes, max_drafts: int) -> list[float]:
        """Seconds of plain steps, then with 0, 1, ... drafts per sequence; extrapolated beyond the measured numbers."""
        row = [times.plain, *times.drafting[: 1 + max_drafts]]
        row = [*accumulate(reversed(row), min)][::-1]  # more drafts are never faster: that is noise
        return row + [row[-1] + (row[-1] - row[-2]) * i for i in range(1, 3 + max_drafts - len(row))]

    def of(self, sequences: int) -> list[float]:
        i = bisect_left(self._sizes, sequences)
        if i in (0, len(self._sizes)):
            return self._rows[min(i, len(self._sizes) - 1)]
        low, high = self._sizes[i - 1 : i + 1]
        share = (sequences - low) / (high - low)
        return [a + share * (b - a) for a, b in zip(self._rows[i - 1], self._rows[i], strict=True)]


class _Correction:
    """Real seconds of a step: a * (seconds of the table) + b * (drafts per sequence) * (seconds of a plain step).

    Both factors grow with the context; b, as each draft reads it once more. They are a least-squares fit over the last
    steps.
    """

    def __init__(self, is_measured: bool) -> None:
        self.a, self.b = 1.0, 0.0
        self._sums = [0.0] * 5  # of 1, x, x * x, y, x * y
        self._knows_scale = is_measured  # of the table's seconds

    def of(self, seconds: float, drafts: float, plain: float) -> float:
        return self.a * max(0.1 * seconds, seconds + self.b / self.a * drafts * plain)

    def note(self, found: float, seconds: float, drafts: float, plain: float) -> None:
        """A step took `found` seconds; the table has `seconds`."""
        x, y = drafts * plain / seconds, found / seconds
        if self._knows_scale:  # an outlier: the machine was busy with something else
            y = min(y, 2 * self.of(seconds, drafts, plain) / seconds)
        self._knows_scale = True
        keep = 1 - 1 / _WINDOW
        self._sums = [keep * total + term for total, term in zip(self._sums, (1.0, x, x * x, y, x * y), strict=True)]
        count, xs, xxs, ys, xys = self._sums
        self.b = (xys - xs * ys / count) / (xxs - xs * xs / count + 1)  # + 1: b is 0 if all steps are alike
        self.a = max(1e-9, (ys - self.b * xs) / count)


class _Rates:
    """The hit rate at each position, given hits at all before it, over about the last _WINDOW samples."""

    def __init__(self, count: int, start: float) -> None:
        self._start = start
        self._samples, self._hits = [0.0] * count, [0.0] * count

    def add(self, num_samples: int, num_hits: int, times: int) -> None:
        """Adds `times` samples at the first `num_samples` positions, of which the first `num_hits` are hits."""
        for i in range(num_samples):
            self._samples[i] += times
            self._hits[i] += times * (i < num_hits)

    def by_position(self) -> list[float]:
        """The probability of hits up to each position. A position without samples has the rate of the one before it."""
        rates, expected = [], self._start
        for i, samples in enumerate(self._samples):
            if samples > _WINDOW:
                self._samples[i], self._hits[i] = _WINDOW, self._hits[i] * _WINDOW / samples
            prior = _PRIOR if i else 1.0
            expected = (self._hits[i] + prior * expected) / (self._samples[i] + prior)
            rates.append(expected)
        return [*accumulate(rates, mul)]


class _Acceptance:
    """The acceptance of drafts: over all sequences, and how much one sequence differs from it."""

    def __init__(self, max_drafts: int, certain: bool) -> None:
        """`certain`: as in SpeculationController."""
        self._certain = certain
        self._accepted, self._existing = _Rates(max_drafts, 0.8), _Rates(max_drafts, 1.0)
        self._new: Counter[tuple[int, int, int]] = Counter()
        self._variance = 0.0  # of the number of accepted drafts in a step of a sequence
        self._spread = self._weight = 0.0  # between sequences
        self.fold([])

    def note(self, request: Drafting, most: int, num_drafted: int, num_accepted: int) -> float:
        """Returns the number of accepted drafts less the expected one."""
        self._new[most, num_drafted, num_accepted] += 1
        keep, expected = 1 - 1 / _WINDOW, self._sums[most]
        self._variance += ((num_accepted - expected) ** 2 - self._variance) / _WINDOW
        request.draft_steps = keep * request.draft_steps + 1
        request.drafts_expected = keep * request.drafts_expected + expected
        request.drafts_accepted = keep * request.drafts_accepted + num_accepted
        return num_accepted - expected

    def fold(self, running: Collection[Drafting]) -> None:
        """Takes in what was noted since the last call."""
        for (most, num_drafted, num_accepted), times in self._new.items():
            self._accepted.add(min(num_accepted + 1, num_drafted if self._certain else most), num_accepted, times)
            self._existing.add(min(num_drafted + 1, most), num_drafted, times)
        self._new.clear()
        self.accepted = self._accepted.by_position()
        self.existing = [1.0] * len(self.accepted) if self._certain else self._existing.by_position()
        self._sums = [0.0, *accumulate(self.accepted)]
        if len(running) > 1:
            keep = 1 - 1 / _WINDOW
            self._spread *= keep
            self._weight *= keep
            for request in running:
                off = request.drafts_accepted - request.drafts_expected
                self._spread += off * off - request.draft_steps * self._variance
                self._weight += request.drafts_expected**2

    def levels(self, running: Collection[Drafting]) -> list[int]:
        """Acceptance relative to that of all, times _LEVELS; differences that may be chance are shrunk."""
        if self._spread <= 0:
            return [_LEVELS] * len(running)
        spread, variance, found = self._spread / self._weight, self._variance, []
        for request in running:
            expected = request.drafts_expected
            off, share = request.drafts_accepted - expected, spread * expected
            ratio = 1 + off * share / (share * expected + request.draft_steps * variance + 1e-9)
            found.append(max(0, round(ratio * _LEVELS)))
        return found


class SpeculationController(EngineExtension):
    """Sets Request.num_drafts of running requests."""

    def __init__(self, max_drafts: int, times: Mapping[int, DecodeTimes] | None, *, certain: bool) -> None:
        """`times`: by number of sequences, if they were measured. `certain`: a head drafts, so a sequence has as many
        drafts as it may have, or none in the first step after plain ones."""
        self._max_drafts, self._certain = max_drafts, certain
        self._table, self._correction = StepTable(times or _UNMEASURED, max_drafts), _Correction(times is not None)
        self._acceptance = _Acceptance(max_drafts, certain)
        self._by_level: dict[int, int] = {}
        self._is_plain = False  # whether drafts do not seem to pay
        self._seconds_saved = 0.0  # for trials
        self._knows_nothing = True  # the first trials are free
        self._steps_left = 0  # until the next decision
        self._num_tried = 1
        self._num_asked = 0  # sequences that could have drafts, since the last step
        self._surprise = 0.0  # drafts that were accepted beyond those expected, since the last step

    def first_token(self, request: Drafting) -> None:
        """A request has its first token."""
        nearest = min(self._by_level, key=lambda level: abs(level - _LEVELS), default=0)
        request.num_drafts = self._by_level.get(nearest, 0)

    def after_drafts(self, request: Drafting, most: int, num_drafted: int, num_accepted: int) -> None:
        """One step of a sequence that might have `most` >= 1 drafts."""
        self._num_asked += 1
        self._knows_nothing = False
        if num_drafted or not self._certain:
            self._surprise += self._acceptance.note(request, most, num_drafted, num_accepted)

    def after_step(self, plan: StepPlan, num_drafted: int, seconds: float, *, in_vain: bool) -> None:
        """A step took so many seconds. Steps that compute prompts are ignored, and those in vain."""
        if in_vain:
            return
        num_asked, surprise, self._num_asked, self._surprise = self._num_asked, self._surprise, 0, 0.0
        batch = len(plan.sequences)
        if plan.new or not batch or plan.sequences[-1].num_tokens > 1:  # sequences with one token come first
            return
        plain, *drafting = self._table.of(batch)
        drafts = num_drafted / batch
        expected = _at(drafting, drafts) if num_asked or num_drafted else plain
        self._correction.note(seconds, expected, drafts, plain)
        self._seconds_saved += _SHARE * self._correction.of(expected, drafts, plain)
        if self._is_plain:
            self._seconds_saved += max(0.0, surprise) * self._correction.of(plain, 0, plain) / batch

    def before_step(self, running: Collection[Drafting]) -> None:
        """Call before a step is scheduled. A decision holds for some steps, so most calls do nothing."""
        self._steps_left -= 1
        if self._steps_left > 0 or not running:
            return
        self._steps_left = _PERIOD
        self._acceptance.fold(running)
        levels = self._acceptance.levels(running)
        counts, batch = Counter(levels), len(running)
        plain, *drafting = self._table.of(batch)
        best, speed = self._best(counts, drafting, plain)
        plain_speed = batch / self._correction.of(plain, 0, plain)
        self._is_plain = speed < plain_speed
        if self._is_plain:
            best, speed = dict.fromkeys(counts, 0), plain_speed
        self._by_level = self._tried(best, speed, counts, drafting, plain) or best
        for request, level in zip(running, levels, strict=True):
            request.num_drafts = self._by_level[level]

    def _best(self, counts: Counter[int], drafting: list[float], plain: float) -> tuple[dict[int, int], float]:
        """The best number of drafts for each level, not all 0, and the tokens per second.

        The search is greedy: the draft with the most tokens per row is added first.
        """
        existing, batch, seconds_of = self._acceptance.existing, counts.total(), self._correction.of
        candidates: list[tuple[float, int, int, float]] = []
        for level in counts:
            gains = self._gains(level)
            per_row = accumulate((gain / share for gain, share in zip(gains, existing, strict=True)), min)
            candidates += ((-order, i, level, gains[i]) for i, order in enumerate(per_row))
        candidates.sort()
        rows, tokens, best, num_best = 0.0, float(batch), 0.0, 0
        for number, (_, i, level, gain) in enumerate(candidates, 1):
            rows += counts[level] * existing[i]
            tokens += counts[level] * gain
            drafts = rows / batch
            speed = tokens / seconds_of(_at(drafting, drafts), drafts, plain)
            if speed > best:
                best, num_best = speed, number
        chosen = Counter(level for _, _, level, _ in candidates[:num_best])
        return {level: chosen[level] for level in counts}, best

    def _tried(
        self, best: dict[int, int], speed: float, counts: Counter[int], drafting: list[float], plain: float
    ) -> dict[int, int] | None:
        """The drafts of a trial: one more per sequence, or in turns the most; None until its expected loss is saved."""
        most, deeper = self._max_drafts, self._is_plain and self._num_tried % 2 == 1
        if min(best.values()) == most:
            tried = dict.fromkeys(counts, max(1, most - 1))
        else:
            tried = {level: most if deeper else min(most, drafts + 1) for level, drafts in best.items()}
        drafts = tokens = 0.0
        for level, count in counts.items():
            drafts += count * sum(self._acceptance.existing[: tried[level]])
            tokens += count * (1 + sum(self._gains(level)[: tried[level]]))
        drafts /= counts.total()
        loses = self._correction.of(_at(drafting, drafts), drafts, plain) - tokens / speed
        self._seconds_saved = min(self._seconds_saved, max(0.0, loses))
        if tried == best or (self._seconds_saved < loses and not self._knows_nothing):
            return None
        self._seconds_saved = 0.0
        self._num_tried += not self._knows_nothing
        self._steps_left = 2 if self._is_plain and self._certain else 1  # the first one has no drafts yet
        return tried

    def _gains(self, level: int) -> list[float]:
        """Tokens that the draft at each position is expected to bring a sequence."""
        return [min(1.0, tokens * level / _LEVELS) for tokens in self._acceptance.accepted]


def _at(values: list[float], x: float) -> float:
    """Linear interpolation between values at 0, 1, ..."""
    i = min(int(x), len(values) - 2)
    return values[i] + (x - i) * (values[i + 1] - values[i])


def of_engine(built: BuiltExecutor, options: EngineOptions) -> MakeExtension:
    """For an executor that has a drafter."""
    has_head = options.speculation.method == "eagle3"
    return lambda loop: SpeculationController(built.max_drafts, built.decode_times, certain=has_head)
