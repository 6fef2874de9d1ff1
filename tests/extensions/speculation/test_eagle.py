"""Drafts of the embedded model's head, or of prompt lookup, do not change its answers: token by token."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("msgspec", reason="the skills of the embedded model need it")

from oscine.checkpoint.hub import NANO_FOLDER
from oscine.engine.build import build_engine
from oscine.engine.core.extension import EngineExtension
from oscine.engine.core.loop import EngineLoop
from oscine.engine.core.request import Request
from oscine.executor.batch.device_state import Computed
from oscine.executor.batch.slots import ColumnArray
from oscine.executor.forward import Forward
from oscine.executor.kv.limits import sizes_up_to
from oscine.executor.recorded_steps import RecordedSteps
from oscine.executor.runner import TorchExecutor
from oscine.executor.sampling.rules import OpenRules
from oscine.executor.start.build import build_executor
from oscine.executor.start.warm_up import GREEDY, warm_up
from oscine.extensions.speculation.eagle.head import EagleHead
from oscine.ops.native.library import unavailable
from oscine.ops.packed import PackedSizes
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions, SpeculationOptions
from oscine.timing.kinds import GraphSizes
from oscine.types import GenerationRequest, NewSequence, SamplingParams, ScheduledSequence, StepPlan
from tests.engine.harness import SomeDrafts
from training.evaluate import SKILLS
from training.packing import Encoder
from training.split import Draw

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")

MOST = 4
MAX_TOKENS = 40
WARM = {"temperature": 1.0}
KINDS: list[dict[str, object]] = [
    {},
    WARM,
    WARM | {"top_p": 0.9, "top_k": 40, "logprobs": 2},
    {"logprobs": 1},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    WARM | {"repetition_penalty": 1.2},
    {"min_tokens": 30},
    WARM | {"min_p": 0.05, "logit_bias": {300: 4.0, 301: -4.0}},
    {"max_tokens": 1},
]


def options(method: str, kv_cache_bytes: int | None = None, *, overlap: bool = True) -> EngineOptions:
    return EngineOptions(
        ModelOptions(str(NANO_FOLDER), max_model_len=2048),
        CacheOptions(kv_cache_bytes=kv_cache_bytes, page_size=16),
        SchedulerOptions(max_num_seqs=8, max_num_batched_tokens=256, overlap=overlap),
        speculation=SpeculationOptions(method=method, max_drafts=MOST),  # type: ignore[arg-type]
        num_threads=1,
        quiet=True,
    )


def build(method: str, kv_cache_bytes: int | None = None) -> EngineLoop:
    return build_engine(options(method, kv_cache_bytes), speculation=lambda *_: lambda loop: SomeDrafts(MOST)).loop


def workload(count: int) -> list[GenerationRequest]:
    """Prompts of all skills with the grammars that the server gives them; each fifth asks an earlier prompt again."""
    encoder, requests = Encoder(NANO_FOLDER), []
    for i in range(count):
        skill = SKILLS[i % len(SKILLS)]
        made = skill.make(Draw(i, held_out=True))
        sampling = {"max_tokens": MAX_TOKENS, "temperature": 0.0, "seed": i, "grammar": skill.grammar(made)}
        params = SamplingParams(
            **sampling | KINDS[i % len(KINDS)],  # type: ignore[arg-type]
            stop_token_ids=encoder.tokenizer.turn_end_ids,
        )
        requests.append(GenerationRequest(f"{i}", encoder.prompt(made), params))
        if i % 5 == 4:
            requests.append(replace(requests[-4], request_id=f"{i} again", sampling=params))
    return requests


Told = tuple[list[int], str | None, list[int]]  # tokens, reason of the end, tokens with log-probabilities


def answers(
    loop: EngineLoop, requests: list[GenerationRequest], cancels: Callable[[int], bool], num_urgent: int = 0
) -> dict[str, Told]:
    """All requests at once, but for the last `num_urgent`: they come after five steps and take the place of others.
    Some are cancelled after some steps."""
    found: dict[str, Told] = {request.request_id: ([], None, []) for request in requests}
    num_first = len(requests) - num_urgent
    for request in requests[:num_first]:
        loop.add(request)
    for number in range(100_000):
        for request in requests[num_first:] if number == 5 else ():
            loop.add(replace(request, priority=-1))
        if not loop.has_work:
            return found
        if number < len(requests) and cancels(number):
            loop.cancel(requests[number].request_id)
        for output in loop.step():
            tokens, _, told = found[output.request_id]
            told += [one.token_id for one in output.logprobs or ()]
            found[output.request_id] = [*tokens, *output.token_ids], output.finish_reason, told
    raise AssertionError("the engine does not end")


@cache
def plain_answers(count: int) -> dict[str, Told]:
    return answers(build("none"), workload(count), lambda number: False)


def check_equal(count: int, method: str) -> None:
    requests, plain = workload(count), plain_answers(count)
    loop = build(method)
    assert answers(loop, requests, lambda number: False) == plain
    if method == "eagle3":
        assert loop.stats().steps < 0.75 * plain_steps(plain), "few drafts were accepted"
    else:
        assert loop.stats().accepted_tokens > 5 * count
    small = build(method, kv_cache_bytes=9 << 20)
    cancelled = answers(small, requests, lambda number: number % 7 == 3, len(requests) // 2)
    assert small.stats().preemptions > 0
    for i, (name, (tokens, reason, told)) in enumerate(cancelled.items()):
        if i % 7 == 3 and reason != plain[name][1]:
            assert tokens == plain[name][0][: len(tokens)]
        else:
            assert (tokens, reason, told) == plain[name], name


def plain_steps(plain: dict[str, Told]) -> float:
    """Steps of 8 sequences that sample these tokens one by one."""
    return sum(len(tokens) for tokens, _, _ in plain.values()) / 8


@pytest.mark.long
@pytest.mark.parametrize("method", ["eagle3", "ngram"])
def test_answers_with_drafts_are_those_without(method: str) -> None:
    check_equal(24, method)


@pytest.mark.long
def test_padded_steps_keep_their_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where graphs are not captured for every number of rows. Recorded steps need no padding."""
    sizes = sizes_up_to(8 * (1 + MOST))
    monkeypatch.setattr(RecordedSteps, "size_of", lambda self, count: next(size for size in sizes if size >= count))
    assert answers(build("eagle3"), workload(6), lambda number: False) == plain_answers(6)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", ["eagle3", "ngram"])
