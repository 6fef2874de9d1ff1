"""A prefill worker computes prompts, a decode worker fetches its pages, and the frontend passes the address on."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.extensions.dynamo.fleet import Fleet

PAGE = 64  # tokens
CONVERSATIONS = [
    f"Explain to {name} step by step, and twice, " + f"what {name} should do with the numbers. " * (3 + 9 * i)
    for i, name in enumerate(("Ada", "Brahmagupta", "Cantor", "Dedekind"))
]
QUESTION = {"role": "user", "content": "What is 27 + 58?"}


def answers(fleet: Fleet) -> list[list[str]]:
    """The tokens of a greedy and of a seeded answer to each."""
    found = []
    for number, text in enumerate(CONVERSATIONS):
        for sampled in ({}, {"temperature": 1, "seed": number}):
            said = {"role": "developer", "content": text}
            choice = fleet.ask(said, QUESTION, max_tokens=40, logprobs=True, **sampled).choices[0]
            found.append([entry.token for entry in choice.logprobs.content])
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> list[list[str]]:
    """What one worker says that does everything."""
    with Fleet(tmp_path_factory.mktemp("aggregated"), vocabulary, "aggregated") as fleet:
        return answers(fleet)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("disaggregated"), vocabulary, "prefill", "decode") as fleet:
        yield fleet


def test_prompts_are_computed_by_one_and_continued_by_the_other(fleet: Fleet, expected: list[list[str]]) -> None:
    prefill, decode = fleet.workers
    assert answers(fleet) == expected
    # Of each prompt, the decode worker computes what is behind its last full page.
    prompts = decode.metric("prompt_tokens_total")
    assert prompts - decode.metric("prefix_cache_hits_total") < PAGE * len(expected)
    assert decode.metric("remote_prefills_total") >= len(CONVERSATIONS)
    assert decode.metric("remote_prefill_failures_total") == 0
    assert decode.metric("fetched_pages_total") >= 2 * len(CONVERSATIONS)
    # The other one answers each request with an address, and generates nothing else.
    assert prefill.metric("prompt_tokens_total") >= prompts
    assert prefill.metric("generation_tokens_total") < decode.metric("generation_tokens_total") // 10


def test_without_a_prefill_worker_the_frontend_says_that_it_is_not_ready(fleet: Fleet) -> None:
    """Dynamo asks no decode worker then, though ours could do it alone."""
    prefill, decode = fleet.workers
    prefill.end()
    with pytest.raises(openai.InternalServerError, match="not ready") as caught:
        fleet.ask(QUESTION)
    assert caught.value.status_code == 503
    assert decode.exit_code is None
