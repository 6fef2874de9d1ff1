"""RMSNorm, and the router behind it, in C: float32, contiguous. Definitions: reference.py."""

from typing import Any

import torch
from torch import Tensor

from oscine.ops.interface import Routing
from oscine.ops.native.library import check, library


def rms_norm(x: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor | None) -> tuple[Tensor, Tensor]:
    y_TH, sum_TH = _outputs(x)
    check(library().oscine_rms_norm(*_arguments(x, residual_TH, weight_H, eps, y_TH, sum_TH)))
    return y_TH, sum_TH


def norm_route(
    x: Tensor,
    weight_H: Tensor,
    eps: float,
    residual_TH: Tensor,
    router_weight_EH: Tensor,
    router_bias_E: Tensor,
    experts_per_token: int,
) -> tuple[Tensor, Tensor, Routing]:
    y_TH, sum_TH = _outputs(x)
    weights_TK = torch.empty(len(x), experts_per_token)
    ids_TK = torch.empty(len(x), experts_per_token, dtype=torch.int64)
    check(
        library().oscine_norm_route(
            *_arguments(x, residual_TH, weight_H, eps, y_TH, sum_TH),
            router_weight_EH.data_ptr(),
            router_bias_E.data_ptr(),
            router_bias_E.shape[0],
            experts_per_token,
            ids_TK.data_ptr(),
            weights_TK.data_ptr(),
        )
    )
    return y_TH, sum_TH, Routing(ids_TK, weights_TK)


def _outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    """[T, H] each: the normed sum, and the sum."""
    num_tokens, hidden = x.shape[0], x.shape[-1]
    return torch.empty(num_tokens, hidden), torch.empty(num_tokens, hidden)


def _arguments(
    x: Tensor, residual_TH: Tensor | None, weight_H: Tensor, eps: float, y_TH: Tensor, sum_TH: Tensor
) -> tuple[Any, ...]:
    """The arguments that both C functions begin with."""
    num_parts, residual = x.shape[1] if x.dim() == 3 else 1, None if residual_TH is None else residual_TH.data_ptr()
    outputs = y_TH.data_ptr(), sum_TH.data_ptr()
    return x.data_ptr(), num_parts, residual, weight_H.data_ptr(), eps, *outputs, *y_TH.shape
