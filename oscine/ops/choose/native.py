"""The token of rows with no sampling parameter but temperature: greedy rows in C, without their logits in memory."""

from typing import Any

import torch
from torch import Tensor

from oscine.ops.choose import reference
from oscine.ops.interface import Chooser, LmHead, Sample, SamplingBatch
from oscine.ops.native.library import check, library
from oscine.ops.target import Target


def chooser(target: Target, lm_head: LmHead, sample: Sample) -> Chooser:
    with_noise = reference.chooser(lm_head, sample)
    if target.communicator.num_ranks > 1:  # each has a part of the vocabulary
        return with_noise

    def choose(x_NH: Tensor, weight_VH: Tensor, prepared: Any, sampling: SamplingBatch) -> Tensor:
        if not sampling.greedy:
            return with_noise.choose(x_NH, weight_VH, prepared, sampling)
        ids_N = torch.empty(x_NH.shape[0], dtype=torch.int64)
        check(
            library().oscine_greedy(
                x_NH.data_ptr(), weight_VH.data_ptr(), ids_N.data_ptr(), x_NH.shape[0], *weight_VH.shape
            )
        )
        return ids_N

    return Chooser(with_noise.prepare, with_noise.prepared_bytes, choose)
