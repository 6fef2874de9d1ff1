"""The ops of one of several ranks, each of which has a part of the heads, of the experts' rows and of the vocabulary.

Where the ranks meet:

| what each rank leaves | meets |
|---|---|
| rows of its tokens, zeros for other tokens | in `embed`, so that x is whole before the first norm |
| partial sums of attention and of experts | in the next norm, which has a residual; the first norm has none |
| the best token of its own, by score | in the choice, where nothing but temperature is asked |
| logits of its tokens | in `lm_head`, for all other rows |

So every rank has the same x after a norm, and chooses the same token.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from oscine.ops.interface import Sample, Sampled, SamplingBatch
from oscine.ops.platforms.table import NORMS
from oscine.ops.target import Communicator

Op = Callable[..., Any]


def across(ops: Mapping[str, Op], communicator: Communicator, adding: Collection[str] = ()) -> dict[str, Op]:
    """Those ops that differ, as in interface.Ops. adding: norms and embed, if they add up over ranks themselves."""

    def after_meeting(norm: Op) -> Op:
        def meet(x: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor | None, *rest: Any) -> Any:
            if residual_TH is not None:  # else x is the embedding
                # One row of a token per message instead of J.
                x = communicator.all_reduce(x if x.dim() == 2 else x.sum(1, dtype=torch.float32).to(weight_H.dtype))
            return norm(x, weight_H, eps, residual_TH, *rest)

        return meet

    embed_part, part_of_logits, best_of_few = ops["embed_part"], ops["lm_head"], ops["best_of_few"]

    def embed(token_ids_T: Tensor, weight_VH: Tensor) -> Tensor:
        x_TH = embed_part(token_ids_T, weight_VH, communicator.rank * len(weight_VH))
        return x_TH if "embed" in adding else communicator.all_reduce(x_TH)

    def lm_head(x_NH: Tensor, weight_VH: Tensor) -> Tensor:
        return communicator.all_gather(part_of_logits(x_NH, weight_VH))

    def choose_few(x_KH: Tensor, weight_VH: Tensor, few_KA: Tensor, temperature_K: Tensor, noise_KA: Tensor) -> Tensor:
        first = communicator.rank * len(weight_VH)
        return communicator.best(*best_of_few(x_KH, weight_VH, few_KA, temperature_K, noise_KA, first))

    norms = {name: after_meeting(ops[name]) for name in NORMS if name not in adding}
    return {**norms, "embed": embed, "lm_head": lm_head, "choose_few": choose_few}


def sample_across(best: Op, communicator: Communicator) -> Sample:
    """`sample` for a chooser: takes the logits of this rank's tokens, and finds the token of all ranks."""

    def sample(logits_NV: Tensor, sampling: SamplingBatch) -> Sampled:
        first = communicator.rank * logits_NV.shape[1]
        return Sampled(communicator.best(*best(logits_NV, sampling, first)))

    return sample
