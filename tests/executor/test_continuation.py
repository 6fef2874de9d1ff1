"""The embedded model in float32: a sequence that is cut anywhere and continued elsewhere has the same tokens."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscine.engine.build import build_engine
from oscine.engine.core.loop import EngineLoop
from oscine.engine.core.offline import generate
from oscine.settings.config import CacheOptions, EngineOptions, SchedulerOptions
from oscine.types import GenerationOutput, GenerationRequest, SamplingParams

NUM_TOKENS = 24
PROMPT = [(17 * i * i + 5 * i) % 900 for i in range(40)]
GRAMMAR = '%llguidance {"no_forcing": true}\nstart: /([a-c]{2,3} ){4,30}/'

CASES: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"seed": 7},
    "truncated": {"seed": 3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"seed": 5, "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "greedy with penalties": {"temperature": 0.0, "frequency_penalty": 0.9, "repetition_penalty": 1.2},
    "bias": {"seed": 11, "logit_bias": {33: 6.0, 34: 5.0, 35: -100.0}, "frequency_penalty": 0.5},
    "min_tokens": {"seed": 2, "frequency_penalty": 1.5, "min_tokens": 12, "stop_token_ids": tuple(range(0, 9000, 2))},
    "grammar": {"seed": 9, "grammar": GRAMMAR},
    "grammar, greedy with penalties": {"temperature": 0.0, "grammar": GRAMMAR, "repetition_penalty": 1.2},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Steps are small; threads that wait for each other take longer where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def loop(other: bool) -> EngineLoop:
    """Two engines that differ in how they cut a prompt into steps."""
    scheduler = SchedulerOptions(max_num_seqs=6, max_num_batched_tokens=37 if other else 256, overlap=other)
    cache = CacheOptions(kv_cache_bytes=1 << 24, page_size=16)
    return build_engine(EngineOptions(scheduler=scheduler, cache=cache, quiet=True)).loop


Outcome = tuple[list[int], list[float], str | None]  # tokens, their log-probabilities, why the sequence ended


def continued(cuts: dict[str, int], other: bool) -> dict[str, Outcome]:
    """What comes after the cuts, of all cases side by side."""
    requests = []
    for name, cut in cuts.items():
        sampling = SamplingParams(**{"max_tokens": NUM_TOKENS, "logprobs": 0, **CASES[name]})  # type: ignore[arg-type]
        known = undisturbed()[name][0][:cut] if cut else []
        requests.append(GenerationRequest(name, PROMPT, sampling, generated_token_ids=known))
    return {name: joined(outputs) for name, outputs in generate(loop(other), requests).items()}


def joined(outputs: list[GenerationOutput]) -> Outcome:
    tokens = [token for output in outputs for token in output.token_ids]
    logprobs = [entry.logprob for output in outputs for entry in output.logprobs or []]
    return tokens, logprobs, outputs[-1].finish_reason


@cache
def undisturbed() -> dict[str, Outcome]:
    return continued(dict.fromkeys(CASES, 0), False)


@pytest.mark.long
@settings(max_examples=5)
@given(cuts=st.fixed_dictionaries(dict.fromkeys(CASES, st.integers(1, NUM_TOKENS))), other=st.booleans())
def test_the_tokens_after_a_cut_are_those_of_the_undisturbed_run(cuts: dict[str, int], other: bool) -> None:
    for name, (found, found_logprobs, found_reason) in continued(cuts, other).items():
        tokens, logprobs, reason = undisturbed()[name]
        assert (name, found, found_reason) == (name, tokens[cuts[name] :], reason)
        assert found_logprobs == pytest.approx(logprobs[cuts[name] :], abs=1e-3)


@pytest.mark.long
def test_the_cases_are_what_they_are_called() -> None:
    tokens, _, reason = undisturbed()["min_tokens"]
    assert reason == "stop"
    assert len(tokens) >= 12
    assert len({tuple(tokens) for tokens, _, _ in undisturbed().values()}) == len(CASES)
    assert all(len(tokens) > 10 for tokens, _, _ in undisturbed().values())
