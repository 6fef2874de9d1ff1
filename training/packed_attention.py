"""Attention of training: compiled flex_attention over packed documents, with windows and sinks.

Needs a CUDA GPU; attention.DocumentAttention is the same in plain torch. Shapes as in model.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from training.model import Size

_BLOCK = 128  # positions of a flex_attention block


class PackedAttention:
    """Causal attention within the documents of packed rows, by flex_attention; full and sliding layers."""

    def __init__(self, size: Size, starts_BT: Tensor) -> None:
        """starts_BT int32: where the document of each position starts. T is a multiple of 128."""
        self.size = size
        self.full = _block_mask(starts_BT, None)
        self.sliding = _block_mask(starts_BT, size.window)

    def __call__(self, layer: int, q_BNTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, sinks_N: Tensor) -> Tensor:
        mask = self.sliding if self.size.is_sliding(layer) else self.full
        dtype = v_BGTD.dtype
        q, k, v = q_BNTD.to(dtype).contiguous(), k_BGTD.to(dtype).contiguous(), v_BGTD.contiguous()
        out, lse = _flex_apart(q, k, v, mask)
        return out * torch.sigmoid(lse - sinks_N[None, :, None])[..., None].to(dtype)


def of_documents(starts_BT: Tensor) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Full attention without sinks: queries, keys, values -> outputs and the logarithm of the denominator."""
    mask = _block_mask(starts_BT, None)

    def attend(q_BNTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]:
        return _flex_apart(q_BNTD.contiguous(), k_BGTD.contiguous(), v_BGTD.contiguous(), mask)

    return attend


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Attention without sinks, and the logarithm of its denominator [B, N, T]."""
    out, aux = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    return out, aux.lse


_compiled_flex = torch.compile(_flex, dynamic=False)


@torch.compiler.disable(recursive=False)
def _flex_apart(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Compiled as a separate graph: fused with the making of the block mask, torch 2.11 gives wrong numbers for several
    rows."""
    return _compiled_flex(q, k, v, mask)


def _block_mask(starts_BT: Tensor, window: int | None) -> BlockMask:
    """Which blocks of keys each block of queries sees: from where its first document starts up to itself."""
    T = starts_BT.shape[1]
    blocks = torch.arange(T // _BLOCK, dtype=torch.int32, device=starts_BT.device)
    first = starts_BT[:, ::_BLOCK] // _BLOCK
    if window is not None:
        first = torch.maximum(first, blocks - -(-(window - 1) // _BLOCK))
    count = blocks - first + 1
    indices = torch.minimum(first[..., None] + blocks, blocks[-1])
    return BlockMask.from_kv_blocks(
        count[:, None].int(),
        indices[:, None].int(),
        BLOCK_SIZE=_BLOCK,
        mask_mod=_mask(starts_BT, window),
        seq_lengths=(T, T),
    )


def _mask(starts_BT: Tensor, window: int | None) -> Callable[..., Any]:
    def within(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = (k <= q) & (k >= starts_BT[b, q])
        return seen if window is None else seen & (q - k < window)

    return within
