"""y = x W^T + b in C: float32 activations, contiguous. Definitions: reference.py.

Weights are float32, bfloat16, or packed int8. int8 weights multiply int8 activations, both in blocks of 32 columns.
"""

import torch
from torch import Tensor

from oscine.ops.interface import AddedProducts
from oscine.ops.native.library import check, library
from oscine.ops.native.weights import PackedDense, matrix, pack_dense
from oscine.ops.target import Target


def prepare_dense(target: Target, weight: Tensor, _: torch.dtype) -> Tensor | PackedDense:
    return pack_dense(weight, target.cpu_weights)


prepare_projection = prepare_dense


def out_proj(x: Tensor, weight: Tensor | PackedDense, bias_H: Tensor, added: AddedProducts | None = None) -> Tensor:
    y = _linear(x, weight, bias_H.data_ptr())
    if added is not None:
        added.add(x, y)
    return y


def lm_head(x_NH: Tensor, weight_VH: Tensor | PackedDense) -> Tensor:
    return _linear(x_NH, weight_VH, None)


def _linear(x: Tensor, weight: Tensor | PackedDense, bias: int | None) -> Tensor:
    """[T, K] x [N, K] -> [T, N]."""
    num_tokens, (address, kind, num_rows, width) = x.shape[0], matrix(weight)
    y = torch.empty(num_tokens, num_rows)
    shape = num_tokens, num_rows, width
    check(library().oscine_linear(x.data_ptr(), address, kind, bias, y.data_ptr(), *shape))
    return y
