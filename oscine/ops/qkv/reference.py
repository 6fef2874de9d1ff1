"""Queries, keys and values of a step: projection, bias, rotation, and the write into the paged cache.

The definition; any device.
"""

from torch import Tensor
from torch.nn import functional

from oscine.ops.rope.reference import rope_and_write


def qkv(
    x_TH: Tensor,
    weight_FH: Tensor,
    bias_F: Tensor,
    cos_sin: Tensor,
    positions_T: Tensor,
    kv_pages: Tensor,
    slots_T: Tensor,
) -> Tensor:
    """Returns the queries [T, Q, D]; keys and values go to slots_T of kv_pages [pages, 2, G, P, D].

    cos_sin [max position, D] float32: D/2 cosines, then D/2 sines.
    """
    return rope_and_write(functional.linear(x_TH, weight_FH, bias_F), cos_sin, positions_T, kv_pages, slots_T)
