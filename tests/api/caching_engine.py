"""A scripted engine whose prefix cache is the real one: scheduler, pages and index are the engine's, tokens are not."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from oscine.engine.core.loop import EngineLoop
from oscine.engine.core.offline import generate
from oscine.engine.wire.stream import RequestStream
from oscine.kv_group import KVGroup, apart
from oscine.settings.config import CacheOptions, EngineOptions, SchedulerOptions
from oscine.types import GenerationRequest, SamplingParams, StepPlan, StepResult
from tests.api.scripted_engine import VOCAB_SIZE, ScriptedEngine, in_pieces

PAGE = 64
LONGEST = 1 << 17
_NUM_PAGES = 4096
_WINDOW = 128  # of every second layer of gpt-oss


class _Executor:
    """Says `reply`, token by token, in whatever slot."""

    def __init__(self) -> None:
        self.reply: list[int] = []
        self._num_prompt_tokens: dict[int, int] = {}
        self._launched: deque[StepPlan] = deque()

    def prepare(self, sampling: SamplingParams) -> bool:
        return True

    def launch(self, plan: StepPlan) -> None:
        self._num_prompt_tokens |= {new.slot: new.num_prompt_tokens for new in plan.new}
        self._launched.append(plan)

    def collect(self) -> StepResult:
        plan = self._launched.popleft()
        ends = [(s.sample, s.start + s.num_tokens - self._num_prompt_tokens[s.slot]) for s in plan.sequences]
        return StepResult(plan.step, [[self.reply[end]] if sample else [] for sample, end in ends])


class CachingEngine(ScriptedEngine):
    """Answers each request at once with what `answer` says, which are the `replies` in turn unless it is set."""

    def __init__(self, max_model_len: int = LONGEST, vocab_size: int = VOCAB_SIZE) -> None:
        super().__init__(in_pieces([0], 1))
        self.replies: deque[list[int]] = deque()
        self.answer: Callable[[GenerationRequest], list[int]] = lambda _: self.replies.popleft()
        self.cached: list[int] = []  # tokens of each request that came from the cache
        self._sizes = {"max_model_len": max_model_len, "vocab_size": vocab_size}
        self._executor = _Executor()
        windows = enumerate((None, _WINDOW))
        scheduler = SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=8192, overlap=False)
        self._loop = EngineLoop(
            self._executor,
            EngineOptions(cache=CacheOptions(page_size=PAGE), scheduler=scheduler),
            groups=[KVGroup(window, (i,), 1, PAGE, 2, "uint8") for i, window in windows],
            memory=apart([_NUM_PAGES, _NUM_PAGES]),
            max_model_len=max_model_len,
        )

    async def start(self) -> None:
        await super().start()
        assert self.info is not None
        self.info = replace(self.info, **self._sizes)

    def submit(self, request: GenerationRequest) -> RequestStream:
        self._executor.reply = self.answer(request)
        outputs = generate(self._loop, [request])[request.request_id]
        self.cached.append(max(output.num_cached_tokens for output in outputs))
        self.script = lambda _: outputs
        return super().submit(request)
