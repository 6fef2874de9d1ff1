"""Steps with prompts as CUDA graphs give the tokens of eager steps, on a GPU and, recorded, without one."""

from dataclasses import replace
from itertools import pairwise
from typing import Literal

import numpy as np
import pytest

from oscine.checkpoint.hub import NANO_FOLDER
from oscine.engine.build import build_engine
from oscine.executor.batch.step_arrays import StepArrays
from oscine.executor.kv.limits import prompt_sizes_up_to
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
from oscine.types import NewSequence, SamplingParams, ScheduledSequence, StepPlan

from .conftest import SIZES, MakeExecutor
from .tiny import PAGE, loop, naive_greedy, options, prompt, request, run

EDGES = [size + more for size in SIZES for more in (-1, 0, 1) if size + more <= SIZES[-1]]
GREEDY = SamplingParams(max_tokens=100, temperature=0.0)


@pytest.mark.long
@pytest.mark.parametrize("tokens", EDGES)
def test_prompts_at_the_borders_of_sizes(
    make_executor: MakeExecutor, replayed: list[tuple[int, int]], tokens: int
) -> None:
    """One prompt alone, then prompts beside a decode, of so many tokens together."""
    runner = make_executor()
    asked = options(max_num_seqs=6, max_num_batched_tokens=tokens, prefix_caching=False)
    running = loop(runner, asked, runner.memory)
    first = request("first", prompt(tokens), max_tokens=12)
    parts = [request(str(i), prompt(n, start=i + 2)) for i, n in enumerate((3, tokens // 2 - 2, 2 * tokens))]
    found = {}
    running.add(first)
    for number in range(40):
        if number == 2:
            for part in parts:
                running.add(part)
        for output in running.step():
            found[output.request_id] = [*found.get(output.request_id, []), *output.token_ids]
    for one in (first, *parts):
        assert found[one.request_id] == naive_greedy(tuple(one.prompt_token_ids), one.sampling.max_tokens)
    size = next(size for size in SIZES if size >= tokens)
    assert replayed[0] == (tokens, size)
    assert replayed.count((tokens, size)) > 2, "steps of chunks are full"


def test_what_does_not_fit_runs_eagerly(make_executor: MakeExecutor, replayed: list[tuple[int, int]]) -> None:
    runner = make_executor(sizes=(8, 16))

    def size_of(*sequences: tuple[int, int]) -> int | None:
        """Of a step of sequences with a start and a number of tokens."""
        starts, lens = np.array(sequences, np.int64).T
        return runner.graphs.prompts.size_of(StepArrays.of_columns(starts * 0, starts, lens, lens > 0))

    assert size_of((0, 8)) == 8
    assert size_of((0, 9), (49, 1)) == 16
    assert size_of((200, 15), (300, 1)) == 16, "contexts may be of any length"
    assert size_of((0, 17)) is None
    requests = [request("a", prompt(12), prompt_logprobs=1), request("b", prompt(17)), request("c", prompt(11))]
    found = run(loop(runner, options(max_num_seqs=6), runner.memory), *requests)
    for one in requests:
        assert found[one.request_id].token_ids == naive_greedy(tuple(one.prompt_token_ids), 8)
    assert {tokens for tokens, _ in replayed} <= {1, 2, 3}, "all three began in one step"


def test_more_sequences_than_a_graph_has_room_for(make_executor: MakeExecutor) -> None:
    runner = make_executor(slots=5, sizes=(256,))
    lens = np.ones(6, np.int64)
    step = StepArrays.of_columns(lens * 0, lens, lens, lens > 0)
    assert runner.graphs.prompts.size_of(step) is None
    most = StepArrays.of_columns(*(column[1:] for column in (step.slots_S, step.starts_S, step.lens_S, step.samples_S)))
    assert runner.graphs.prompts.size_of(most) == 256


def test_as_many_sequences_as_a_graph_has_room_for(
    make_executor: MakeExecutor, replayed: list[tuple[int, int]]
) -> None:
    runner = make_executor(slots=64, sizes=(256,))
    lengths = [2 + i % 5 for i in range(64)]
    plan = StepPlan(0, [], [])
    for slot, length in enumerate(lengths):
        plan.new.append(NewSequence(slot, prompt(length, slot), length, 0, [[], []], GREEDY))
        plan.sequences.append(ScheduledSequence(slot, 0, length, True, [[slot], [slot]]))
    found = runner.execute(plan).token_ids
    assert found == [naive_greedy(tuple(prompt(length, slot)), 1) for slot, length in enumerate(lengths)]
    assert replayed == [(sum(lengths), 256)]


def test_padding_writes_its_own_page_and_no_state(make_executor: MakeExecutor) -> None:
    runner = make_executor()
    ids = prompt(21)
    new = NewSequence(2, ids, 21, 0, [[], []], GREEDY)
    for pages in runner.kv:
        pages.fill_(7.0)
    pages_of_2 = [[3, 5], [8, 4]]
    (tokens,) = runner.execute(StepPlan(0, [new], [ScheduledSequence(2, 0, 21, True, pages_of_2)])).token_ids
    assert tokens == naive_greedy(tuple(ids), 1)
    for pages, used in zip(runner.kv, pages_of_2, strict=True):
        changed = (pages != 7.0).flatten(1).any(1).nonzero()[:, 0].tolist()
        assert changed == sorted([*used, len(pages) - 1])
        assert (pages[used[1], :, :, :, 21 - PAGE :] == 7.0).all(), "behind the last token"
    step = StepPlan(1, [], [ScheduledSequence(2, 21, 1, True, [[], []])])
    assert runner.execute(step).token_ids == [[naive_greedy(tuple(ids), 2)[1]]]


@pytest.mark.long
def test_prefix_hits_and_several_prompts_in_a_step(
    make_executor: MakeExecutor, replayed: list[tuple[int, int]]
) -> None:
    runner = make_executor()
    running = loop(runner, options(max_num_seqs=6), runner.memory)
    turns = [prompt(40), [*prompt(40), 5, 6], [*prompt(36), 1, 2, 3]]
    for first in range(2):
        asked = [request(f"{first} {i}", [*ids, 7 + first], max_tokens=9) for i, ids in enumerate(turns)]
        found = run(running, *asked)
        for one in asked:
            assert found[one.request_id].token_ids == naive_greedy(tuple(one.prompt_token_ids), 9)
    assert running.stats().prefix_hits > 100
    assert {size for _, size in replayed} >= {32, 64}


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize(("max_num_seqs", "times"), [(6, 1), (100, 6)])
def test_kernels_find_the_same_probabilities_in_graphs(
    kv_cache_dtype: Literal["auto", "fp8"], max_num_seqs: int, times: int, replayed: list[tuple[int, int]]
) -> None:
    """The embedded model: prompts of many lengths that begin beside decodes, few or many, in chunks or whole."""
    lengths = (1, 5, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 192, 250, 257, 300, 448, 511, 512, 513, 700, 1200)
    asked = EngineOptions(
        ModelOptions(str(NANO_FOLDER), device="cuda", max_model_len=2048),
        CacheOptions(kv_cache_dtype=kv_cache_dtype, kv_cache_bytes=1 << 28, prefix_caching=False),
        replace(SchedulerOptions(), max_num_seqs=max_num_seqs, max_num_batched_tokens=640),
        quiet=True,
    )
    requests = [
        request(f"{n} {time}", [(7 * i * i + n) % 1900 for i in range(n)], max_tokens=3 + 5 * (n % 3), logprobs=5)
        for time in range(times)
        for n in lengths
    ]
    found = run(build_engine(asked).loop, *requests)
    assert len({size for _, size in replayed}) > (3 if max_num_seqs == 6 else 1)
    count = len(replayed)
    expected = run(build_engine(replace(asked, cuda_graphs=False)).loop, *requests)
    assert len(replayed) == count
    for name, one in expected.items():
        (first, *_), (other, *_) = one.logprobs or [], found[name].logprobs or []
        likely, theirs = dict(first.top), dict(other.top)
        assert len(likely.keys() & theirs.keys()) >= 3
        for token in likely.keys() & theirs.keys():
            assert likely[token] == pytest.approx(theirs[token], abs=0.2)


@pytest.mark.parametrize("most", [1, 32, 33, 100, 1024, 1500, 2048])
def test_sizes_are_few_and_padding_is_little(most: int) -> None:
    sizes = prompt_sizes_up_to(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    assert len(sizes) <= 20
    for size, larger in pairwise(sizes):
        assert larger - size <= max(64, size // 3)
