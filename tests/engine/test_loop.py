"""The life of a request: refusals, outputs, stops, cancellation at any moment, failure, and overlap."""

import pytest

from oscine.engine.core.offline import generate
from oscine.types import GenerationOutput, GenerationRequest, SamplingParams

from .harness import PAGE, Run, Setting
from .paged_executor import naive_tokens

TEXT = [(13 * i) % 50 for i in range(150)]


def naive(prompt: list[int], **sampling: object) -> list[int]:
    return naive_tokens(prompt, SamplingParams(**sampling), 160)[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error"),
    [
        ([], 1, "the prompt has 0 tokens; 1 to 159 are possible"),
        (TEXT + [0] * 10, 1, "the prompt has 160 tokens; 1 to 159 are possible"),
        (TEXT[:100], 31, "100 prompt tokens and 31 more do not fit a KV cache of 128 tokens"),
        (TEXT[:10], 10**9, "10 prompt tokens and 150 more do not fit a KV cache of 128 tokens"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(prompt: list[int], max_tokens: int, error: str) -> None:
    run = Run(Setting(num_full_pages=8))
    run.add("refused", prompt, max_tokens)
    run.add("largest", TEXT[:100], 29)
    run.finish()
    assert run.outputs["refused"] == [GenerationOutput("refused", finish_reason="error", error=error)]
    assert len(run.tokens("largest")) == 29


def test_an_id_in_use_and_one_too_many_are_refused() -> None:
    run = Run(Setting(max_waiting=2))
    run.add("a", TEXT[:5])
    run.add("b", TEXT[:5])
    run.add("c", TEXT[:5])
    run.loop.add(run.requests["a"])
    errors = [output.error for output in run.loop.step()]
    assert errors[:2] == ["2 requests are waiting already", "request id 'a' is in use"]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_known_end_costs_no_step_in_vain(overlap: bool) -> None:
    run = Run(Setting(overlap=overlap))
    run.add("one", TEXT[:20], max_tokens=10)
    run.finish()
    assert run.executor.num_computed == 20 + 10 - 1
    assert run.loop.stats().steps == 10


def test_a_stop_token_costs_one_token_in_vain_with_overlap() -> None:
    stop = naive(TEXT[:20], max_tokens=10)[5]
    for overlap in (False, True):
        run = Run(Setting(overlap=overlap))
        run.add("one", TEXT[:20], max_tokens=10, stop_token_ids=(stop,))
        run.finish()
        num_tokens = len(run.tokens("one"))
        assert run.outputs["one"][-1].finish_reason == "stop"
        assert run.tokens("one")[-1] == stop
        assert run.executor.num_computed == 20 + num_tokens - 1 + overlap
        assert run.loop.stats().generated_tokens == num_tokens


def test_the_longest_sequence_ends_by_length() -> None:
    run = Run(Setting(max_model_len=40))
    run.add("one", TEXT[:30], max_tokens=100)
    run.finish()
    assert len(run.tokens("one")) == 10
    assert run.outputs["one"][-1].finish_reason == "length"


def test_the_first_token_comes_at_once_then_every_kth_output_and_the_rest_at_the_end() -> None:
    run = Run(Setting(stream_interval=4))
    run.add("one", TEXT[:20], max_tokens=12, logprobs=0)
    run.finish()
    assert [len(output.token_ids) for output in run.outputs["one"]] == [1, 4, 4, 3]


def test_the_first_output_tells_the_wait_and_the_hit() -> None:
    run = Run(Setting(max_num_seqs=1))
    run.add("one", TEXT[:40], max_tokens=5)
    run.add("two", TEXT[:40], max_tokens=5)
    run.finish()
    assert [(o.queue_s, o.num_cached_tokens) for o in run.outputs["one"]] == [(1.0, 0), *[(0.0, 0)] * 4]
    assert [(o.queue_s, o.num_cached_tokens) for o in run.outputs["two"]] == [(6.0, 2 * PAGE), *[(0.0, 0)] * 4]


def test_several_tokens_of_a_step_end_at_the_first_stop() -> None:
    expected = naive(TEXT[:20], max_tokens=20)
    stop = expected[4]
    run = Run(Setting(most_drafts=4))
    run.add("one", TEXT[:20], max_tokens=20, stop_token_ids=(stop,), logprobs=0)
    run.add("two", TEXT[:20], max_tokens=6, logprobs=0)
    run.finish()
    assert run.tokens("one") == expected[: expected.index(stop) + 1]
    assert run.tokens("two") == expected[:6]
    assert run.loop.stats().generated_tokens == len(run.tokens("one")) + 6


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("budget", [7, 16, 60])  # 7: the last of 50 tokens is a step of its own
def test_a_prompt_can_be_scored_without_generating(overlap: bool, budget: int) -> None:
    run = Run(Setting(overlap=overlap, max_num_batched_tokens=budget))
    run.add("long", TEXT[:50], max_tokens=0, prompt_logprobs=0)
    run.add("one token", TEXT[:1], max_tokens=0, prompt_logprobs=0)
    run.finish()
    for name in ("long", "one token"):
        (output,) = run.outputs[name]
        assert (output.token_ids, output.finish_reason) == ([], "length")
    assert run.executor.num_computed == 51


def test_scores_of_a_prompt_that_was_preempted_come_once() -> None:
    run = Run(Setting(max_num_seqs=1, max_num_batched_tokens=16, overlap=True))
    run.add("scored", TEXT[:70], max_tokens=3, prompt_logprobs=0, priority=1)
    for _ in range(3):
        run.step()
    run.add("urgent", TEXT[:5])
    run.finish()  # compares them
    assert run.loop.stats().preemptions == 1


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("moment", range(12))
def test_a_request_can_be_cancelled_at_any_moment(overlap: bool, moment: int) -> None:
    run = Run(Setting(overlap=overlap, max_num_seqs=2, max_num_batched_tokens=16))
    run.add("kept", TEXT[:30], max_tokens=12)
    run.add("cancelled", TEXT[:40], max_tokens=9)
    run.add("waiting", TEXT[:50], max_tokens=9)
    for _ in range(moment):
        run.step()
    run.loop.cancel("cancelled")
    assert run.loop.stats().num_running + run.loop.stats().num_waiting == 2
    run.loop.cancel("cancelled")
    run.finish()
    assert run.outputs["cancelled"][-1].finish_reason == "cancelled"


def test_an_id_can_be_used_again_at_once() -> None:
    run = Run(Setting(overlap=True))
    run.add("same", TEXT[:20], max_tokens=9)
    for _ in range(4):
        run.step()
    run.loop.cancel("same")
    run.step()
    run.add("same", TEXT[5:30], max_tokens=9)
    run.finish()
    assert run.finished == ["same", "same"]


@pytest.mark.parametrize("overlap", [False, True])
def test_all_can_be_cancelled(overlap: bool) -> None:
    run = Run(Setting(overlap=overlap, max_num_seqs=2))
    for i in range(4):
        run.add(f"r{i}", TEXT[:20])
    run.step()
    run.step()
    for i in range(4):
        run.loop.cancel(f"r{i}")
    outputs = run.loop.step()
    assert {o.request_id for o in outputs if o.finish_reason == "cancelled"} == {f"r{i}" for i in range(4)}
    while run.loop.has_work:  # a step in flight is still collected
        assert run.loop.step() == []
    run.check_pages()
    assert run.loop.stats().full_pages_used == run.loop.stats().sliding_pages_used == 0


def test_a_failed_step_fails_every_request_and_holds_nothing() -> None:
    run = Run(Setting(overlap=True, max_num_seqs=2))
    for i in range(4):
        run.add(f"r{i}", TEXT[:20])
    run.step()
    run.executor.max_num_tokens = 0  # the next plan is too much for it
    with pytest.raises(AssertionError):
        run.loop.step()
    outputs = run.loop.fail_all("the device is gone")
    assert {(o.finish_reason, o.error) for o in outputs} == {("error", "the device is gone")}
    assert len(outputs) == 4
    assert not run.loop.has_work
    run.check_pages()


def test_generate_feeds_a_queue_that_is_too_short() -> None:
    run = Run(Setting(max_waiting=2, max_num_seqs=3))
    requests = [GenerationRequest(f"r{i}", TEXT[i : i + 20], SamplingParams(max_tokens=5)) for i in range(20)]
    outputs = generate(run.loop, requests)
    for request in requests:
        tokens = [token for output in outputs[request.request_id] for token in output.token_ids]
        assert tokens == naive(request.prompt_token_ids, max_tokens=5)


def test_stats_count() -> None:
    run = Run(Setting(max_num_seqs=1))
    run.add("one", TEXT[:50], max_tokens=5)
    run.add("two", TEXT[:20], max_tokens=5)
    run.step()
    stats = run.loop.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert (stats.full_pages_used, stats.full_pages_total) == (4, 64)
    assert (stats.sliding_pages_used, stats.sliding_pages_total) == (3, 64)  # the first is out of reach
    run.finish()
    stats = run.loop.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.steps) == (70, 10, 10)
