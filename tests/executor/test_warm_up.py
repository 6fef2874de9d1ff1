"""The warm-up runs every variant of the kernels that choose tokens, and leaves no trace in the state."""

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from oscine.executor.kv.limits import sizes_up_to
from oscine.executor.kv.memory import SAMPLED_AT_ONCE
from oscine.executor.sampling.masks import GrammarCache
from oscine.executor.sampling.rules import OpenRules
from oscine.executor.start.warm_up import (
    GREEDY,
    KERNEL_SAMPLINGS,
    MASKED,
    SAMPLINGS,
    decode_counts,
    masked_errors,
    row_counts,
    run_samplings,
    warm_up,
)
from oscine.model.gpt_oss import GptOss
from oscine.ops.attention.triton import decode_tiling
from oscine.ops.interface import Batch, Sampled, SamplingBatch
from oscine.ops.qkv.triton import MAX_ROTATED
from oscine.ops.sample.triton import split_rows

from .grammars import tokenizer_file
from .tiny import executor, loop, model, naive_greedy, options, prompt, request, run

VOCAB = 201088


@pytest.mark.parametrize("most", [1, 2, 7, 50, 64, 100, 128, 300, 1024])
def test_every_number_of_rows_finds_its_kernel_compiled(most: int) -> None:
    def splits(counts: list[int], greedy: bool) -> set[tuple[int, int, int]]:
        return {split_rows(count, VOCAB, greedy) for count in counts}

    assert splits(list(range(1, most + 1)), True) == splits(sizes_up_to(most), True)
    assert splits(list(range(1, min(most, SAMPLED_AT_ONCE) + 1)), False) == splits(row_counts(most), False)


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 6, 8, 64])
def test_every_number_of_decodes_beside_a_prompt_finds_its_kernel_compiled(kv_heads: int, window: int | None) -> None:
    def tilings(counts: Iterable[int]) -> set[tuple[tuple[str, int], ...]]:
        return {tuple(decode_tiling(count, kv_heads, 8, window, exact=False).items()) for count in counts}

    for most in (1, 2, 3, 7, 22, 64, 511, 1500):
        assert tilings(range(1, most + 1)) == tilings(decode_counts(most))


def warmed_steps(max_num_batched_tokens: int) -> set[tuple[int, int]]:
    """(decodes, tokens) of each step of a warm-up."""
    chosen, base = options(max_num_seqs=6, max_num_batched_tokens=max_num_batched_tokens), model()
    steps: set[tuple[int, int]] = set()

    def attention(q_TQD: Tensor, kv_pages: Tensor, batch: Batch, *others: object) -> Tensor:
        steps.add((batch.num_decodes, len(q_TQD)))
        return base.ops.attention(q_TQD, kv_pages, batch, *others)  # type: ignore[arg-type]

    runner = executor(GptOss(base.config, base.weights, replace(base.ops, attention=attention)), chosen, 64, 64)
    warm_up(runner, max_num_batched_tokens, (*KERNEL_SAMPLINGS, MASKED))
    return steps


def test_steps_with_decodes_and_prompts_leave_rotation_to_attention_when_they_are_warmed_up() -> None:
    mixed = {(decodes, tokens) for decodes, tokens in warmed_steps(256) if 0 < decodes < tokens}
    assert {decodes for decodes, _ in mixed} == {1, 2, 4, 5}
    assert all(tokens > MAX_ROTATED for _, tokens in mixed)


@pytest.mark.parametrize("max_num_batched_tokens", [6, 7, 64, 130])
def test_no_step_of_a_warm_up_has_more_tokens_than_a_step_may_have(max_num_batched_tokens: int) -> None:
    """Ranks have buffers for as many."""
    steps = warmed_steps(max_num_batched_tokens)
    assert max(tokens for _, tokens in steps) == max_num_batched_tokens
    assert any(0 < decodes < tokens for decodes, tokens in steps)


def test_a_warm_executor_answers_like_a_fresh_one() -> None:
    asked = options(max_num_seqs=6)
    runner = executor(model(), asked, 64, 64)
    warm_up(runner, asked.scheduler.max_num_batched_tokens, SAMPLINGS)
    runner.forget_page_zero()
    requests = [request(str(n), prompt(n), max_tokens=9) for n in (3, 40)]
    found = run(loop(runner, asked, runner.memory), *requests)
    for one in requests:
        assert found[one.request_id].token_ids == naive_greedy(tuple(one.prompt_token_ids), 9)


def test_choices_that_nobody_made_harm_nobody() -> None:
    """While kernels are compiled, the ids that they choose are undefined; yet each kernel must be asked for."""
    asked, base = options(max_num_seqs=6), model()
    chosen: set[tuple[str, bool, bool, int]] = set()

    def undefined(name: str, num_rows: int, sampling: SamplingBatch) -> Tensor:
        assert sampling.num_logprobs is None, "which looks at the ids"
        chosen.add((name, sampling.greedy, sampling.truncated, num_rows))
        return torch.full((num_rows,), 1 << 40)

    def sample(logits_NV: Tensor, sampling: SamplingBatch) -> Sampled:
        return Sampled(undefined("sample", len(logits_NV), sampling))

    def choose(x_NH: Tensor, _weight: Tensor, _prepared: None, sampling: SamplingBatch) -> Tensor:
        return undefined("choose", len(x_NH), sampling)

    ops = replace(base.ops, sample=sample, chooser=replace(base.ops.chooser, choose=choose))
    runner = executor(GptOss(base.config, base.weights, ops), asked, 64, 64)
    warm_up(runner, asked.scheduler.max_num_batched_tokens, (*KERNEL_SAMPLINGS, MASKED))
    rows = row_counts(6)
    for greedy in (True, False):
        assert {("sample", greedy, False, count) for count in rows} <= chosen
        assert {("choose", greedy, False, count) for count in rows} <= chosen
    assert {("sample", False, True, count) for count in rows} <= chosen


def test_a_rehearsal_with_a_grammar_needs_no_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """It masks the rows that have a grammar, and leaves every token to all rows."""
    masks: list[SamplingBatch] = []
    base = model()
    num_words = -(-base.config.vocab_size // 32)

    def sample(logits_NV: Tensor, sampling: SamplingBatch) -> Sampled:
        masks.append(sampling)
        return base.ops.sample(logits_NV, sampling)

    watched = GptOss(base.config, base.weights, replace(base.ops, sample=sample))
    monkeypatch.setattr(GrammarCache, "matcher", lambda *_: pytest.fail("waits for the vocabulary"))
    runner = executor(watched, options(max_num_seqs=6, max_num_batched_tokens=64), 64, 64)
    layers = runner.of_each_kind(partial(OpenRules, base.config.vocab_size))
    run_samplings(layers, (MASKED, GREEDY))
    allowed = [sampling.allowed_KW for sampling in masks if sampling.allowed_KW is not None]
    assert [tuple(words_KW.shape) for words_KW in allowed] == [(1, num_words), (3, num_words)]
    assert all(bool((words_KW == -1).all()) for words_KW in allowed)


def test_the_end_of_a_start_says_what_is_wrong_with_the_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    base = model()

    def errors(file: Path | None) -> set[str]:
        grammars = GrammarCache(file, base.config.vocab_size)
        return masked_errors(executor(base, options(max_num_seqs=2), 64, 64, grammars))

    (error,) = errors(tmp_path / "tokenizer.json")
    assert "is not a tokenizer file" in error
    assert errors(None) == {"the grammar cannot be compiled: the model has no tokenizer.json"}
    assert errors(tokenizer_file(tmp_path)) == set()
