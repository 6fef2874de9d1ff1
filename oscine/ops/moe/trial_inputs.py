"""The trial of experts with FP8 activations on a GPU on which they never ran."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from oscine.ops.interface import MxExperts, Routing
from oscine.ops.moe import reference
from oscine.ops.target import Target

MAX_ERROR = 0.02  # FP8 of h, rounded another way by one bit now and then, is an error of 0.002


def wrong(
    target: Target,
    prepare: Callable[[Target, MxExperts], Any],
    run: Callable[[Target, Tensor, Routing, Any, float, Any], Tensor],
    tilings: Sequence[Any],
) -> str | None:
    """What is wrong with an op on the target, in words: small experts, beside the reference. None: nothing.

    prepare: experts as published -> the op's own. run: x [T, H], routing, these, SwiGLU's limit, one of `tilings` ->
    partial sums [T, K, H].
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    hidden, intermediate, tokens, limit = 288, 160, 40, 7.0
    experts = MxExperts(
        random(3, 2 * intermediate, hidden // 32, 16),
        random(3, 2 * intermediate, hidden // 32) // 64 + 120,
        torch.randn(3, 2 * intermediate, generator=generator),
        random(3, hidden, intermediate // 32, 16),
        random(3, hidden, intermediate // 32) // 64 + 120,
        torch.randn(3, hidden, generator=generator),
    )
    x_TH = torch.randn(tokens, hidden, generator=generator).bfloat16()
    ids_TK = torch.rand(tokens, 3, generator=generator).argsort(1)[:, :2].int()
    routing = Routing(ids_TK, torch.full((tokens, 2), 0.5))
    expected_TH = reference.moe(x_TH.float(), routing, reference.WithFp8Activations(experts), limit)
    there = Routing(ids_TK.to(target.device), routing.weights_TK.to(target.device))
    moved = MxExperts(*(getattr(experts, name).to(target.device) for name in MxExperts.__slots__))
    prepared, worst = prepare(target, moved), 0.0
    for tiling in tilings:
        found_TH = run(target, x_TH.to(target.device), there, prepared, limit, tiling).float().sum(1).cpu()
        error = float((found_TH - expected_TH).norm() / expected_TH.norm())
        worst = max(worst, error if error == error else torch.inf)
    return f"the experts' results are off by {worst:.3g} of their size" if worst > MAX_ERROR else None
