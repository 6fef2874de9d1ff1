"""The executor on a GPU, with queued steps and replayed decodes, gives the tokens of a CPU.

Without a GPU, graphs are recorded operators; steps are not queued then.
"""

import gc
import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from oscine.engine.core.loop import EngineLoop
from oscine.executor.cuda_graphs import DecodeGraphs
from oscine.executor.sampling.masks import GrammarCache
from oscine.executor.start.warm_up import SAMPLINGS, warm_up
from oscine.timing.kinds import GraphSizes
from oscine.types import GenerationOutput, GenerationRequest
from tests.tiny import TINY

from .grammars import allowed, grammar, text_of, tokenizer_file
from .recorded import record_graphs
from .test_headers import SPECIALS
from .test_headers import workload as header_workload
from .tiny import (
    MAX_MODEL_LEN,
    capturable_model,
    engine,
    executor,
    loop,
    model,
    naive_greedy,
    options,
    prompt,
    request,
    run,
)

GRAPHS = (1, 2, 4, 6)
PROMPT_GRAPHS = (8, 16, 32, 64)  # tokens
MakeEngine = Callable[..., EngineLoop]


def gpu_engine(
    graphs: bool = True, pages: int = 64, grammars: GrammarCache | None = None, device: str = "cuda", **changes: object
) -> EngineLoop:
    asked = options(max_num_seqs=6, **changes)
    runner = executor(capturable_model(torch.device(device)), asked, pages, pages, grammars)
    if device == "cuda":
        warm_up(runner, asked.scheduler.max_num_batched_tokens, SAMPLINGS)
    if graphs:
        sizes = GraphSizes(GRAPHS, PROMPT_GRAPHS, max(GRAPHS))
        runner.graphs.run_eagerly(sizes)
        runner.graphs.capture(sizes)
    runner.forget_page_zero()
    return loop(runner, asked, runner.memory)


@pytest.fixture(params=[pytest.param("cuda", marks=pytest.mark.gpu), "recorded"])
def make_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    if request.param == "cuda":
        return gpu_engine
    record_graphs(monkeypatch)
    return lambda *args, **changes: gpu_engine(*args, **{**changes, "device": "cpu", "overlap": False})


def mixed_workload() -> list[GenerationRequest]:
    """More than run at once, short and long, with shared prefixes, ending at different times."""
    lengths = (1, 3, 15, 16, 17, 33, 64, 65, 100, 40)
    return [request(str(i), [*prompt(n - 1), i], max_tokens=9 + 5 * i, priority=i % 2) for i, n in enumerate(lengths)]


@pytest.mark.parametrize(
    ("graphs", "overlap", "pages", "chunk"),
    [*itertools.product((False, True), (False, True), (64,), (64,)), (True, True, 11, 16), (True, False, 10, 16)],
)
@pytest.mark.gpu
def test_greedy_tokens_are_those_of_full_recomputation(graphs: bool, overlap: bool, pages: int, chunk: int) -> None:
    requests = mixed_workload()
    gpu = gpu_engine(graphs, pages, overlap=overlap, max_num_batched_tokens=chunk)
    found = run(gpu, *requests)
    for one in requests:
        expected = naive_greedy(tuple(one.prompt_token_ids), one.sampling.max_tokens)
        assert found[one.request_id].token_ids == expected
    assert (gpu.stats().preemptions > 0) == (pages < 64)
    assert gpu.stats().prefix_hits > 0


@cache
def mixed_answers() -> dict[str, GenerationOutput]:
    return run(engine(options(max_num_seqs=6)), *mixed_workload())


@pytest.mark.long
@pytest.mark.parametrize(("pages", "chunk"), [(64, 64), (10, 16)])
def test_recorded_graphs_make_the_same_tokens(monkeypatch: pytest.MonkeyPatch, pages: int, chunk: int) -> None:
    expected = mixed_answers()
    record_graphs(monkeypatch)
    recorded = gpu_engine(pages=pages, device="cpu", max_num_batched_tokens=chunk)
    found = run(recorded, *mixed_workload())
    assert {name: one.token_ids for name, one in found.items()} == {
        name: one.token_ids for name, one in expected.items()
    }
    assert (recorded.stats().preemptions > 0) == (pages < 64)


