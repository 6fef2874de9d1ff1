"""What the sampling op is given: columns as kernels read them."""

import numpy as np
import torch
from torch import Tensor

from oscine.executor.sampler import Sampler
from oscine.ops.interface import Sampled, SamplingBatch
from oscine.types import NewSequence, SamplingParams


def test_parameters_of_any_number_of_rows_are_contiguous_and_aligned() -> None:
    batches: list[SamplingBatch] = []

    def sample(logits_NV: Tensor, batch: SamplingBatch) -> Sampled:
        batches.append(batch)
        return Sampled(torch.zeros(len(logits_NV), dtype=torch.int64))

    sampler = Sampler(9, 10, torch.device("cpu"), sample)
    for slot in range(9):
        sampler.place(NewSequence(slot, [1], 1, 0, [], [], SamplingParams(max_tokens=1, top_p=0.5, seed=slot)))
    for count in range(1, 10):
        sampler.sample(torch.zeros(count, 10), np.arange(count), np.arange(count) + 5)
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
