"""The inputs of the sampling op: columns as kernels read them."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oscine.executor.batch.slots import Rows
from oscine.executor.sampling.sampler import Sampler
from oscine.ops.interface import Sampled, SamplingBatch
from oscine.ops.sample import reference
from oscine.types import NewSequence, SamplingParams
from tests.ops.bound import bound
from tests.ops.compile_ahead import run_interpreted


def sample_rows(sampler: Sampler, logits_NV: Tensor, slots_N: NDArray[np.int64]) -> None:
    """At positions 5, 6, ..., without drafts."""
    nothing, ends_N = np.zeros_like(slots_N), np.arange(len(slots_N)) + 5
    rows = Rows(slots_N, nothing, lambda: ends_N, lambda: nothing)
    sampler.sample(logits_NV.__getitem__, rows, torch.from_numpy(nothing), torch.from_numpy(ends_N))


def test_parameters_of_any_number_of_rows_are_contiguous_and_aligned() -> None:
    batches: list[SamplingBatch] = []

    def sample(logits_NV: Tensor, batch: SamplingBatch) -> Sampled:
        batches.append(batch)
        return Sampled(torch.zeros(len(logits_NV), dtype=torch.int64))

    sampler = Sampler(9, 10, torch.device("cpu"), sample)
    for slot in range(9):
        sampler.assign(NewSequence(slot, [1], 1, 0, [], SamplingParams(max_tokens=1, top_p=0.5, seed=slot)))
    for count in range(1, 10):
        sample_rows(sampler, torch.zeros(count, 10), np.arange(count))
        batch = batches.pop()
        assert batch.seed_N.tolist() == list(range(count))
        assert batch.position_N.tolist() == [5 + i for i in range(count)]
        assert batch.top_p_N.tolist() == [0.5] * count
        for column in (
            batch.temperature_N,
            batch.top_k_N,
            batch.top_p_N,
            batch.min_p_N,
            batch.seed_N,
            batch.position_N,
        ):
            assert column.is_contiguous()
            assert column.storage_offset() * column.itemsize % 16 == 0


def kernels_choose_like_the_reference() -> None:
    from oscine.ops.sample import triton

    chosen: list[list[int]] = []

    def sample(logits_NV: Tensor, batch: SamplingBatch) -> Sampled:
        expected = reference.sample(logits_NV, batch)
        chosen.append(bound(triton.sample)(logits_NV, batch).token_ids_N.tolist())
        assert chosen[-1] == expected.token_ids_N.tolist()
        return expected

    sampler = Sampler(5, 300, torch.device("cpu"), sample)
    for slot, temperature in enumerate((0.0, 0.5, 1.0, 2.0, 0.7)):
        sampling = SamplingParams(max_tokens=1, temperature=temperature, seed=2**40 + slot)
        sampler.assign(NewSequence(slot, [1], 1, 0, [], sampling))
    logits_NV = torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    sample_rows(sampler, logits_NV, np.array([3, 0, 4, 1, 2]))
    assert len(chosen) == 1


def test_kernels_choose_like_the_reference() -> None:
    """A batch of unlike rows, as the executor puts it together."""
    run_interpreted(kernels_choose_like_the_reference)