@pytest.mark.long
def test_what_sampling_asks_for_is_done_outside_of_the_graphs(make_engine: MakeEngine) -> None:
    kinds: list[dict[str, object]] = [
        {"temperature": 0.9},
        {"logprobs": 3},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5},
        {"logit_bias": {3: 100.0}, "min_tokens": 3, "stop_token_ids": (5,)},
        {"temperature": 1.1, "top_p": 0.8, "top_k": 20, "logprobs": 0},
        {"prompt_logprobs": 2},
        {},
    ]
    requests = [request(str(i), prompt(11 + 4 * i, start=i), max_tokens=20, seed=i, **k) for i, k in enumerate(kinds)]
    on_gpu = run(make_engine(overlap=True), *requests)
    on_cpu = run(engine(options(max_num_seqs=6)), *requests)
    for name, expected in on_cpu.items():
        found = on_gpu[name]
        assert found.token_ids == expected.token_ids
        for ours, theirs in zip(found.logprobs or [], expected.logprobs or [], strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [(e.token_id, len(e.top)) for e in found.prompt_logprobs or []] == [
            (e.token_id, len(e.top)) for e in expected.prompt_logprobs or []
        ]


@pytest.mark.long
@pytest.mark.parametrize(("graphs", "pages"), [(False, 64), (True, 64), (True, 10)])
def test_grammars_are_kept_while_steps_overlap(
    make_engine: MakeEngine, tmp_path: Path, graphs: bool, pages: int
) -> None:
    """Beside free rows, in graphs and in mixed steps; masks come from tokens that the device has just made."""
    grammars = GrammarCache(tokenizer_file(tmp_path), TINY.vocab_size)
    requests = [
        request(str(i), prompt(12, start=i), max_tokens=40, seed=i, temperature=float(i % 2), **kind)
        for i, kind in enumerate([{"grammar": grammar(80, 90)}, {"grammar": grammar(3, 90)}, {}, {}])
    ]
    on_gpu = run(make_engine(graphs, pages, grammars, overlap=True, max_num_batched_tokens=16), *requests)
    on_cpu = run(loop(runner := executor(model(), options(), 64, 64, grammars), options(), runner.memory), *requests)
    for one in requests:
        found = on_gpu[one.request_id]
        assert found.error is None
        assert found.token_ids == on_cpu[one.request_id].token_ids
    assert allowed(text_of(on_gpu["0"].token_ids), 80, 90)


@pytest.fixture(scope="module")
def header_answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, GenerationOutput]:
    grammars = GrammarCache(tokenizer_file(tmp_path_factory.mktemp("tokenizer"), SPECIALS), TINY.vocab_size)
    runner = executor(model(), options(), 64, 64, grammars)
    return run(loop(runner, options(), runner.memory), *header_workload())


@pytest.mark.long
@pytest.mark.parametrize(("graphs", "pages"), [(False, 64), (True, 64), (True, 10)])
def test_headers_are_ruled_while_steps_overlap(
    make_engine: MakeEngine,
    tmp_path: Path,
    header_answers: dict[str, GenerationOutput],
    graphs: bool,
    pages: int,
) -> None:
    """Headers within graphs, by few tokens or by masks: the tokens are those of the CPU, verified by a plain loop."""
    grammars = GrammarCache(tokenizer_file(tmp_path, SPECIALS), TINY.vocab_size)
    plain = [one for one in header_workload() if not one.sampling.logit_bias]
    greedy = [one for one in plain if not one.sampling.temperature]
    for requests in (greedy, plain, header_workload()):
        found = run(make_engine(graphs, pages, grammars, overlap=True, max_num_batched_tokens=16), *requests)
        for one in requests:
            assert found[one.request_id].token_ids == header_answers[one.request_id].token_ids


def test_decodes_do_replay(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests above have something to test."""
    replayed: list[int] = []
    replay = DecodeGraphs.replay
    monkeypatch.setattr(
        DecodeGraphs, "replay", lambda self, packed: (replayed.append(packed[1].sequences), replay(self, packed))[1]
    )
    requests = [request(str(i), prompt(5, start=i), max_tokens=6 + 6 * i) for i in range(5)]
    run(make_engine(), *requests)
    assert set(replayed) == {1, 2, 4, 6}
    assert len(replayed) == 6 + 6 * 4 - 1


@pytest.mark.gpu
def test_a_launch_does_not_wait_and_garbage_does_not_matter() -> None:
    """Steps in flight keep alive what they need."""
    gpu = gpu_engine(overlap=True)
    one = request("a", prompt(MAX_MODEL_LEN - 60), max_tokens=50)
    outputs = []
    gpu.add(one)
    torch.cuda._sleep(200_000_000)  # about 0.1 s in which nothing launched below can run
    while gpu.has_work:
        gc.collect()
        outputs += gpu.step()
    tokens = [token for output in outputs for token in output.token_ids]
    assert tokens == naive_greedy(tuple(one.prompt_token_ids), 50)
