"""Sequences with grammars: their tokens are those of a full recomputation with a mask by plain Python."""

import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("llguidance", reason="it compiles grammars")

import llguidance.numpy

from oscine.chat.tokenizer import SPECIAL_TOKENS
from oscine.engine.core.loop import EngineLoop
from oscine.executor.batch.slots import Rows
from oscine.executor.fake import REPEATS, TEXT, Script
from oscine.executor.sampling import masks
from oscine.executor.sampling.masks import Constraints, GrammarCache
from oscine.executor.sampling.vocabulary import read_vocabulary
from oscine.executor.threaded import ThreadedExecutor
from oscine.ops.sample.noise import gumbel
from oscine.system.grammar_sandbox.check import GrammarCheck, Problem
from oscine.system.grammar_sandbox.pool import GrammarSandbox, TooManyGrammarsError
from oscine.types import GenerationRequest, NewSequence, SamplingParams, StepPlan, StepResult
from tests.byte_tokenizer import write_byte_tokenizer
from tests.hostile_schemas import quartic_schema
from tests.immediate import Immediate
from tests.tiny import TINY

from . import grammars as tiny_grammars
from .grammars import STOP, TOKENS, allowed, forced_grammar, grammar, text_of, tokenizer_file
from .tiny import all_logits, executor, loop, model, naive_greedy, next_logits, options, prompt, recompute, request, run


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> GrammarCache:
    return GrammarCache(tokenizer_file(tmp_path_factory.mktemp("tokenizer")), TINY.vocab_size)


def constrained_engine(grammars: GrammarCache, pages: int = 64, **changes: object) -> EngineLoop:
    asked = options(**changes)
    runner = executor(model(), asked, pages, pages, grammars)
    return loop(ThreadedExecutor(runner) if asked.scheduler.overlap else runner, asked, runner.memory)


def expected(one: GenerationRequest, fewest: int, most: int) -> list[int]:
    """One token after the other, from the logits of the whole sequence."""
    tokens, generated = one.prompt_token_ids, []
    while STOP not in generated and len(generated) < one.sampling.max_tokens:
        logits = next_logits((*tokens, *generated)).clone()
        for token, bias in one.sampling.logit_bias.items():
            logits[token] += bias
        if one.sampling.temperature:
            position = torch.tensor([len(tokens) + len(generated)])
            logits += gumbel(torch.tensor([one.sampling.seed]), position, len(logits))[0]
        mask = allowed(text_of(generated), fewest, most)
        if len(generated) < one.sampling.min_tokens and len(mask) > 1:
            mask -= {STOP}
        generated.append(max(mask, key=lambda token: float(logits[token])))
    return generated


def placed(slot: int, rule: str, generated: list[int] | None = None) -> NewSequence:
    sampling = SamplingParams(max_tokens=99, grammar=rule)
    return NewSequence(slot, [0, *(generated or ())], 1, 0, [], sampling)


def mask_of(constraints: Constraints, slots: list[int]) -> list[set[int]]:
    masks = np.empty((len(slots), constraints.grammars.num_words), np.int32)
    slots_N, nothing = np.array(slots), np.zeros(len(slots), np.int64)
    constraints.fill(Rows(slots_N, nothing, lambda: nothing + 1, lambda: nothing), [*range(len(slots))], masks)
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return [{int(i) for i in row.nonzero()[0]} for row in bits]


def test_masks_by_brute_force(grammars: GrammarCache) -> None:
    constraints = Constraints(grammars)
    generator = np.random.default_rng(1)
    for slot in range(3):
        constraints.assign(placed(slot, grammar(2, 5 + slot)))
    said: list[list[int]] = [[], [], []]
    for _ in range(40):
        rows = constraints.advance(np.arange(3))
        if not rows:
            break
        for slot, found in zip(rows, mask_of(constraints, rows), strict=True):
            assert found == allowed(text_of(said[slot]), 2, 5 + slot)
            said[slot].append(int(generator.choice(sorted(found))))
        constraints.sampled(np.arange(3), lambda: np.array([tokens[-1] for tokens in said]))
    assert all(tokens[-1] == STOP for tokens in said)
    assert not constraints.errors(range(3))


