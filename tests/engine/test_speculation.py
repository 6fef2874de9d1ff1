"""The controller of speculation in a simulated engine: step times and acceptance are given, throughput is compared."""

import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from oscine.engine.core.speculation import SpeculationController, StepCurve, StepTimes
from oscine.types import ScheduledSequence, StepPlan

Times = Callable[[float], float]  # milliseconds of a step by its rows
Accepted = list[float]  # by position: the probability that a draft is accepted after those before it


def table(points: dict[int, float]) -> Times:
    """Straight lines between points, and beyond the last."""
    sizes = sorted(points)

    def of(rows: float) -> float:
        i = min(max(1, bisect_left(sizes, rows)), len(sizes) - 1)
        low, high = sizes[i - 1], sizes[i]
        return points[low] + (rows - low) / (high - low) * (points[high] - points[low])

    return of


# One H200 with gpt-oss-120b; beyond 8 rows as vLLM's gains at higher concurrency suggest.
H200 = table({1: 1.92, 2: 2.34, 3: 2.76, 4: 3.15, 6: 3.92, 8: 4.63, 10: 5.3, 64: 14, 256: 26, 512: 48, 1024: 85})
FREE = table({1: 1.0, 2: 1.05, 1024: 1.5})
FULL = table({1: 1.0, 1024: 1024.0})
NANO = table({1: 0.9, 2: 1.25, 9: 1.9, 64: 6.0, 1024: 90.0})
CLIFF = table({1: 1.0, 8: 1.1, 9: 3.0, 1024: 300.0})
# The same, measured by benchmarks.draft: sequences -> milliseconds by rows, and of drafts whatever their number.
MEASURED = {
    8: (table({8: 4.55, 16: 7.0, 32: 10.5}), 0.35),
    32: (table({32: 9.89, 64: 13.6, 128: 19.0}), 0.6),
    256: (table({256: 23.3, 512: 33.0, 1024: 45.0}), 1.0),
}
MACHINES = {"h200": H200, "free": FREE, "full": FULL, "nano": NANO, "cliff": CLIFF}
GOOD, CHAT, POOR, NONE = [0.73, 0.71, 0.69, 0.64], [0.62, 0.645, 0.625, 0.6], [0.25, 0.3, 0.3, 0.3], [0.02] * 4


@dataclass(eq=False)
class Sequence:
    num_drafts: int = 0
    draft_trials: float = 0.0
    drafts_accepted: float = 0.0


@dataclass
class Engine:
    """A number of sequences that never end. Steps overlap: one is decided on before the last one is known."""

    controller: SpeculationController
    batch: int
    times: Times
    accepted: Accepted
    matched: float = 1.0  # of sequences that may have drafts, how many do
    overhead_ms: float = 0.0  # of a step that may have drafts
    switch_ms: float = 0.0  # of a step without drafts after one with drafts
    noise: float = 0.03
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    had_drafts: bool = False
    ms: float = 0.0
    tokens: int = 0

    def __post_init__(self) -> None:
        self.sequences = {i: Sequence() for i in range(self.batch)}
        self.launched: deque[tuple[list[int], list[int]]] = deque()
        for sequence in self.sequences.values():
            self.controller.begin(sequence)

    def drafts(self, most: int) -> int:
        return most if most and self.draw.random() < self.matched else 0

    def accept(self, num_drafts: int) -> int:
        count = 0
        while count < num_drafts and self.draw.random() < self.accepted[min(count, len(self.accepted) - 1)]:
            count += 1
        return count

    def run(self, num_steps: int, fixed: int | None = None) -> float:
        """Tokens per millisecond."""
        ms, tokens = self.ms, self.tokens
        for _ in range(num_steps):
            self.controller.decide(self.sequences.values())
            most = [s.num_drafts if fixed is None else fixed for s in self.sequences.values()]
            self.launched.append((most, [self.drafts(n) for n in most]))
            if len(self.launched) == 2:
                self.commit(*self.launched.popleft())
        return (self.tokens - tokens) / (self.ms - ms)

    def commit(self, most: list[int], drafted: list[int]) -> None:
        accepted = [self.accept(n) for n in drafted]
        rows = self.batch + sum(drafted)
        ms = self.times(rows) + (self.overhead_ms if any(most) else self.switch_ms if self.had_drafts else 0)
        self.had_drafts = any(most)
        ms *= self.draw.lognormvariate(0, self.noise)
        noise = self.draw.random()
        ms_measured = ms * 20 if noise < 0.002 else ms  # the machine does something else
        for sequence, asked, count, taken in zip(self.sequences.values(), most, drafted, accepted, strict=True):
            if asked:
                self.controller.note_drafts(sequence, asked, count, taken)
        plan = StepPlan(0, [], [ScheduledSequence(i, 0, 1, True, []) for i in range(self.batch)])
        self.controller.note_step(plan, sum(drafted), ms_measured / 1e3)
        self.ms += ms
        self.tokens += self.batch + sum(accepted)


