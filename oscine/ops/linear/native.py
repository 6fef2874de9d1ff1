"""y = x W^T + b in C: float32, contiguous. Definitions: reference.py."""

import torch
from torch import Tensor

from oscine.ops.native.library import library


def out_proj(x: Tensor, weight: Tensor, bias_H: Tensor) -> Tensor:
    return _linear(x, weight, bias_H.data_ptr())


def lm_head(x_NH: Tensor, weight_VH: Tensor) -> Tensor:
    return _linear(x_NH, weight_VH, None)


def _linear(x: Tensor, weight: Tensor, bias: int | None) -> Tensor:
    """[T, K] x [N, K] -> [T, N]."""
    num_tokens, num_rows = x.shape[0], weight.shape[0]
    y = torch.empty(num_tokens, num_rows)
    library().oscine_linear(x.data_ptr(), weight.data_ptr(), bias, y.data_ptr(), num_tokens, num_rows, weight.shape[1])
    return y
