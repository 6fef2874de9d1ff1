"""Queries, keys and values of a step: norm, projection, bias, rotation, and the write into the paged cache.

The definition; any device.
"""

from torch import Tensor
from torch.nn import functional

from oscine.ops.norm.reference import rms_norm
from oscine.ops.rope.reference import rope_and_write


def norm_qkv(
    x: Tensor,
    norm_weight_H: Tensor,
    eps: float,
    residual_TH: Tensor | None,
    weight_FH: Tensor,
    bias_F: Tensor,
    cos_sin: Tensor,
    positions_T: Tensor,
    kv_pages: Tensor,
    slots_T: Tensor,
) -> tuple[Tensor, Tensor]:
    """Returns (queries [T, Q, D], x + residual); keys and values go to slots_T of kv_pages [pages, 2, G, P, D].

    x is [T, H] or partial sums [T, J, H]; of their sum with the residual the norm is projected. cos_sin [max position,
    D] float32: D/2 cosines, then D/2 sines.
    """
    x_TH, total_TH = rms_norm(x, norm_weight_H, eps, residual_TH)
    projected = functional.linear(x_TH, weight_FH, bias_F)
    return rope_and_write(projected, cos_sin, positions_T, kv_pages, slots_T), total_TH