def gain(
    num_steps: int, machine: str, batch: int, accepted: Accepted, fixed: int | None = None, max_drafts: int = 4
) -> float:
    """Throughput over that of plain steps."""
    engine = Engine(SpeculationController(max_drafts), batch, MACHINES[machine], accepted)
    return engine.run(num_steps, fixed) * engine.times(batch) / batch


@pytest.mark.long
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("machine", MACHINES)
def test_drafts_are_as_many_as_pay(machine: str, batch: int) -> None:
    for accepted in (CHAT, NONE):
        best = max(1.0, *(gain(400 // batch, machine, batch, accepted, fixed) for fixed in (1, 2, 4)))
        assert gain(4000 // batch, machine, batch, accepted) > max(0.98, 0.92 * best)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [1, 4, 16, 64, 512])
@pytest.mark.parametrize("machine", MACHINES)
def test_drafts_are_as_many_as_pay_at_every_load(machine: str, batch: int) -> None:
    num_steps = 6000 if batch < 64 else 1000
    most = 0.85 if machine == "cliff" else 0.93  # of the best; what lies beyond a cliff is known only by steps there
    for accepted in (GOOD, CHAT, POOR, NONE):
        best = max(1.0, *(gain(num_steps // 4, machine, batch, accepted, fixed) for fixed in (1, 2, 3, 4)))
        assert gain(num_steps, machine, batch, accepted) > max(0.98, most * best)


def gain_on_h200(num_steps: int, batch: int, accepted: Accepted, seed: int) -> float:
    times, drafter_ms = MEASURED[batch]
    draw = random.Random(seed)
    engine = Engine(SpeculationController(3), batch, times, accepted, overhead_ms=drafter_ms, noise=0.01, draw=draw)
    return engine.run(num_steps) * times(batch) / batch


@pytest.mark.long
@pytest.mark.parametrize("batch", [8, 32, 256])
def test_drafts_that_never_pay_cost_a_percent_of_500_steps(batch: int) -> None:
    for accepted in (NONE, POOR):
        assert gain_on_h200(500, batch, accepted, seed=1) > 0.989


def test_what_a_change_of_steps_costs_is_paid_for() -> None:
    """Drafts bring as much as they cost, but the plain step after them waits for the host."""
    times, drafter_ms = MEASURED[8]
    for seed in range(3):
        engine = Engine(SpeculationController(3), 8, times, CHAT, overhead_ms=drafter_ms, noise=0.01, switch_ms=1.5)
        engine.draw = random.Random(seed)
        assert engine.run(1500) * times(8) / 8 > 0.985


@pytest.mark.long
@pytest.mark.parametrize("batch", [32, 256])
def test_many_sequences_find_soon_that_drafts_pay(batch: int) -> None:
    for seed in range(3):
        assert gain_on_h200(400, batch, GOOD, seed) > 1.25


@pytest.mark.parametrize("machine", ["h200", "full"])
def test_changes_are_noticed_and_a_bad_time_costs_little(machine: str) -> None:
    engine = Engine(SpeculationController(8), 1, MACHINES[machine], GOOD)
    plain = 1 / engine.times(1)
    for phase in range(4):
        engine.accepted = (GOOD, NONE)[phase % 2]
        assert engine.run(2000) > plain * (1.4 if machine == "h200" and phase % 2 == 0 else 0.98)


@pytest.mark.long
@pytest.mark.parametrize("overhead_ms", [0.0, 0.1])
@pytest.mark.parametrize("matched", [0.0, 0.05, 0.8])
def test_drafts_that_rarely_exist_cost_little(matched: float, overhead_ms: float) -> None:
    accepted = [0.7] + [0.85] * 7
    engine = Engine(SpeculationController(8), 1, H200, accepted, matched, overhead_ms)
    assert engine.run(3000) > 1 / H200(1) * (1.4 if matched > 0.5 else 0.98)


@pytest.mark.long
def test_a_drafter_that_proposes_few_is_allowed_many() -> None:
    """Most proposals are of one draft and fail, the others are long and right. A limit costs only rows that exist."""

    def run(fixed: int | None, seed: int) -> float:
        draw = random.Random(seed)
        engine = Engine(SpeculationController(8), 1, table({1: 1.0, 9: 5.8}), [], draw=draw)
        are_right: deque[bool] = deque()

        def drafts(most: int) -> int:
            are_right.append(engine.draw.random() < 0.4)
            return most if are_right[-1] else min(most, 1)

        def accept(num_drafts: int) -> int:
            engine.accepted = [0.97 if are_right.popleft() else 0.3]
            return Engine.accept(engine, num_drafts)

        engine.drafts, engine.accept = drafts, accept  # type: ignore[method-assign]
        engine.run(1000, fixed)
        return engine.run(2000, fixed)

    mean = sum(run(None, seed) for seed in range(6)) / 6
    assert mean > 0.9 * run(8, 0) > 1.05


def test_sequences_whose_drafts_fail_have_none_beside_others() -> None:
    engine = Engine(SpeculationController(4), 4, H200, GOOD)
    order = deque([GOOD, NONE])

    def accept(num_drafts: int) -> int:
        engine.accepted = order[0]
        order.rotate()
        return Engine.accept(engine, num_drafts)

    engine.accept = accept  # type: ignore[method-assign]
    engine.run(1000)
    good, bad = (sum(s.num_drafts for s in list(engine.sequences.values())[i::2]) for i in (0, 1))
    assert good >= 2
    assert bad == 0


def test_without_measurements_there_are_no_drafts() -> None:
    controller = SpeculationController(4)
    sequence = Sequence()
    controller.begin(sequence)
    prompts = StepPlan(0, [], [ScheduledSequence(0, 0, 10, True, [])])
    for _ in range(100):
        controller.decide([sequence])
        assert sequence.num_drafts == 0
        controller.note_step(prompts, 0, 1.0)
    controller.decide([])


def test_one_slow_step_changes_little() -> None:
    engine = Engine(SpeculationController(4), 1, FREE, GOOD)
    engine.run(500)
    before = engine.run(100)
    (sequence,) = engine.sequences.values()
    plan = StepPlan(0, [], [ScheduledSequence(0, 0, 1, True, [])])
    engine.controller.note_drafts(sequence, 4, 4, 4)
    engine.controller.note_step(plan, 4, 1000.0)
    assert engine.run(100) > 0.9 * before


def test_one_fast_step_is_not_taken_for_typical() -> None:
    times = StepTimes()
    for seconds in (10.0, 1.0, 1.1, 0.9, 0.1, 1.0):
        times.note(1, seconds)
    assert times.of(1) == 1.0


def test_a_size_that_was_slow_once_is_tried_again() -> None:
    times = StepTimes(skips_first=True)
    times.note(9, 50.0)
    assert times.of(9) is None
    times.note(9, 8.0)
    assert times.of(9) == 8.0
    for _ in range(2000):
        times.note(5, 2.0)
    times.forget_old()
    assert (times.of(9), times.of(5)) == (None, 2.0)


def test_fewer_rows_are_not_thought_slower_than_more() -> None:
    plain, drafting = StepTimes(), StepTimes()
    plain.note(1, 1.0)
    for rows, seconds in ((4, 9.0), (6, 2.5), (9, 3.0)):
        drafting.note(rows, seconds)
    curve = StepCurve.of(1, plain, drafting)
    assert [curve.at(rows) for rows in (1, 4, 6, 9)] == [1.0, 2.5, 2.5, 3.0]


def test_a_step_that_seemed_to_take_no_time_does_not_empty_the_account() -> None:
    engine = Engine(SpeculationController(8), 1, NANO, NONE)
    controller, (sequence,) = engine.controller, engine.sequences.values()
    plan = StepPlan(0, [], [ScheduledSequence(0, 0, 1, True, [])])
    for seconds in (*[NANO(1) / 1e3] * 20, 0.0):
        controller.note_step(plan, 0, seconds)
    controller.note_drafts(sequence, 8, 8, 0)
    controller.note_step(plan, 8, NANO(9) / 1e3)  # a loss that was saved for
    engine.run(40)
    assert sequence.draft_trials > 1, "nothing was tried again"


def test_a_number_of_rows_that_was_measured_in_a_bad_moment_is_measured_again() -> None:
    engine, bad = Engine(SpeculationController(8), 1, FREE, [0.95] * 8), [1.7] * 6

    def times(rows: float) -> float:
        return FREE(rows) * (bad.pop() if rows > 5 and bad else 1.0)

    engine.times = times
    engine.run(500)
    best = Engine(SpeculationController(8), 1, FREE, [0.95] * 8).run(300, 8)
    assert engine.run(300) > 0.9 * best
