"""y = x W^T + b: the projection out of attention, and the head. The definitions; any device."""

import torch
from torch import Tensor
from torch.nn import functional

from oscine.ops.interface import AddedProducts


def prepare_dense(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.to(dtype)


prepare_projection = prepare_dense


def out_proj(x: Tensor, weight: Tensor, bias_H: Tensor, added: AddedProducts | None = None) -> Tensor:
    """[T, Q * D] x [H, Q * D] -> [T, H], in the dtype of its inputs, with what adapters add."""
    y = functional.linear(x, weight, bias_H)
    if added is not None:
        added.add(x, y)
    return y


def lm_head(x_NH: Tensor, weight_VH: Tensor) -> Tensor:
    """[N, H] x [V, H] -> logits [N, V], float32."""
    return functional.linear(x_NH, weight_VH).float()
