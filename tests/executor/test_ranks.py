"""Two ranks in two threads, each with its part of the weights, heads and vocabulary, answer as one does."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from oscine.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
from oscine.executor.start.load import load_executor
from oscine.executor.start.stopwatch import Stopwatch
from oscine.model.random_weights import RandomTensors
from oscine.model.weights import DIVIDED, Part, Shard, tensor_specs
from oscine.ops.target import Alone, Communicator
from tests.ops.ranks import on_every_rank

from .tiny import CONFIG, PAGE, loop, prompt, request, run

NUM_RANKS = 2
DIVISIBLE = replace(CONFIG, vocab_size=98, intermediate_size=64)


@pytest.mark.parametrize("temperatures", [(0, 1), (0,)], ids=["some sampled", "all greedy"])
def test_ranks_answer_as_one(tmp_path: Path, temperatures: tuple[int, ...]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DIVISIBLE.to_dict()))
    options = EngineOptions(
        model=ModelOptions(random_weights=str(tmp_path), device="cpu"),
        cache=CacheOptions(page_size=PAGE, kv_cache_bytes=1 << 20),
        scheduler=replace(SchedulerOptions(), max_num_seqs=4, max_num_batched_tokens=64, overlap=False),
    )

    def answers(communicator: Communicator) -> dict[str, list[int]]:
        executor = load_executor(options, lambda text: None, Stopwatch(), communicator)
        kv_heads = DIVISIBLE.num_key_value_heads // communicator.num_ranks
        assert {pages.shape[3] for pages in executor.kv} == {kv_heads}
        asked = [
            request(str(n), prompt(n), max_tokens=12, temperature=temperatures[n % len(temperatures)])
            for n in (3, 70, 24, 1)
        ]
        return {name: one.token_ids for name, one in run(loop(executor, options, executor.memory), *asked).items()}

    alone = answers(Alone())
    assert on_every_rank(NUM_RANKS, answers) == [alone] * NUM_RANKS
    assert len({token for tokens in alone.values() for token in tokens}) > 2, "a model that says nothing"


def test_the_best_of_all_ranks_is_that_of_the_lowest_that_has_it() -> None:
    nan, low = torch.nan, -torch.inf
    values_RN = torch.tensor([[1.0, 3.0, nan, low, nan, torch.inf, low], [2.0, 3.0, 1.0, low, low, torch.inf, -5.0]])
    ids_RN = torch.arange(14).view(2, 7)
    best = on_every_rank(NUM_RANKS, lambda own: own.best(values_RN[own.rank], ids_RN[own.rank]).tolist())
    assert best == [[7, 1, 9, -1, -1, 5, 13]] * NUM_RANKS


def test_attention_data_parallelism_divides_only_experts() -> None:
    shard = Shard(experts=Part(1, 2))
    assert shard.config(DIVISIBLE) == replace(DIVISIBLE, intermediate_size=32)
    source = RandomTensors(DIVISIBLE, 0, torch.device("cpu"))
    for name in tensor_specs(DIVISIBLE):
        same = torch.equal(shard.part(name, source.get(name)), source.get(name))
        assert same == (".experts." not in name), name


def test_shards_beside_each_other_are_the_whole() -> None:
    source = RandomTensors(DIVISIBLE, 0, torch.device("cpu"))
    for name in tensor_specs(DIVISIBLE):
        whole = source.get(name)
        parts = [Shard.of_everything(rank, NUM_RANKS).part(name, whole) for rank in range(NUM_RANKS)]
        ends = [item for ends in DIVIDED.values() for item in ends.items()]
        dimension = next((dim for end, dim in ends if name.endswith(end)), None)
        if dimension is not None:
            assert torch.equal(torch.cat(parts, dimension), whole)
            assert parts[0].data_ptr() == whole.data_ptr(), "a file's tensor is not read as a whole"
        elif name.endswith(("o_proj.bias", "down_proj_bias")):
            assert torch.equal(sum(parts[1:], start=parts[0]), whole)
        else:
            assert all(torch.equal(part, whole) for part in parts)


@pytest.mark.parametrize(("num_ranks", "named"), [(3, "num_attention_heads of 4"), (4, "num_key_value_heads of 2")])
def test_ranks_that_cannot_divide_a_model_are_refused(num_ranks: int, named: str) -> None:
    with pytest.raises(ValueError, match=f"{num_ranks} ranks cannot divide a {named}"):
        Shard.of_everything(0, num_ranks).config(DIVISIBLE)
