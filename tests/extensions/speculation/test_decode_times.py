"""Step times of drafts that the start measures: under a simulated clock, and on a real model."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oscine.extensions.speculation import timing
from oscine.extensions.speculation.drafter import HostDrafter
from oscine.extensions.speculation.host_drafts import HostDrafts
from oscine.extensions.speculation.lookup import PromptLookup
from oscine.extensions.speculation.start import LookupDrafting
from oscine.extensions.speculation.timing import time_decodes
from oscine.settings.config import EngineOptions, SpeculationOptions
from oscine.types import StepPlan
from tests.executor.tiny import executor, loop, model, naive_greedy, options, prompt, request, run

from .drafting import on_host

ROWS = 4096


class SimulatedDrafts(HostDrafts):
    def __init__(self, executor: "Simulated") -> None:
        self._executor = executor

    @contextmanager
    def drafting_with(self, drafter: HostDrafter) -> Iterator[None]:
        self._executor._drafter = drafter
        yield
        self._executor._drafter = None


class Simulated:
    """An executor whose steps take known times. `host_s`: of each launch, which the device does not wait for."""

    def __init__(self, device: str, most_sequences: int, most_drafts: int, scale: float = 1.0) -> None:
        self.device, self.max_num_seqs, self.max_drafts = torch.device(device), most_sequences, most_drafts
        self.memory = SimpleNamespace(page_size=16, groups=(None, None), max_model_len=64)
        self.config = SimpleNamespace(vocab_size=1000)
        self.now = self._free = 0.0
        self._scale, self._ends = scale, deque[float]()
        self._drafter: HostDrafter | None = None
        self.drafts = SimulatedDrafts(self)
        self.plans: list[StepPlan] = []
        self.is_zeroed = False

    def of(self, sequences: int, drafts: int, works: bool) -> float:
        """The seconds of a step."""
        return self._scale * (1 + 0.1 * sequences * (1 + drafts) + (0.5 if works else 0.0))

    def launch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        counts = [sequence.num_drafts for sequence in plan.sequences]
        works = any(counts) or bool(plan.new)
        if self._drafter is not None:
            for new in plan.new:
                self._drafter.assign(new)
            counts = [
                len(self._drafter.propose(s.slot, s.num_drafts, [])) if s.num_drafts else 0 for s in plan.sequences
            ]
            works = any(sequence.num_drafts for sequence in plan.sequences)
        assert len(set(counts)) == 1
        seconds = self.of(len(counts), counts[0], works)
        if self.device.type == "cpu":
            self.now += seconds
        else:
            self.now += 0.01 * self._scale  # the host, while the device works
            self._free = max(self._free, self.now) + seconds
        self._ends.append(self._free)

    def collect(self) -> None:
        self.now = max(self.now, self._ends.popleft())

    def forget_page_zero(self) -> None:
        self.is_zeroed = True


def timed(monkeypatch: pytest.MonkeyPatch, simulated: Simulated, drafter: HostDrafter | None = None) -> Any:
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: simulated.now))
    found = time_decodes(simulated, ROWS, drafter)  # type: ignore[arg-type]
    assert simulated.is_zeroed
    assert not simulated._ends
    return found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("on_host", [False, True])
def test_each_number_of_sequences_and_drafts_is_timed(
    monkeypatch: pytest.MonkeyPatch, device: str, on_host: bool
) -> None:
    simulated = Simulated(device, 12, 3, scale=1e-4)
    found = timed(monkeypatch, simulated, PromptLookup(12) if on_host else None)
    assert list(found) == [1, 2, 4, 8, 12]
    for size, times in found.items():
        assert times.plain == pytest.approx(simulated.of(size, 0, works=False))
        assert times.drafting == pytest.approx([simulated.of(size, k, works=True) for k in range(4)])
    numbers = [plan.step for plan in simulated.plans]
    assert numbers == [*range(len(numbers))]


def test_steps_have_few_rows_and_all_tokens_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = Simulated("cuda", 512, 5)
    found = timed(monkeypatch, simulated)
    assert {size: len(times.drafting) for size, times in found.items()} == {
        **dict.fromkeys([1, 2, 4, 8, 16, 32, 64, 128], 6),
        256: 4,
        512: 2,
    }
    given: dict[int, int] = {}
    for plan in simulated.plans:
        given.update((new.slot, len(new.token_ids)) for new in plan.new)
        assert all(s.start + s.num_drafts < given[s.slot] for s in plan.sequences)


def test_a_slow_cpu_times_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    found = timed(monkeypatch, Simulated("cpu", 64, 8, scale=0.02))
    assert list(found) == [1]
    assert len(found[1].drafting) >= 2
    slower = Simulated("cpu", 64, 8, scale=1.0)
    assert timed(monkeypatch, slower) is None
    assert len(slower.plans) <= 6


def test_a_cpu_times_fewer_steps_the_longer_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain step just below the limit of 0.1 s: three steps of each kind, with none and with one draft."""
    slow = Simulated("cpu", 64, 8, scale=0.09)
    found = timed(monkeypatch, slow)
    assert found[1].plain == pytest.approx(slow.of(1, 0, works=False))
    assert found[1].drafting == pytest.approx([slow.of(1, k, works=True) for k in range(2)])
    assert len(slow.plans) == 9


def test_contexts_too_short_for_drafts_are_not_timed() -> None:
    simulated = Simulated("cuda", 8, 3)
    simulated.memory.max_model_len = 12
    assert time_decodes(simulated, ROWS, None) is None  # type: ignore[arg-type]


def test_ranks_of_a_cpu_time_nothing() -> None:
    simulated, asked = Simulated("cpu", 8, 3), EngineOptions(speculation=SpeculationOptions("ngram"))
    for alone in (False, True):
        opened = SimpleNamespace(device=torch.device("cpu"))
        drafting = LookupDrafting(asked, opened, alone=alone)  # type: ignore[arg-type]
        assert (drafting.time(simulated, ROWS) is not None) == alone  # type: ignore[arg-type]
        assert bool(simulated.plans) == alone


def test_measuring_does_not_change_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: 0.0))
    drafter = PromptLookup(4)
    runner = executor(model(), options(), 64, 64, make_drafts=on_host(drafter), max_drafts=3)
    assert time_decodes(runner, 64, PromptLookup(4))
    assert not any(pages[0].any() for pages in runner.kv)
    assert not any(drafter.keeps(slot) for slot in range(4))
    asked = [request(str(i), prompt(9, i), max_tokens=12) for i in range(3)]
    found = run(loop(runner, options(), runner.memory), *asked)
    for one in asked:
        assert found[one.request_id].token_ids == naive_greedy(tuple(one.prompt_token_ids), 12)
