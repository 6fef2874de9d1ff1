"""RMSNorm, and the router behind it, in C: float32, contiguous. Definitions: reference.py."""

import torch
from torch import Tensor

from oscine.ops.interface import Routing
from oscine.ops.native.library import check, library


def rms_norm(x: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor | None) -> tuple[Tensor, Tensor]:
    num_tokens, hidden = x.shape[0], x.shape[-1]
    y_TH, sum_TH = torch.empty(num_tokens, hidden), torch.empty(num_tokens, hidden)
    check(
        library().oscine_rms_norm(
            x.data_ptr(),
            x.shape[1] if x.dim() == 3 else 1,
            None if residual_TH is None else residual_TH.data_ptr(),
            weight_H.data_ptr(),
            eps,
            y_TH.data_ptr(),
            sum_TH.data_ptr(),
            num_tokens,
            hidden,
        )
    )
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
    num_tokens, hidden = residual_TH.shape
    y_TH, sum_TH = torch.empty(num_tokens, hidden), torch.empty(num_tokens, hidden)
    weights_TK = torch.empty(num_tokens, experts_per_token)
    ids_TK = torch.empty(num_tokens, experts_per_token, dtype=torch.int64)
    check(
        library().oscine_norm_route(
            x.data_ptr(),
            x.shape[1] if x.dim() == 3 else 1,
            residual_TH.data_ptr(),
            weight_H.data_ptr(),
            eps,
            y_TH.data_ptr(),
            sum_TH.data_ptr(),
            num_tokens,
            hidden,
            router_weight_EH.data_ptr(),
            router_bias_E.data_ptr(),
            router_bias_E.shape[0],
            experts_per_token,
            ids_TK.data_ptr(),
            weights_TK.data_ptr(),
        )
    )
    return y_TH, sum_TH, Routing(ids_TK, weights_TK)
