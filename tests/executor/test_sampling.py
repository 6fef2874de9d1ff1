"""Each sampling parameter against an independent computation from the logits of a full recomputation."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from oscine.executor.sampling import choice, sampler
from oscine.executor.sampling.logprobs import ROWS_AT_ONCE
from oscine.model.gpt_oss import GptOss
from oscine.ops.sample.noise import gumbel
from oscine.types import GenerationOutput, SamplingParams
from tests.tiny import TINY

from .tiny import all_logits, engine, next_logits, options, prompt, request, run

PROMPT = prompt(20)
STOP = 5


def outcome(**sampling: object) -> GenerationOutput:
    return run(engine(options()), request("a", PROMPT, **sampling))["a"]


def expected_tokens(sampling: SamplingParams) -> list[int]:
    """One token after the other, by plain Python over the whole vocabulary."""
    tokens = list(PROMPT)
    for _ in range(sampling.max_tokens):
        logits = _adjusted(next_logits(tuple(tokens)), tokens, sampling)
        if sampling.temperature == 0:
            tokens.append(max(range(len(logits)), key=lambda i: logits[i]))
            continue
        kept = _kept([value / sampling.temperature for value in logits], sampling)
        noise = gumbel(torch.tensor([sampling.seed]), torch.tensor([len(tokens)]), len(logits))[0].tolist()
        tokens.append(max(kept, key=lambda i: logits[i] / sampling.temperature + noise[i]))
    return tokens[len(PROMPT) :]


def _adjusted(logits_V: Tensor, tokens: list[int], sampling: SamplingParams) -> list[float]:
    logits: list[float] = logits_V.tolist()
    generated = tokens[len(PROMPT) :]
    for i, bias in sampling.logit_bias.items():
        logits[i] += bias
    for i in set(tokens):
        logits[i] *= 1 / sampling.repetition_penalty if logits[i] > 0 else sampling.repetition_penalty
    for i in set(generated):
        logits[i] -= sampling.frequency_penalty * generated.count(i) + sampling.presence_penalty
    if len(generated) < sampling.min_tokens:
        for i in sampling.stop_token_ids:
            logits[i] = -math.inf
    return logits


def _kept(logits: list[float], sampling: SamplingParams) -> list[int]:
    order = sorted(range(len(logits)), key=lambda i: -logits[i])[: sampling.top_k or None]
    weights = [math.exp(logits[i]) for i in order]
    kept, before = [], 0.0
    for i, weight in zip(order, weights, strict=True):
        if before / sum(weights) < sampling.top_p and weight >= sampling.min_p * weights[0]:
            kept.append(i)
        before += weight
    return kept


CASES: dict[str, dict[str, object]] = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 2.0},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.5},
    "min_p": {"temperature": 1.0, "min_p": 0.3},
    "all three": {"temperature": 0.8, "top_k": 30, "top_p": 0.5, "min_p": 0.5},
    "seed": {"temperature": 1.0, "seed": -(2**63) + 1},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.5},
    "negative frequency": {"frequency_penalty": -2.0},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": {3: 100.0}},
    "forbidding": {"logit_bias": dict.fromkeys(range(90), -100.0)},
    "bias and penalties": {"logit_bias": {3: 0.6, 8: 0.5}, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    "penalties and noise": {"temperature": 1.0, "frequency_penalty": 1.0, "top_k": 20},
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_a_parameter_does_what_it_says(case: str) -> None:
    sampling = SamplingParams(**{"max_tokens": 16, "temperature": 0.0, "seed": 11, **CASES[case]})  # type: ignore[arg-type]
    expected = expected_tokens(sampling)
    assert expected != expected_tokens(SamplingParams(max_tokens=16, temperature=0.0)), "the case shows nothing"
    found = run(engine(options()), replace(request("a", PROMPT), sampling=sampling))["a"]
    assert found.token_ids == expected


def test_min_tokens_holds_back_the_stop_tokens_and_no_longer() -> None:
    pushed: dict[str, object] = {"logit_bias": {STOP: 50.0}, "stop_token_ids": (STOP, 500), "max_tokens": 10}
    assert outcome(**pushed).token_ids == [STOP]
    held = outcome(**pushed, min_tokens=4)
    assert len(held.token_ids) == 5
    assert held.token_ids[-1] == STOP
    assert held.finish_reason == "stop"
    assert STOP not in held.token_ids[:4]


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
def test_a_seeded_sample_is_the_same_alone_and_in_company(overlap: bool) -> None:
    requests = [
        request(str(i), prompt(10 + 9 * i, start=i), max_tokens=30, **{"temperature": 1.0, "seed": i, **extra})
        for i, extra in enumerate(
            [{}, {"temperature": 0.0}, {"top_p": 0.6, "presence_penalty": 0.5}, {"logit_bias": {4: 2.0}}, {"top_k": 9}]
        )
    ]
    together = run(
        engine(options(max_num_batched_tokens=8, overlap=overlap, max_num_seqs=3), num_full_pages=12), *requests
    )
    for one in requests:
        assert run(engine(options()), one)[one.request_id].token_ids == together[one.request_id].token_ids


def test_a_slot_forgets_who_had_it_before() -> None:
    loop = engine(options(max_num_seqs=1))
    strange = request("strange", PROMPT, temperature=1.0, presence_penalty=2.0, logit_bias={3: 9.0}, logprobs=2)
    found = run(loop, strange, request("plain", PROMPT))
    assert found["plain"].token_ids == outcome().token_ids
    assert not found["plain"].logprobs


def _check(entries: list[object], tokens: list[int], start: int, num_top: int) -> None:
    """entries are those of tokens[start:], by a full recomputation."""
    logprobs = all_logits(tokens).log_softmax(-1)
    assert len(entries) == len(tokens) - start
    for position, entry in enumerate(entries, start):
        row = logprobs[position - 1]
        assert entry.token_id == tokens[position]  # type: ignore[attr-defined]
        assert entry.logprob == pytest.approx(row[tokens[position]].item(), abs=1e-4)  # type: ignore[attr-defined]
        best = row.topk(num_top)
        assert [i for i, _ in entry.top] == best.indices.tolist()  # type: ignore[attr-defined]
        assert [v for _, v in entry.top] == pytest.approx(best.values.tolist(), abs=1e-4)  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_logprobs_are_those_of_the_model_before_any_adjustment(num_top: int) -> None:
    company = [request("b", prompt(30), logprobs=7), request("c", prompt(9))]
    asked = request("a", PROMPT, temperature=0.5, logit_bias={7: 3.0}, frequency_penalty=1.0, logprobs=num_top)
    found = run(engine(options()), asked, *company)
    _check(found["a"].logprobs, PROMPT + found["a"].token_ids, len(PROMPT), num_top)
    _check(found["b"].logprobs, prompt(30) + found["b"].token_ids, 30, 7)
    assert not found["c"].logprobs


@pytest.mark.long
@pytest.mark.parametrize("chunk", [4, 7, 64])
@pytest.mark.parametrize("overlap", [False, True])
def test_prompt_logprobs_in_chunks(chunk: int, overlap: bool) -> None:
    tokens = prompt(33)
    loop = engine(options(max_num_batched_tokens=chunk, overlap=overlap))
    found = run(
        loop,
        request("filler", tokens, max_tokens=3),
        request("a", tokens, max_tokens=3, prompt_logprobs=2),
        request("only", tokens, max_tokens=0, prompt_logprobs=0),
        request("one", tokens[:1], max_tokens=1, prompt_logprobs=1, logprobs=1),
    )
    _check(found["a"].prompt_logprobs or [], tokens, 1, 2)
    _check(found["only"].prompt_logprobs or [], tokens, 1, 0)
    assert found["only"].token_ids == []
    assert found["one"].prompt_logprobs == []
    assert found["filler"].prompt_logprobs is None
    assert found["a"].token_ids == found["filler"].token_ids


def test_logits_of_a_long_prompt_are_never_there_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, rows = prompt(2 * ROWS_AT_ONCE + 5), []
    head = GptOss.head

    def counted(model: GptOss, x_NH: Tensor) -> Tensor:
        rows.append(len(x_NH))
        return head(model, x_NH)

    monkeypatch.setattr(GptOss, "head", counted)
    loop = engine(options(max_num_batched_tokens=len(tokens)))
    found = run(loop, request("a", tokens, max_tokens=1, prompt_logprobs=1))
    assert rows == [ROWS_AT_ONCE, ROWS_AT_ONCE, 4]
    _check(found["a"].prompt_logprobs or [], tokens, 1, 1)


@pytest.mark.long
@pytest.mark.parametrize("case", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.8}, {"logprobs": 2}])
def test_logits_of_many_sequences_are_computed_in_parts(case: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven sequences: parts of 4, 4 and 3 rows. Unless greedy, rows are sampled two at a time."""
    asked = [request(str(i), prompt(5 + i), max_tokens=6, seed=i, **case) for i in range(11)]
    sizes = options(max_num_seqs=11, max_num_batched_tokens=200)
    expected = run(engine(sizes), *asked)
    rows: list[int] = []

    def counting(name: str, op: Callable[..., Tensor]) -> None:
        def counted(model: GptOss, x_NH: Tensor, *given: object) -> Tensor:
            rows.append(len(x_NH))
            return op(model, x_NH, *given)

        monkeypatch.setattr(GptOss, name, counted)

    counting("head", GptOss.head)
    counting("choose", GptOss.choose)
    for module in (choice, sampler):
        monkeypatch.setattr(module, "LOGITS_AT_ONCE", 4)
    monkeypatch.setattr(sampler, "SAMPLED_AT_ONCE", 2)
    found = run(engine(sizes), *asked)
    assert rows == [4, 4, 3] * 6
    for name, one in expected.items():
        assert found[name].token_ids == one.token_ids
        if one.logprobs:
            for ours, theirs in zip(found[name].logprobs or [], one.logprobs, strict=True):
                assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
                assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]


def test_the_vocabulary_is_what_the_tests_think() -> None:
    assert all(0 <= token < TINY.vocab_size - 1 for token in prompt(100))


@pytest.mark.long
def test_penalties_count_what_was_generated_before_a_preemption() -> None:
    requests = [
        request(str(i), prompt(12, start=i), max_tokens=60, temperature=1.0, seed=i, frequency_penalty=0.7)
        for i in range(4)
    ]
    loop = engine(options(max_num_batched_tokens=16, overlap=True), num_full_pages=10, num_sliding_pages=10)
    found = run(loop, *requests)
    assert loop.stats().preemptions > 0
    for one in requests:
        assert found[one.request_id].token_ids == run(engine(options()), one)[one.request_id].token_ids
