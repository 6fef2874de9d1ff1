"""Queries, keys and values of a step, in C: float32, contiguous. Definition: reference.py."""

import torch
from torch import Tensor

from oscine.ops.interface import QkvProjection
from oscine.ops.linear.native import out_proj
from oscine.ops.native.library import check, library
from oscine.ops.native.weights import matrix
from oscine.ops.norm.native import rms_norm
from oscine.ops.rope.reference import rope_and_write


def norm_qkv(
    x: Tensor, norm_weight_H: Tensor, eps: float, residual_TH: Tensor | None, projection: QkvProjection
) -> tuple[Tensor, Tensor]:
    if projection.added is not None:
        return _with_added(x, norm_weight_H, eps, residual_TH, projection)
    weight_FH, bias_F, cos_sin, positions_T, kv_pages, slots_T, *_ = projection  # pages are never in FP8 here
    address, kind, num_rows, hidden = matrix(weight_FH)
    _, _, num_kv_heads, page_size, head_dim = kv_pages.shape
    num_heads = num_rows // head_dim - 2 * num_kv_heads
    total_TH, q_TQD = torch.empty(x.shape[0], hidden), torch.empty(x.shape[0], num_heads, head_dim)
    check(
        library().oscine_norm_qkv(
            x.data_ptr(),
            x.shape[1] if x.dim() == 3 else 1,
            None if residual_TH is None else residual_TH.data_ptr(),
            norm_weight_H.data_ptr(),
            eps,
            total_TH.data_ptr(),
            x.shape[0],
            hidden,
            address,
            kind,
            bias_F.data_ptr(),
            cos_sin.data_ptr(),
            positions_T.data_ptr(),
            slots_T.data_ptr(),
            q_TQD.data_ptr(),
            num_heads,
            kv_pages.data_ptr(),
            kv_pages.stride(0),
            num_kv_heads,
            page_size,
            head_dim,
        )
    )
    return q_TQD, total_TH


def _with_added(
    x: Tensor, norm_weight_H: Tensor, eps: float, residual_TH: Tensor | None, projection: QkvProjection
) -> tuple[Tensor, Tensor]:
    """The same, op by op: adapters add to the products before the rotation."""
    assert projection.added is not None
    x_TH, total_TH = rms_norm(x, norm_weight_H, eps, residual_TH)
    qkv = out_proj(x_TH, projection.weight_FH, projection.bias_F, projection.added)
    place = projection.cos_sin, projection.positions_T, projection.kv_pages, projection.slots_T
    return rope_and_write(qkv, *place).contiguous(), total_TH
