"""The controller of speculation in the real loop, over an executor with virtual step times. Requests arrive together,
prompts run beside decodes, and sequences end one by one."""

import random
from collections import deque

import pytest

from oscine.engine.core.extension import EngineExtension
from oscine.engine.core.loop import EngineLoop, Parts
from oscine.engine.core.request import Request
from oscine.extensions.speculation.policy import SpeculationController, StepTable
from oscine.kv_group import KVGroup, apart
from oscine.settings.config import CacheOptions, EngineOptions, SchedulerOptions, SpeculationOptions
from oscine.types import GenerationRequest, SamplingParams, StepPlan, StepResult
from tests.extensions.speculation.test_policy import FAIR, GOOD, H200, POOR, Accepted, at, noisy

PROMPT, ANSWER = 128, 128  # tokens
PROMPT_SPEED = 55_000  # tokens per second
PAGE = 64


class Virtual:
    """An Executor with a head that drafts. Two steps may be in flight; the device runs one after the other."""

    def __init__(self, accepted: Accepted) -> None:
        self.accepted, self.now = accepted, 0.0
        self._free = 0.0  # time when the device becomes idle
        self._launched: deque[tuple[float, StepResult]] = deque()
        self._behind: set[int] = set()  # slots whose last step did not fill the head's layer
        self._draw, self._table = random.Random(1), StepTable(H200, len(accepted))

    def prepare(self, sampling: SamplingParams) -> bool:
        return True

    def launch(self, plan: StepPlan) -> None:
        prompts = sum(s.num_tokens for s in plan.sequences if s.num_tokens > 1)
        asks = any(s.num_drafts for s in plan.sequences)
        self._behind -= {new.slot for new in plan.new}
        drafted = [0 if s.slot in self._behind else s.num_drafts for s in plan.sequences]
        token_ids = [
            [5] * (1 + self._accept(n)) if s.sample else [] for s, n in zip(plan.sequences, drafted, strict=True)
        ]
        slots = {s.slot for s in plan.sequences}
        self._behind = self._behind - slots if asks or prompts or plan.new else self._behind | slots
        decodes = sum(s.num_tokens == 1 for s in plan.sequences)
        seconds = prompts / PROMPT_SPEED
        if decodes:
            plain, *drafting = self._table.of(decodes)
            seconds += at(tuple(drafting), sum(drafted) / decodes) if asks else plain
        self._free = max(self._free, self.now) + seconds * self._draw.lognormvariate(0, 0.03)
        result = StepResult(plan.step, token_ids, num_drafted=drafted if any(drafted) else None)
        self._launched.append((self._free, result))

    def _accept(self, num_drafts: int) -> int:
        drawn = self._draw.random()
        return sum(drawn < share for share in self.accepted[:num_drafts])

    def collect(self) -> StepResult:
        end, result = self._launched.popleft()
        self.now = max(self.now, end)
        return result


class Always(EngineExtension):
    """A fixed number of drafts."""

    def __init__(self, num_drafts: int) -> None:
        self.num_drafts = num_drafts

    def first_token(self, request: Request) -> None:
        request.num_drafts = self.num_drafts


def speed(num_requests: int, accepted: Accepted, speculation: EngineExtension) -> float:
    """Tokens per second of a user, from the last first token to the end of all."""
    executor = Virtual(accepted)
    groups = [KVGroup(window, (i,), 1, PAGE, 2, "uint8") for i, window in enumerate((None, 128))]
    options = EngineOptions(
        cache=CacheOptions(page_size=PAGE, prefix_caching=False),
        scheduler=SchedulerOptions(max_num_seqs=num_requests, max_num_batched_tokens=4096, overlap=True),
        speculation=SpeculationOptions("eagle3"),
    )
    loop = EngineLoop(
        executor,
        options,
        groups=groups,
        memory=apart([num_requests * 20] * 2),
        max_model_len=PROMPT + ANSWER + 8,
        extensions=[] if speculation is None else [lambda loop: speculation],
        parts=Parts(clock=lambda: executor.now),
    )
    sampling, started_s = SamplingParams(ANSWER, temperature=0.0), dict[str, float]()
    for i in range(num_requests):
        loop.add(GenerationRequest(str(i), [7] * PROMPT, sampling))
    while loop.has_work:
        for output in loop.step():
            started_s.setdefault(output.request_id, executor.now)
    assert loop.counters.generated_tokens == num_requests * ANSWER
    return (ANSWER - 1) / (executor.now - max(started_s.values()))


@pytest.mark.parametrize("accepted", [POOR, FAIR, GOOD], ids=["poor", "fair", "good"])
@pytest.mark.parametrize("num_requests", [8, 64, 256])
def test_the_first_requests_of_an_engine_are_nearly_as_fast_as_the_best_fixed_number(
    num_requests: int, accepted: Accepted
) -> None:
    best = max(speed(num_requests, accepted, Always(num_drafts)) for num_drafts in range(4))
    controller = SpeculationController(3, noisy(H200, 0.01, 1), certain=True)
    assert speed(num_requests, accepted, controller) > 0.96 * best
