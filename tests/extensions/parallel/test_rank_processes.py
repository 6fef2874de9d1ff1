"""Two ranks, each a process, give the tokens of one rank, whatever happens to the sequences."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch

from oscine.engine.build import BuiltEngine, build_engine
from oscine.engine.core.offline import generate
from oscine.model.tensors import tensor_specs
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions, SpeculationOptions
from oscine.types import GenerationOutput, GenerationRequest
from tests.executor.grammars import STOP, grammar, text_of, tokenizer_file
from tests.executor.tiny import CPU, PAGE, LivelyTensors, prompt, request
from tests.extensions.parallel.plain_rank import UNAVAILABLE, none_wanted
from tests.extensions.parallel.test_ranks import KINDS, NOISE, RANKED, SPECIALS, requests
from tests.model.saved import save

SMALL_BYTES = 200_000  # too few pages for the sequences of some tests


@dataclass(frozen=True, slots=True)
class Pair:
    """The same engine on one rank and on two."""

    one: BuiltEngine
    two: BuiltEngine

    def answers(self, *requests: GenerationRequest) -> dict[str, list[GenerationOutput]]:
        """Of two ranks, which are those of one."""
        expected, found = (generate(engine.loop, requests) for engine in (self.one, self.two))
        assert {name: tokens(outputs) for name, outputs in found.items()} == {
            name: tokens(outputs) for name, outputs in expected.items()
        }
        for name, outputs in found.items():
            for ours, theirs in zip(logprobs(outputs), logprobs(expected[name]), strict=True):
                assert ours == pytest.approx(theirs, abs=1e-4)
            assert (outputs[-1].finish_reason, outputs[-1].error) == (
                expected[name][-1].finish_reason,
                expected[name][-1].error,
            )
        return found


def tokens(outputs: list[GenerationOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def logprobs(outputs: list[GenerationOutput]) -> list[float]:
    found = [entry for output in outputs for entry in [*(output.prompt_logprobs or ()), *(output.logprobs or ())]]
    return [value for entry in found for value in (entry.logprob, *(top[1] for top in entry.top))]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """By plain torch: sums of ranks then differ in their last bits only. Kernels in C round activations to 8 bits.

    The two ranks use drafts. These must be the same on both ranks, and must not change an answer.
    """
    folder, source = tmp_path_factory.mktemp("model"), LivelyTensors(RANKED, 3, CPU)
    tensors = {name: source.get(name) for name in tensor_specs(RANKED)}
    save(folder, RANKED, {name: one if one.dtype == torch.uint8 else one.bfloat16() for name, one in tensors.items()})
    tokenizer_file(folder, SPECIALS)
    options = EngineOptions(
        ModelOptions(model=str(folder), device="cpu"),
        CacheOptions(page_size=PAGE, kv_cache_bytes=SMALL_BYTES),
        SchedulerOptions(max_num_seqs=6, max_num_batched_tokens=48),
        quiet=True,
    )
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        for name in UNAVAILABLE:
            patch.setattr(name, none_wanted)
        patch.setattr("oscine.extensions.parallel.processes.RANK", "tests.extensions.parallel.plain_rank")
        one = build_engine(options)
        ranked = replace(options, speculation=SpeculationOptions("ngram"))
        two = build_engine(replace(ranked, model=replace(options.model, tensor_parallel_size=2)))
    assert one.ranks is None
    assert two.ranks is not None
    yield Pair(one, two)
    two.ranks.close()
    torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS)
def test_all_ways_to_sample(pair: Pair, kind: str) -> None:
    found = pair.answers(*requests(kind))
    assert not any(outputs[-1].error for outputs in found.values())
    assert len({token for outputs in found.values() for token in tokens(outputs)}) > 3, "a model that says nothing"


def test_cached_prefixes(pair: Pair) -> None:
    pair.answers(*(request(str(i), prompt(50, i)) for i in range(2)))
    hits = pair.two.loop.counters.prefix_hits
    pair.answers(*(request(str(i), prompt(50, i), seed=i, **NOISE) for i in range(2)))
    assert pair.two.loop.counters.prefix_hits >= hits + 2 * PAGE


def test_preemption(pair: Pair) -> None:
    both = [engine.loop.counters for engine in (pair.one, pair.two)]
    before = [counters.preemptions for counters in both]
    pair.answers(*(request(str(i), prompt(30, i), max_tokens=90, stop_token_ids=(), seed=i, **NOISE) for i in range(6)))
    assert all(counters.preemptions > count for counters, count in zip(both, before, strict=True))


def test_grammars_beside_free_text(pair: Pair) -> None:
    found = pair.answers(
        request("words", prompt(20), grammar=grammar(4, 8), max_tokens=40, stop_token_ids=(STOP,)),
        request(
            "sampled", prompt(20, 1), grammar="start: /[ab]{3}c{4}/ <|return|>", seed=6, stop_token_ids=(STOP,), **NOISE
        ),
        request("free", prompt(20, 2), seed=8, **NOISE),
        request("broken", prompt(20, 3), grammar="start: undefined"),
    )
    assert re.fullmatch("(abc|b|ca){4,8}", text_of(tokens(found["words"])))
    assert re.fullmatch("[ab]{3}c{4}", text_of(tokens(found["sampled"])))
    assert "cannot be compiled" in str(found["broken"][-1].error)


def test_cancellations_in_the_middle(pair: Pair) -> None:
    asked = [request(str(i), prompt(20, i), max_tokens=40, seed=i, **NOISE) for i in range(4)]
    whole = pair.answers(*asked)
    loop, outputs = pair.two.loop, {one.request_id: list[GenerationOutput]() for one in asked}
    for one in asked:
        loop.add(one)
    while loop.has_work:
        for output in loop.step():
            outputs[output.request_id].append(output)
        if 5 <= len(tokens(outputs["1"])) < 30:
            loop.cancel("1")
    assert outputs["1"][-1].finish_reason == "cancelled"
    for name in ("0", "2", "3"):
        assert tokens(outputs[name]) == tokens(whole[name])