def test_two_thousand_answers_with_drafts_are_those_without(method: str) -> None:
    check_equal(1700, method)


@pytest.mark.long
def test_the_prefix_cache_finds_as_much_with_the_head() -> None:
    requests = workload(10)
    hits = []
    for method in ("none", "eagle3"):
        loop = build(method)
        for request in requests:
            answers(loop, [request], lambda number: False)
        hits.append((loop.stats().prefix_hits, loop.stats().prefix_queries))
    assert hits[0] == hits[1]
    assert hits[0][0] > 0


class Phases(EngineExtension):
    """Drafts for some tokens, none for some, and drafts again."""

    def __init__(self, first: int, then: int) -> None:
        self.first, self.then = first, then  # tokens: until the first phase, and the second one, end
        self.noted: list[tuple[int, int]] = []  # tokens before a step that could have drafts, and its drafts

    def before_step(self, running: Collection[Request]) -> None:
        for request in running:
            num_tokens = len(request.token_ids) - request.num_prompt_tokens
            request.num_drafts = 0 if self.first <= num_tokens < self.then else MOST

    def after_drafts(self, request: Request, most: int, num_drafted: int, num_accepted: int) -> None:
        num_tokens = len(request.token_ids) - request.num_prompt_tokens - num_accepted - 1
        self.noted.append((num_tokens, num_drafted))


