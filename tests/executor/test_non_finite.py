"""A sequence with non-finite logits ends with an error; other sequences go on."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oscine.executor.sampling.masks import GrammarCache
from oscine.executor.threaded import ThreadedExecutor
from oscine.model.gpt_oss import GptOss
from oscine.types import NON_FINITE, GenerationRequest
from tests.tiny import TINY

from .grammars import STOP, grammar, tokenizer_file
from .tiny import executor, loop, model, naive_greedy, options, prompt, request, run

BAD = 50  # a token with a broken embedding; another sequence may end if it generates this token


def broken_model() -> GptOss:
    whole = model()
    embed_VH = whole.weights.embed_VH.clone()
    embed_VH[BAD] = torch.nan
    return GptOss(TINY, replace(whole.weights, embed_VH=embed_VH), whole.ops)


def requests_of(name: str, tokens: list[int]) -> list[GenerationRequest]:
    """One request per way of sampling."""
    kinds: dict[str, dict[str, object]] = {
        "greedy": {},
        "sampled": {"temperature": 1.0, "seed": 3},
        "truncated": {"temperature": 1.0, "top_p": 0.5},
        "with log-probabilities": {"logprobs": 2},
        "with penalties": {"frequency_penalty": 1.0},
        "with a grammar": {"grammar": grammar(3, 9), "stop_token_ids": (STOP,)},
    }
    return [request(f"{name} {kind}", tokens, max_tokens=6, **extra) for kind, extra in kinds.items()]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sequence_of_no_numbers_ends_alone(tmp_path: Path, overlap: bool) -> None:
    asked = options(overlap=overlap, max_num_seqs=16)
    grammars = GrammarCache(tokenizer_file(tmp_path), TINY.vocab_size)
    runner = executor(broken_model(), asked, 200, 200, grammars)
    engine = loop(ThreadedExecutor(runner) if overlap else runner, asked, runner.memory)
    sound = [token for token in prompt(40) if token != BAD]
    bad, good = requests_of("bad", [*sound[:9], BAD]), requests_of("good", sound)
    found = run(engine, *(one for pair in zip(bad, good, strict=True) for one in pair))
    for one in bad:
        assert (found[one.request_id].error, found[one.request_id].token_ids) == (NON_FINITE, []), one.request_id
    for one in good:
        assert found[one.request_id].error is None or BAD in found[one.request_id].token_ids, one.request_id
    assert found["good greedy"].token_ids == naive_greedy(tuple(sound), 6)
    assert engine.stats().non_finite == sum(output.error == NON_FINITE for output in found.values())
