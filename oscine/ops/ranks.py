"""The ops of one of several ranks, each of which has a part of the heads, of the experts' rows and of the vocabulary.

What attention and experts leave are then partial sums over ranks too. They meet where a norm adds them up: beside a
residual. Logits meet before a token is chosen, so every rank chooses the same.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from oscine.ops.interface import Sample, Sampled, SamplingBatch
from oscine.ops.target import Communicator

Op = Callable[..., Any]
NORMS = ("rms_norm", "norm_qkv", "norm_route")


def across(ops: Mapping[str, Op], communicator: Communicator) -> dict[str, Op]:
    """Those ops that differ, as in interface.Ops."""

    def after_meeting(norm: Op) -> Op:
        def meet(x: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor | None, *rest: Any) -> Any:
            whole = x if residual_TH is None else communicator.all_reduce(x)
            return norm(whole, weight_H, eps, residual_TH, *rest)

        return meet

    part_of_logits, best_of_few = ops["lm_head"], ops["best_of_few"]

    def lm_head(x_NH: Tensor, weight_VH: Tensor) -> Tensor:
        return communicator.all_gather(part_of_logits(x_NH, weight_VH))

    def choose_few(x_KH: Tensor, weight_VH: Tensor, few_KA: Tensor, temperature_K: Tensor, noise_KA: Tensor) -> Tensor:
        first = communicator.rank * len(weight_VH)
        return communicator.best(*best_of_few(x_KH, weight_VH, few_KA, temperature_K, noise_KA, first))

    return {name: after_meeting(ops[name]) for name in NORMS} | {"lm_head": lm_head, "choose_few": choose_few}


def sample_across(best: Op, communicator: Communicator) -> Sample:
    """`sample` for a chooser: takes the logits of this rank's tokens, and finds the token of all ranks."""

    def sample(logits_NV: Tensor, sampling: SamplingBatch) -> Sampled:
        first = communicator.rank * logits_NV.shape[1]
        return Sampled(communicator.best(*best(logits_NV, sampling, first)))

    return sample