def test_a_sequence_is_placed_again_with_what_it_has_said(grammars: GrammarCache) -> None:
    constraints = Constraints(grammars)
    said = [TOKENS.index("ab"), TOKENS.index("cb")]
    constraints.assign(placed(1, grammar(1, 9)))
    constraints.sampled(np.array([1]), lambda: pytest.fail("the token of whoever had the slot before"))
    constraints.assign(placed(1, grammar(1, 9), said))
    assert constraints.advance(np.array([0, 1])) == [1]
    assert mask_of(constraints, [1]) == [allowed("abcb", 1, 9)]


def test_min_tokens_yields_where_only_the_stop_token_is_left(grammars: GrammarCache) -> None:
    lengths = []
    for most, min_tokens in ((40, 0), (40, 5), (3, 12)):
        one = request("a", prompt(20), max_tokens=20, min_tokens=min_tokens, stop_token_ids=(STOP,))
        sampling = replace(one.sampling, grammar=grammar(1, most), logit_bias={STOP: 50.0})
        one = replace(one, sampling=sampling)
        found = run(constrained_engine(grammars), one)["a"]
        assert found.token_ids == expected(one, 1, most)
        assert found.finish_reason == "stop"
        lengths.append(len(found.token_ids))
    assert lengths[0] < 6 <= lengths[1]
    assert lengths[2] < 12


def workload() -> list[tuple[GenerationRequest, int, int]]:
    """Constrained greedily and with noise, with a bias, and not at all, of several lengths."""
    kinds: list[tuple[int, int, dict[str, object]]] = [
        (80, 90, {}),
        (5, 90, {"temperature": 1.0, "seed": 5, "logit_bias": {STOP: -100.0}}),
        (1, 3, {}),
        (80, 80, {"temperature": 1.0, "seed": 6, "logprobs": 2}),
        (0, 0, {"temperature": 1.0, "seed": 7}),
        (0, 0, {}),
    ]
    return [
        (
            request(
                str(i),
                prompt(12, start=i),
                max_tokens=48,
                **({"stop_token_ids": (STOP,), "grammar": grammar(fewest, most)} if most else {}),
                **extra,
            ),
            fewest,
            most,
        )
        for i, (fewest, most, extra) in enumerate(kinds)
    ]


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("pages", "chunk"), [(64, 64), (10, 16)])
def test_tokens_are_those_of_a_loop_with_masks(grammars: GrammarCache, overlap: bool, pages: int, chunk: int) -> None:
    engine = constrained_engine(grammars, pages, overlap=overlap, max_num_batched_tokens=chunk)
    requests = workload()
    found = run(engine, *(one for one, _, _ in requests))
    assert (engine.stats().preemptions > 0) == (pages < 64)
    for one, fewest, most in requests:
        tokens = found[one.request_id].token_ids
        recompute(one.prompt_token_ids, tokens)
        if most:
            assert tokens == expected(one, fewest, most)
        elif not one.sampling.temperature:
            assert tokens == naive_greedy(tuple(one.prompt_token_ids), 48)


def only_choices(constraints: Constraints, rule: str, generated: list[int]) -> list[int]:
    """The tokens from here on that have no alternative, mask by mask."""
    found: list[int] = []
    while True:
        constraints.assign(placed(3, rule, [*generated, *found]))
        if not constraints.any(np.array([3])):  # at its end
            return found
        (mask,) = mask_of(constraints, [3])
        if len(mask) > 1:
            return found
        found += mask


