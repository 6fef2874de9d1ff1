"""Queries, keys and values of a step: norm, projection, bias, rotation, and the write into the paged cache.

The definition; any device.
"""

from torch import Tensor
from torch.nn import functional

from oscine.ops.interface import QkvProjection
from oscine.ops.norm.reference import rms_norm
from oscine.ops.rope.reference import rope_and_write


def norm_qkv(
    x: Tensor, norm_weight_H: Tensor, eps: float, residual_TH: Tensor | None, projection: QkvProjection
) -> tuple[Tensor, Tensor]:
    """Returns (queries [T, Q, D], x + residual). x is [T, H] or partial sums [T, J, H]."""
    x_TH, total_TH = rms_norm(x, norm_weight_H, eps, residual_TH)
    weight_FH, bias_F, *_ = projection
    qkv = functional.linear(x_TH, weight_FH, bias_F)
    if projection.added is not None:
        projection.added.add(x_TH, qkv)
    place = projection.cos_sin, projection.positions_T, projection.kv_pages, projection.slots_T
    return rope_and_write(qkv, *place, projection.exponents_2G), total_TH
