"""Sequences that another engine began: their known tokens count as generated, and are not sent again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscine.types import GenerationRequest, SamplingParams

from .harness import PAGE, Run, Setting
from .paged_executor import naive_tokens
from .test_engine_properties import prompts, samplings, setting

TEXT = [(11 * i) % 50 for i in range(150)]


@pytest.mark.long
@settings(max_examples=60)
@given(
    setting=setting(),
    cuts=st.lists(st.tuples(prompts, st.integers(0, 100), st.integers(1, 100), samplings), min_size=1, max_size=8),
)
def test_after_any_cut_come_the_tokens_of_the_undisturbed_run(
    setting: Setting, cuts: list[tuple[list[int], int, int, dict[str, object]]]
) -> None:
    run = Run(setting)
    for i, (prompt, cut, max_tokens, sampling) in enumerate(cuts):
        run.add_cut(f"r{i}", prompt, cut, max_tokens, **sampling)
    run.finish()


def ended(generated: list[int], **sampling: object) -> tuple[list[int], str | None]:
    """What a request that came with these tokens gets, and why it ends."""
    run = Run()
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    run.outputs["a"] = []
    run.loop.add(GenerationRequest("a", TEXT[:20], params, generated_token_ids=generated))
    while run.loop.has_work:
        run.step()
    return run.tokens("a"), run.outputs["a"][-1].finish_reason


def test_a_sequence_that_was_complete_ends_at_once() -> None:
    assert ended([4, 5, 6], max_tokens=3) == ([], "length")
    assert ended([4, 5, 6], max_tokens=2) == ([], "length")
    assert ended([4, 5, 6], max_tokens=9, stop_token_ids=(6,)) == ([], "stop")
    assert ended([4, 5, 6], max_tokens=3, stop_token_ids=(6,)) == ([], "stop")
    assert ended([1] * 140, max_tokens=999) == ([], "length")
    assert ended([4, 5, 6], max_tokens=4)[1] == "length"
    run = Run()
    run.add_cut("a", TEXT[:20], 8, logprobs=0)
    run.step()
    assert run.outputs["a"][0].logprobs == []
    assert run.executor.plans == []


@pytest.mark.parametrize("num_generated", [1, 140])
def test_what_is_known_must_fit(num_generated: int) -> None:
    run = Run()
    run.loop.add(GenerationRequest("a", TEXT, SamplingParams(max_tokens=9), generated_token_ids=[1] * num_generated))
    run.loop.add(GenerationRequest("b", TEXT[:21], SamplingParams(max_tokens=9), generated_token_ids=[1] * 140))
    errors = {output.request_id: output.error for output in run.loop.step()}
    assert errors["b"] == "21 prompt tokens and 140 generated ones are more than 160"
    assert ("a" in errors) == (num_generated == 140)


def test_logprobs_of_the_prompt_are_not_computed_again() -> None:
    run = Run()
    run.add("first", TEXT[:40], max_tokens=20)
    run.finish()
    run.add_cut("moved", TEXT[:40], 15, max_tokens=20, prompt_logprobs=0, logprobs=0)
    run.finish()
    assert run.outputs["moved"][0].prompt_logprobs is None
    assert run.cached("moved") == 40  # 48 tokens were, 8 of them generated
    assert run.executor.plans[-5].new[0].num_cached_tokens == 3 * PAGE
    assert run.executor.num_computed == 59 + 11


def test_what_was_looked_up_of_a_continued_sequence_includes_what_was_generated() -> None:
    run = Run()
    run.add("first", TEXT[:40], max_tokens=20)
    run.finish()
    run.add_cut("moved", TEXT[:40], 15, max_tokens=20)
    run.finish()
    stats = run.loop.stats()
    assert (stats.prompt_tokens, stats.prefix_queries, stats.prefix_hits) == (80, 95, 48)
    assert stats.generated_tokens == 20 + 5
    assert stats.requests == 2


def test_a_cut_in_a_request_that_was_preempted() -> None:
    run = Run(Setting(max_num_seqs=1))
    generated = naive_tokens(TEXT[:40], SamplingParams(max_tokens=60), 160)[0][:20]
    run.submit(GenerationRequest("low", TEXT[:40], SamplingParams(max_tokens=60), 1, generated))
    for _ in range(10):
        run.step()
    run.add("urgent", TEXT[:10], max_tokens=1)
    run.finish()
    assert run.finished == ["urgent", "low"]
    assert run.loop.stats().preemptions == 1


def test_who_has_waited_elsewhere_goes_before_newcomers_but_not_before_a_higher_priority() -> None:
    run = Run(Setting(max_num_seqs=1))
    run.add("running", TEXT[:10], priority=-2)
    run.step()
    for name, priority in (("newcomer", 0), ("urgent", -1)):
        run.add(name, TEXT[:20], priority=priority)
    for i in range(2):
        run.add_cut(f"moved {i}", TEXT[: 30 + i], 3)
    run.finish()
    assert run.finished == ["running", "urgent", "moved 0", "moved 1", "newcomer"]