@pytest.mark.parametrize("between", ["cacabcab", "a" * 40, ""])
def test_forced_tokens_have_no_alternative(grammars: GrammarCache, between: str) -> None:
    """At each token of a text that a random choice among all allowed tokens makes."""
    rule, constraints, draw = forced_grammar(between, 4), Constraints(grammars), random.Random(len(between))
    num_forced = 0
    for _ in range(3):
        generated: list[int] = []
        constraints.assign(placed(0, rule))
        while constraints.any(np.array([0])):
            expected = only_choices(constraints, rule, generated)
            num_forced += len(expected)
            for most in (1, 3, 99):
                assert constraints.forced([1, 0], [most, most]) == [[], expected[:most]]
            (mask,) = mask_of(constraints, [0])
            next_ids = expected[: draw.randint(1, 3)] or [draw.choice(sorted(mask))]
            constraints.sampled(np.zeros(len(next_ids), np.int64), lambda next_ids=next_ids: np.array(next_ids))
            constraints.advance(np.array([0]))
            generated += next_ids
    assert num_forced > 3 * len(between)


def test_a_forced_token_that_the_model_lacks_is_no_draft(tmp_path: Path) -> None:
    """A tokenizer may have more tokens than the model's embedding."""
    beyond = GrammarCache(tokenizer_file(tmp_path, {"<|beyond|>": TINY.vocab_size + 20}), TINY.vocab_size)
    constraints = Constraints(beyond)
    constraints.assign(placed(0, 'start: "abc" <|beyond|> "abc"'))
    assert constraints.forced([0], [9]) == [[0, 1, 2]]


def test_logprobs_are_the_models_own_though_the_token_was_forced(grammars: GrammarCache) -> None:
    one = request("a", prompt(20), max_tokens=6, logprobs=1, grammar=grammar(9, 9))
    found = run(constrained_engine(grammars), one)["a"]
    tokens = [*prompt(20), *found.token_ids]
    logprobs = all_logits(tokens).log_softmax(-1)
    assert found.token_ids != naive_greedy(tuple(prompt(20)), 6), "the case shows nothing"
    assert [e.logprob for e in found.logprobs or []] == pytest.approx(
        [logprobs[19 + i, token].item() for i, token in enumerate(found.token_ids)], abs=1e-4
    )


def test_what_comes_after_the_end_of_a_grammar_is_free(grammars: GrammarCache) -> None:
    one = request("a", prompt(20), max_tokens=20, grammar=grammar(1, 1))
    found = run(constrained_engine(grammars), one)["a"].token_ids
    end = found.index(STOP) + 1
    assert end < 5
    assert found[end:] == naive_greedy((*prompt(20), *found[:end]), 20 - end)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_grammar_that_cannot_be_had_ends_its_request_alone(grammars: GrammarCache, overlap: bool) -> None:
    requests = [
        request("broken", prompt(20), max_tokens=8, grammar="start: ("),
        request("unknown token", prompt(20), max_tokens=8, grammar="start: <|nobody|>"),
        request("plain", prompt(20), max_tokens=8),
    ]
    found = run(constrained_engine(grammars, overlap=overlap), *requests)
    for name in ("broken", "unknown token"):
        assert found[name].finish_reason == "error"
        assert "grammar cannot be compiled" in (found[name].error or "")
    assert found["plain"].token_ids == naive_greedy(tuple(prompt(20)), 8)


def test_without_a_vocabulary_no_process_tries_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = GrammarSandbox()
    monkeypatch.setattr(sandbox, "_add_thread", lambda: pytest.fail("a process was started"))
    without = constrained_engine(GrammarCache(None, TINY.vocab_size, sandbox))
    assert "tokenizer.json" in (run(without, request("a", [1], grammar=grammar(1, 1)))["a"].error or "")


def test_a_token_that_is_not_allowed_ends_its_request(grammars: GrammarCache) -> None:
    """As when logits are NaN: nothing to choose from."""
    constraints = Constraints(grammars)
    constraints.assign(placed(2, grammar(1, 9)))
    constraints.sampled(np.array([2]), lambda: np.array([TOKENS.index("aaa")]))
    assert constraints.advance(np.array([2])) == []
    assert set(constraints.errors([0, 1, 2])) == {2}
    constraints.assign(placed(2, grammar(1, 9)))
    assert not constraints.errors([2])


