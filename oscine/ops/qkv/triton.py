"""Queries, keys and values on any CUDA GPU: norm, cuBLAS, then one kernel for the rotation and the cache write.

With many tokens the rotation of queries is left to attention, which reads them anyway.
"""

from torch import Tensor
from torch.nn import functional

from oscine.ops.interface import QkvProjection, Queries
from oscine.ops.norm.triton import rms_norm
from oscine.ops.rope.triton import rope_and_write
from oscine.ops.target import Target

ADDS_UP = True  # partial sums over ranks (extensions/parallel/comm/ops.py)
CAN_LEAVE_ROTATION = True  # of queries, to attention
MAX_ROTATED = 64  # tokens of a step whose queries are rotated here: with so few, attention would wait for the angles


def norm_qkv(
    target: Target,
    x: Tensor,
    norm_weight_H: Tensor,
    eps: float,
    residual_TH: Tensor | None,
    projection: QkvProjection,
    *,
    leave_rotation: bool = False,
) -> tuple[Queries, Tensor]:
    """See reference.py; head dimensions must be powers of two. leave_rotation: attention can rotate queries."""
    x_TH, total_TH = rms_norm(target, x, norm_weight_H, eps, residual_TH)
    weight_FH, bias_F, *_ = projection
    qkv = functional.linear(x_TH, weight_FH, bias_F)
    if projection.added is not None:
        projection.added.add(x_TH, qkv)
    place = projection.cos_sin, projection.positions_T, projection.kv_pages, projection.slots_T
    leave_rotation &= len(qkv) > MAX_ROTATED
    queries = rope_and_write(target, qkv, *place, projection.exponents_2G, leave_rotation=leave_rotation)
    return queries, total_TH
