"""Rotary position embedding of queries and keys, and the write of keys and values into the paged cache.

With the halves a, b of a head's dimensions and the angle's cos and sin (both scaled by YaRN's attention factor):

    a' = a cos - b sin
    b' = b cos + a sin

Knows the layout of one layer's pages. The table of angles is made in yarn.py beside this file.
"""

import torch
from torch import Tensor

from oscine.ops.kv.reference import store


def rope_and_write(
    qkv: Tensor,
    cos_sin: Tensor,
    positions_T: Tensor,
    kv_pages: Tensor,
    slots_T: Tensor,
    exponents_2G: Tensor | None = None,
) -> Tensor:
    """Rotates and splits qkv, stores keys and values at slots_T of kv_pages, returns the queries.

    qkv [T, (Q + 2G) * D]: all query heads, then all key heads, then all value heads. cos_sin [max position, D]
    float32: D/2 cosines, then D/2 sines. kv_pages [pages, 2, G, R, D], written; exponents_2G as in QkvProjection.
    Returns [T, Q, D] in qkv's dtype; computed in float32 and rounded once.
    """
    _, _, num_kv_heads, _, head_dim = kv_pages.shape
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    values = heads[:, -num_kv_heads:]
    cos_T1D, sin_T1D = cos_sin[positions_T].unsqueeze(1).chunk(2, dim=-1)
    first, second = heads[:, :-num_kv_heads].float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos_T1D - second * sin_T1D, second * cos_T1D + first * sin_T1D), dim=-1)
    keys = rotated[:, -num_kv_heads:]
    store(keys, values, kv_pages, slots_T, exponents_2G)
    return rotated[:, :-num_kv_heads].to(qkv.dtype)