def test_requests_wait_for_their_grammar_and_hold_nobody_up() -> None:
    """An executor that is not ready for a grammar until it was asked often enough."""

    class Slow(Immediate):
        def __init__(self) -> None:
            super().__init__()
            self.asked = 0

        def prepare(self, sampling: SamplingParams) -> bool:
            self.asked += sampling.grammar is not None
            return sampling.grammar is None or self.asked > 5

        def execute(self, plan: StepPlan) -> StepResult:
            return StepResult(plan.step, [[1] for _ in plan.sequences])

    slow = Slow()
    engine = loop(slow, options(), executor(model(), options(), 64, 64).memory)
    engine.add(request("slow", [1], max_tokens=1, grammar="start:"))
    engine.add(request("cancelled", [1], max_tokens=1, grammar="start:"))
    engine.add(request("quick", [1], max_tokens=1))
    assert engine.stats().num_waiting == 3
    assert [output.request_id for output in engine.step()] == ["quick"]
    engine.cancel("cancelled")
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("cancelled", "cancelled"), ("slow", "length")]


def test_the_oracle_knows_the_language() -> None:
    assert allowed("", 1, 1) == {TOKENS.index(t) for t in ("a", "b", "c", "ab", "ca", "abc")}
    assert allowed("abc", 1, 1) == {STOP}
    assert allowed("cb", 1, 5) == set()
    assert tiny_grammars.WORDS == ("abc", "b", "ca")


