"""The embedded model on two ranks, each a process, gives the tokens of one rank, whatever happens to its sequences."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from oscine.chat.grammar import JsonFormat, header_grammar, turn_grammar
from oscine.chat.harmony import HarmonyRenderer
from oscine.chat.messages import Conversation, Message
from oscine.chat.tokenizer import Tokenizer
from oscine.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
from oscine.engine.build import BuiltEngine, build_engine
from oscine.engine.core.offline import generate
from oscine.types import GenerationOutput, GenerationRequest, SamplingParams

NANO = Path(__file__).parents[2] / "oscine" / "model" / "nano"
TOKEN = Tokenizer(NANO)
STOPS = (TOKEN.return_, TOKEN.call)
QUESTIONS = ("What is 27 + 58?", "Name the capital of Italy.", "What is the weather in Osaka?", "Count from 3 to 9.")
PROMPTS = [
    HarmonyRenderer(TOKEN).render(Conversation((Message("user", question),), current_date="2025-08-05"))
    for question in QUESTIONS
]
PAGE = 16
SMALL_BYTES = 4 << 20  # too few pages for the sequences of some tests


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


def request(name: str, prompt: list[int], **sampling: object) -> GenerationRequest:
    given = {"max_tokens": 90, "temperature": 0.0, "stop_token_ids": STOPS, **sampling}
    return GenerationRequest(name, prompt, SamplingParams(**given))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    """By plain torch: sums of ranks then differ in their last bits only. Kernels in C round activations to 8 bits."""
    options = EngineOptions(
        ModelOptions(device="cpu"),
        CacheOptions(page_size=PAGE, kv_cache_bytes=SMALL_BYTES),
        SchedulerOptions(max_num_seqs=6, max_num_batched_tokens=48),
        quiet=True,
    )
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        for module in ("table", "native.library"):
            patch.setattr(f"oscine.ops.{module}.unavailable", lambda: "a test wants none")
        patch.setenv("PATH", "/nonexistent")  # where other ranks look for a compiler
        one = build_engine(options)
        two = build_engine(replace(options, model=replace(options.model, tensor_parallel_size=2)))
    assert one.ranks is None
    assert two.ranks is not None
    yield Pair(one, two)
    two.ranks.close()
    torch.set_num_threads(threads)


def test_all_ways_to_sample(pair: Pair) -> None:
    found = pair.answers(
        request("greedy", PROMPTS[0]),
        request("sampled", PROMPTS[1], temperature=1.0, seed=3, logprobs=2),
        request("truncated", PROMPTS[2], temperature=0.9, top_p=0.9, top_k=20, min_p=0.01, seed=4),
        request("penalties", PROMPTS[3], presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.1),
        request("biased", PROMPTS[0], logit_bias={5: 2.0}, min_tokens=30, temperature=0.7, seed=5),
        request("prompt", PROMPTS[1], prompt_logprobs=1, max_tokens=4),
    )
    assert TOKEN.decode(tokens(found["greedy"])).endswith("85.<|return|>")


def test_cached_prefixes(pair: Pair) -> None:
    pair.answers(*(request(str(i), prompt, max_tokens=20) for i, prompt in enumerate(PROMPTS[:2])))
    hits = pair.two.loop.counters.prefix_hits
    pair.answers(*(request(str(i), prompt, temperature=1.0, seed=i) for i, prompt in enumerate(PROMPTS[:2])))
    assert pair.two.loop.counters.prefix_hits >= hits + 2 * PAGE


def test_preemption(pair: Pair) -> None:
    before = pair.two.loop.counters.preemptions
    pair.answers(*(request(str(i), PROMPTS[i % 4], max_tokens=130, stop_token_ids=(), seed=i) for i in range(6)))
    assert pair.two.loop.counters.preemptions > before
    assert pair.two.loop.counters.preemptions == pair.one.loop.counters.preemptions


def test_grammars_and_headers(pair: Pair) -> None:
    schema = JsonFormat({"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"]})
    found = pair.answers(
        request("json", PROMPTS[0], grammar=turn_grammar(text=schema), max_tokens=120),
        request("sampled", PROMPTS[1], grammar="start: /[0-9]{3}-[a-z]{4}/", temperature=1.0, seed=6),
        request("headers", PROMPTS[2], headers=header_grammar(), temperature=1.2, seed=7),
        request("free", PROMPTS[3], temperature=1.0, seed=8),
        request("broken", PROMPTS[3], grammar="start: undefined"),
    )
    assert '{"sum":' in TOKEN.decode(tokens(found["json"])).replace(" ", "")
    assert "cannot be compiled" in str(found["broken"][-1].error)


def test_cancellations_in_the_middle(pair: Pair) -> None:
    whole = pair.answers(*(request(str(i), PROMPTS[i], temperature=1.0, seed=i) for i in range(4)))
    loop, outputs = pair.two.loop, {str(i): list[GenerationOutput]() for i in range(4)}
    for i in range(4):
        loop.add(request(str(i), PROMPTS[i], temperature=1.0, seed=i))
    while loop.has_work:
        for output in loop.step():
            outputs[output.request_id].append(output)
        if len(tokens(outputs["1"])) == 5:
            loop.cancel("1")
    assert outputs["1"][-1].finish_reason == "cancelled"
    for name in ("0", "2", "3"):
        assert tokens(outputs[name]) == tokens(whole[name])
