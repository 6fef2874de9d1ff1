"""Answers with drafts are those without: token by token, with their log-probabilities, whatever is asked for."""

from collections.abc import Collection
from dataclasses import replace

import pytest

from oscine.engine.core.loop import EngineLoop
from oscine.engine.core.request import Request
from oscine.executor.drafts import no_drafts
from oscine.executor.sampling.masks import GrammarCache
from oscine.extensions.speculation.drafter import HostDrafter
from oscine.extensions.speculation.lookup import PromptLookup, Tokens
from oscine.types import GenerationOutput, GenerationRequest, NewSequence
from tests.engine.harness import SomeDrafts
from tests.executor.grammars import forced_grammar, grammar, tokenizer_file
from tests.executor.test_headers import CHANNEL, END, MESSAGE, ROLE, RULE, SPECIALS, START
from tests.executor.tiny import executor, loop, model, options, prompt, request, run
from tests.tiny import TINY

from .drafting import on_host

MOST = 3


class Remembered:
    """Drafts what was answered before; some drafts are wrong."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self._answers = answers  # by prompt and number of the sequence
        self._texts: dict[int, tuple[list[int], list[int]]] = {}  # by slot: tokens, and how they go on
        self.num_drafts = self.num_forced = 0

    def assign(self, new: NewSequence) -> None:
        tokens, prompt = list(new.token_ids), new.token_ids[: new.num_prompt_tokens]
        whole = [*prompt, *self._answers[tuple(prompt)]]
        assert whole[: len(tokens)] == tokens
        self._texts[new.slot] = tokens, whole

    def keeps(self, slot: int) -> bool:
        return True

    def append(self, slot: int, token_ids: list[int]) -> None:
        tokens, whole = self._texts[slot]
        tokens += token_ids
        assert whole[: len(tokens)] == tokens[: len(whole)], "an answer differs already"

    def propose(self, slot: int, most: int, forced: list[int]) -> list[int]:
        tokens, whole = self._texts[slot]
        self.num_forced += len(forced)
        assert whole[len(tokens) :][: len(forced)] == forced[: len(whole) - len(tokens)]
        drafts = whole[len(tokens) : len(tokens) + most]
        draw = hash((slot, *tokens[-3:]))
        if drafts and draw % 3:
            drafts[draw % len(drafts)] = draw // 5 % TINY.vocab_size
        if draw % 5 == 0:
            drafts = [*drafts, 1, 2, 3][:most]  # also beyond the end
        self.num_drafts += len(drafts)
        return drafts[: draw % (most + 2)]


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> GrammarCache:
    return GrammarCache(tokenizer_file(tmp_path_factory.mktemp("tokenizer"), SPECIALS), TINY.vocab_size)


def engine(grammars: GrammarCache, pages: int, overlap: bool, drafter: HostDrafter | None = None) -> EngineLoop:
    asked = options(overlap=overlap, max_num_batched_tokens=48)
    make_drafts = no_drafts if drafter is None else on_host(drafter)
    runner = executor(model(), asked, pages, pages, grammars, make_drafts, MOST)
    return loop(runner, asked, runner.memory, *([] if drafter is None else [SomeDrafts(MOST)]))


def workload() -> list[GenerationRequest]:
    often = {START: 3.0, END: 5.0, CHANNEL: 4.0}
    warm = {"temperature": 1.0}
    kinds: list[tuple[list[int], dict[str, object]]] = [
        ([], {}),
        ([], {"logprobs": 2, "max_tokens": 70}),
        ([], {**warm, "seed": 1}),
        ([], {**warm, "seed": 2, "top_p": 0.8, "top_k": 20, "min_p": 0.01, "logprobs": 1}),
        ([], {"presence_penalty": 1.0, "frequency_penalty": 0.5}),
        ([], {**warm, "seed": 3, "repetition_penalty": 1.5, "logprobs": 0}),
        ([], {"min_tokens": 20, "stop_token_ids": tuple(range(0, 96, 7))}),
        ([], {**warm, "seed": 4, "stop_token_ids": tuple(range(0, 96, 9))}),
        ([], {"logit_bias": {5: 3.0, 7: 2.0}, "prompt_logprobs": 1, "logprobs": 0}),
        ([], {**warm, "seed": 5, "grammar": grammar(5, 30), "max_tokens": 60}),
        ([], {"grammar": grammar(2, 4), "min_tokens": 6, "stop_token_ids": (TINY.vocab_size - 1,)}),
        ([], {"grammar": grammar(3, 5), "logprobs": 1, "frequency_penalty": 1.0}),  # goes on beyond its end
        ([], {"grammar": forced_grammar("cabcacab", 3)}),
        ([], {**warm, "seed": 10, "grammar": forced_grammar("b" * 20, 3), "logprobs": 1}),
        (ROLE, {"headers": RULE}),
        (ROLE, {**warm, "seed": 6, "headers": RULE, "logit_bias": often}),
        (ROLE, {**warm, "seed": 7, "headers": RULE, "logit_bias": often, "logprobs": 1}),
        ([*ROLE, CHANNEL], {**warm, "seed": 8, "headers": RULE, "logit_bias": often}),
        ([*ROLE, 9, MESSAGE, 5], {**warm, "seed": 9, "headers": RULE, "logit_bias": often}),
        ([], {"max_tokens": 1}),
        ([], {"max_tokens": 2}),
    ]
    return [
        request(str(i), [*prompt(10 + i % 7, start=i), *end], **{"max_tokens": 40, **extra})
        for i, (end, extra) in enumerate(kinds)
    ]


def facts(output: GenerationOutput) -> dict[str, object]:
    """What must be equal, apart from log-probabilities, which may differ in rounding."""
    return {"tokens": output.token_ids, "reason": output.finish_reason, "error": output.error}


@pytest.fixture(scope="module")
def plain(grammars: GrammarCache) -> dict[str, GenerationOutput]:
    """Answers without drafts."""
    return run(engine(grammars, 64, False), *workload())


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("pages", [64, 10])
def test_answers_with_drafts_are_those_without(
    grammars: GrammarCache, plain: dict[str, GenerationOutput], overlap: bool, pages: int
) -> None:
    requests = workload()
    answers = {tuple(one.prompt_token_ids): plain[one.request_id].token_ids for one in requests}
    drafter = Remembered(answers)
    running = engine(grammars, pages, overlap, drafter)
    found = run(running, *requests)
    for name, output in plain.items():
        assert facts(found[name]) == facts(output), name
        for one, other in zip(output.logprobs or [], found[name].logprobs or [], strict=True):
            assert one.token_id == other.token_id
            assert other.logprob == pytest.approx(one.logprob, abs=1e-4)
            assert [id for id, _ in other.top] == [id for id, _ in one.top]
    stats = running.stats()
    assert (stats.preemptions > 0) == (pages < 64)
    assert drafter.num_drafts > 200
    assert drafter.num_forced > 20
    without = engine(grammars, pages, overlap)
    run(without, *requests)
    assert stats.steps < 0.9 * without.stats().steps, "few were accepted"


@pytest.mark.long
@pytest.mark.parametrize("salts", [("", ""), ("", "mine"), ("mine", ""), ("mine", "yours")])
def test_answers_of_requests_with_a_salt_are_no_drafts_of_others(
    grammars: GrammarCache, salts: tuple[str, str]
) -> None:
    running = engine(grammars, 64, False, PromptLookup(4, lengths=(3,)))
    answers = []
    for i, salt in enumerate(salts):
        before = running.stats().accepted_tokens
        asked = replace(request(str(i), prompt(10), max_tokens=40, temperature=1.0), cache_salt=salt)
        answers.append(run(running, asked)[str(i)].token_ids)
    assert answers[0] == answers[1]
    accepted = running.stats().accepted_tokens
    assert before == 0, "the first answer repeats no three tokens"
    assert accepted > 10 if salts == ("", "") else accepted == 0


class Kept(PromptLookup):
    """Notes the answers that become drafts of others."""

    def __init__(self) -> None:
        super().__init__(4)
        self.answers: list[list[int]] = []

    def _keep(self, answer: Tokens) -> None:
        self.answers.append(answer.tolist())
        super()._keep(answer)


@pytest.mark.long
def test_answers_that_become_drafts_of_others_end_at_their_stop_token(grammars: GrammarCache) -> None:
    """Where steps overlap, the step behind the stop token is launched already."""
    asked = [request(str(i), prompt(10, i), max_tokens=20, temperature=1.0, stop_token_ids=()) for i in range(2)]
    free = run(engine(grammars, 64, True), *asked)
    drafter, ended = Kept(), []
    running = engine(grammars, 64, True, drafter)
    for one in asked * 2:  # each pushes the answer before it out of its slot
        stops = (free[one.request_id].token_ids[7],)
        ended.append(run(running, replace(one, sampling=replace(one.sampling, stop_token_ids=stops))))
    answers = [outputs[one.request_id].token_ids for one, outputs in zip(asked * 2, ended, strict=True)]
    assert {len(answer) for answer in answers} == {8}
    assert drafter.answers == answers[:-1]


class Noted(PromptLookup):
    """Notes what it drafts."""

    def __init__(self) -> None:
        super().__init__(4, lengths=(1, 2))
        self.proposed: list[tuple[int, list[int]]] = []

    def propose(self, slot: int, most: int, forced: list[int]) -> list[int]:
        drafts = super().propose(slot, most, forced)
        self.proposed.append((slot, drafts))
        return drafts


class SeldomDrafts(SomeDrafts):
    """Only every third step has drafts. The others need not wait for the step before."""

    def before_step(self, running: Collection[Request]) -> None:
        super().before_step(running)
        for one in running:
            one.num_drafts *= self.num_decisions % 3 == 0


@pytest.mark.long
def test_drafts_are_the_same_on_ranks_that_collect_later(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 may collect a step before it launches the next one. The other ranks never do."""
    messages = pytest.importorskip("oscine.extensions.parallel.messages", reason="msgspec encodes them")
    asked = options(max_num_batched_tokens=48)
    first, second = Noted(), Noted()
    runner, late = (executor(model(), asked, 64, 64, grammars, on_host(drafter), MOST) for drafter in (first, second))
    plans: list[bytes] = []
    launch = runner.launch
    monkeypatch.setattr(runner, "launch", lambda plan: (plans.append(messages.encode_plan(plan)), launch(plan)))
    running = loop(runner, asked, runner.memory, SeldomDrafts(MOST))
    run(running, *workload())
    late.launch(messages.decode_plan(plans[0]))
    for plan in plans[1:]:
        late.launch(messages.decode_plan(plan))
        late.collect()
    late.collect()
    assert second.proposed == first.proposed
    assert sum(drafts != [] for _, drafts in first.proposed) > 20
