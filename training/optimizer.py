"""Muon for the matrices of the blocks, AdamW for everything else."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic Newton-Schulz iteration, Jordan et al. 2024


class Muon(torch.optim.Optimizer):
    """Momentum whose matrix is replaced by the nearest semi-orthogonal one. A third axis counts separate matrices."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            for parameters in by_shape.values():
                self._step_alike(parameters, group)

    def _step_alike(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Matrices of one shape take their step together: far fewer kernels."""
        gradients = [parameter.grad for parameter in parameters]
        buffers = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in parameters]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        updates = orthogonalise(torch.stack(torch._foreach_lerp(gradients, buffers, group["momentum"])))
        rows, columns = parameters[0].shape[-2:]
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, list(updates), alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """Roughly U V^T of the singular value decomposition of the last two axes."""
    a, b, c = _COEFFICIENTS
    x = matrix.bfloat16() if matrix.is_cuda else matrix
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix.dtype)


def make_optimizers(model: nn.Module, muon_lr: float, adam_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for block matrices except the router's; AdamW for embeddings, head, router, norms, biases and sinks."""
    matrices, embeddings, rest = [], [], []
    for name, parameter in model.named_parameters():
        if name.endswith(("proj", "proj.weight")):
            matrices.append(parameter)
        elif "embed" in name or "lm_head" in name:
            embeddings.append(parameter)
        else:
            rest.append(parameter)
    groups = [{"params": embeddings, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    fused = matrices[0].is_cuda
    return [
        Muon(matrices, muon_lr, weight_decay=0.05),
        torch.optim.AdamW(groups, adam_lr, betas=(0.9, 0.98), eps=1e-8, fused=fused),
    ]