def test_more_grammars_at_once_than_are_kept(grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait do not push one another out before they are compiled."""
    monkeypatch.setattr("oscine.executor.sampling.masks._MAX_COMPILED", 4)
    engine = constrained_engine(grammars)
    requests = [request(str(i), prompt(3), max_tokens=2, grammar=grammar(1, i + 101)) for i in range(12)]
    assert {output.finish_reason for output in run(engine, *requests).values()} == {"length"}


@pytest.mark.long
def test_a_grammar_that_is_not_tried_in_time_ends_its_request_alone(tmp_path: Path) -> None:
    sandbox = GrammarSandbox(deadline_s=2)
    engine = constrained_engine(GrammarCache(tokenizer_file(tmp_path), TINY.vocab_size, sandbox))
    endless = json.dumps({"grammars": [{"json_schema": quartic_schema(600)}]})
    requests = [
        request("endless", prompt(20), max_tokens=8, grammar=endless),
        request("sound", prompt(20), max_tokens=8, grammar=grammar(1, 9)),
        request("plain", prompt(20), max_tokens=8),
    ]
    found = run(engine, *requests)
    assert "longer than 2 s" in (found["endless"].error or "")
    assert found["sound"].finish_reason == found["plain"].finish_reason == "length"


@pytest.mark.long
@pytest.mark.parametrize("company", [1, 0])
def test_masks_that_take_too_long_end_their_sequence_alone(
    grammars: GrammarCache, monkeypatch: pytest.MonkeyPatch, company: int
) -> None:
    constraints = Constraints(grammars)
    for slot in range(1 + company):
        constraints.assign(placed(slot, grammar(20, 40)))
    slow = constraints._live[0].matcher

    def fill(matcher: object, masks: object, row: int = 0) -> None:
        end_s = time.thread_time() + (0.2 if matcher is slow else 0.0)
        while time.thread_time() < end_s:
            pass
        real_fill(matcher, masks, row)

    def fill_all(threads: object, pairs: list[tuple[object, int]], masks: object) -> None:
        for matcher, row in pairs:
            fill(matcher, masks, row)

    real_fill = llguidance.numpy.fill_next_token_bitmask
    monkeypatch.setattr("llguidance.numpy.fill_next_token_bitmask", fill)
    monkeypatch.setattr("llguidance.numpy.fill_next_token_bitmask_par", fill_all)
    slots = list(range(1 + company))
    for _ in range(20):
        rows = constraints.advance(np.array(slots))
        if not rows:
            break
        masks = mask_of(constraints, [slots[row] for row in rows])
        tokens = {slots[row]: min(mask) for row, mask in zip(rows, masks, strict=True)}
        constraints.sampled(np.array([*tokens]), lambda tokens=tokens: np.array([*tokens.values()]))
    assert constraints.errors(slots).keys() == {0}
    assert "too long" in constraints.errors([0])[0]


class ScarceJudges(GrammarSandbox):
    """Has no process, or no room, for the first grammars."""

    def __init__(self, *problems: Exception) -> None:
        super().__init__()
        self._problems = [*problems]

    def check(self, checks: Sequence[GrammarCheck], owner: str | None = None) -> Future[Problem | None]:
        if not self._problems:
            return super().check(checks, owner)
        problem = self._problems.pop(0)
        if isinstance(problem, TooManyGrammarsError):
            raise problem
        none: Future[Problem | None] = Future()
        none.set_exception(problem)
        return none


def test_a_grammar_that_could_not_be_tried_fails_its_sequence_alone_and_is_tried_again(tmp_path: Path) -> None:
    sandbox = ScarceJudges(OSError("no processes are left"))
    constraints = Constraints(GrammarCache(tokenizer_file(tmp_path), TINY.vocab_size, sandbox))
    constraints.assign(placed(0, grammar(1, 2)))
    assert "no processes are left" in constraints.errors([0])[0]
    constraints.assign(placed(0, grammar(1, 2)))
    assert not constraints.errors([0])


def test_a_grammar_waits_while_too_many_others_do(tmp_path: Path) -> None:
    sandbox = ScarceJudges(TooManyGrammarsError())
    grammars = GrammarCache(tokenizer_file(tmp_path), TINY.vocab_size, sandbox)
    assert not grammars.ready(grammar(1, 2))
    assert not grammars.matcher(grammar(1, 2)).is_error()


@pytest.mark.parametrize("first", ["ready", "matcher", "num_words", "markers"])
def test_a_vocabulary_may_be_read_when_it_is_first_needed(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    monkeypatch.setattr(
        masks, "read_vocabulary", lambda file, size: (read.append(file), read_vocabulary(file, size))[1]
    )
    file = tokenizer_file(tmp_path)
    cache = GrammarCache(file, TINY.vocab_size, at_once=False)
    assert not read
    value = getattr(cache, first)
    if callable(value):
        value(grammar(1, 2))
    assert not cache.matcher(grammar(1, 2)).is_error()
    assert cache.num_words
    assert read == [file]


def test_a_vocabulary_far_beyond_the_model_is_refused_before_its_table_is_made(tmp_path: Path) -> None:
    """A table of 2^28 tokens would take 4 GB."""
    path = tokenizer_file(tmp_path)
    path.write_text(path.read_text().replace('"aaa": ', f'"far": {1 << 28}, "aaa": '))
    cache = GrammarCache(path, TINY.vocab_size)
    with pytest.raises(ValueError, match=f"has ids up to {1 << 28}, and the model has {TINY.vocab_size} tokens"):
        cache.matcher(grammar(1, 2))


def test_truncation_that_a_tokenizer_stores_cuts_neither_forced_tokens_nor_the_fake_reply(tmp_path: Path) -> None:
    path = write_byte_tokenizer(tmp_path, sorted(SPECIAL_TOKENS.values())) / "tokenizer.json"
    truncation = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"truncation": truncation}))
    matcher = GrammarCache(path, 264).matcher('start: "to be or not to be" /[ab]/')
    assert bytes(matcher.compute_ff_tokens()) == b"to be or not to be"
    assert bytes(Script.from_folder(tmp_path).text).decode() == TEXT * REPEATS