@pytest.mark.parametrize("recorded", [True, False])
def test_steps_without_drafts_do_not_fill_the_heads_layer(monkeypatch: pytest.MonkeyPatch, recorded: bool) -> None:
    """A step without drafts fills it before the head drafts again. Answers are the same."""
    (request, *_), expected = workload(1), plain_answers(6)["0"]  # before steps are noted
    phases, asked = Phases(12, 24), replace(options("eagle3", overlap=False), cuda_graphs=recorded)
    loop = build_engine(asked, speculation=lambda *_: lambda loop: phases).loop
    taps: list[bool] = []  # by step: whether the head gets anything from it
    hidden = Forward._hidden
    if recorded:
        replay = RecordedSteps.replay

        def noted(self: RecordedSteps, packed: tuple[ColumnArray, PackedSizes]) -> Computed:
            computed = replay(self, packed)
            taps.append(computed.features_TH is not None)
            return computed

        monkeypatch.setattr(RecordedSteps, "replay", noted)
    else:

        def seen(self: Forward, *step: Any) -> tuple[Tensor, Tensor | None]:
            found = hidden(self, *step)
            taps.append(found[1] is not None)
            return found

        monkeypatch.setattr(Forward, "_hidden", seen)
    assert answers(loop, [request], lambda number: False)["0"] == expected
    assert len(expected[0]) >= 30
    without = taps.index(False), len(taps) - taps[::-1].index(False)
    assert not any(taps[slice(*without)])
    assert 24 - 12 - MOST <= without[1] - without[0] <= 24 - 12
    assert [drafted for tokens, drafted in phases.noted if tokens >= 24][:3] == [0, MOST, MOST]
    assert all(drafted == MOST for tokens, drafted in phases.noted if tokens < 12)


def test_drafts_write_no_page_of_another_sequence() -> None:
    """A slot has had a longer sequence before, and another sequence of the step has more drafts."""
    executor = build_executor(options("eagle3", overlap=False)).executor
    assert isinstance(executor, TorchExecutor)
    greedy = SamplingParams(max_tokens=40, temperature=0.0)

    def takes(slot: int, num_tokens: int, pages: list[int]) -> tuple[NewSequence, ScheduledSequence]:
        new = NewSequence(slot, [*range(100, 100 + num_tokens)], num_tokens, 0, [[], []], greedy)
        return new, ScheduledSequence(slot, 0, num_tokens, True, [pages, pages])

    for step, started in enumerate(([takes(1, 30, [0, 1])], [takes(0, 14, [2, 3]), takes(1, 14, [4])])):
        new, sequences = zip(*started, strict=True)
        executor.execute(StepPlan(step, [*new], [*sequences]))
    before = [pages[:2].clone() for pages in executor.kv]
    counts = (MOST, 1)
    verifying = [ScheduledSequence(slot, 14, 1, True, [], count) for slot, count in enumerate(counts)]
    assert executor.execute(StepPlan(2, [], verifying)).num_drafted == [*counts]
    for pages, expected in zip(executor.kv, before, strict=True):
        assert pages[:2].equal(expected)


def test_a_warm_up_runs_the_head_in_steps_of_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one layer of each kind, though the head reads streams of other layers."""
    drafted: Counter[int] = Counter()
    filled: Counter[int] = Counter()
    step, fill = EagleHead.step, EagleHead.fill

    def noted_step(head: EagleHead, features_TH: Tensor, *others: Any) -> Any:
        drafted[len(features_TH)] += 1
        return step(head, features_TH, *others)

    def noted_fill(head: EagleHead, features_TH: Tensor, *others: Any) -> None:
        filled[len(features_TH)] += 1
        fill(head, features_TH, *others)

    monkeypatch.setattr(EagleHead, "step", noted_step)
    monkeypatch.setattr(EagleHead, "fill", noted_fill)
    runner = build_executor(options("eagle3", overlap=False)).executor
    assert isinstance(runner, TorchExecutor)
    layers = runner.of_each_kind(partial(OpenRules, runner.config.vocab_size))
    assert layers.config.num_hidden_layers < max(layers.drafts.aux_layers)
    drafted.clear()
    filled.clear()
    warm_up(layers, 256, (GREEDY,), GraphSizes((1, 2, 3, 8, 40)))
    assert drafted == dict.fromkeys((1, 2, 3, 8), MOST)  # there are no more than 8 sequences
    assert {1, 2, 3, 8, 40, 255, 256} <= filled.keys()
    assert not any(pages[1:].any() for pages in runner.kv)  # it writes page 0 only
