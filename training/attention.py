"""How a batch attends: compiled over packed documents for training, dense over a cache for generation.

Knows masks, windows, sinks and caches. Shapes as in model.py; S cached positions.
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


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """Attention without sinks, and the logarithm of its denominator [B, N, T]."""
    out, aux = flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True))
    return out, aux.lse


_compiled_flex = torch.compile(_flex, dynamic=False)


@torch.compiler.disable(recursive=False)
def _flex_apart(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> tuple[Tensor, Tensor]:
    """A graph of its own: fused with the making of the block mask, torch 2.11 gives wrong numbers for several rows."""
    return _compiled_flex(q, k, v, mask)


def _block_mask(starts_BT: Tensor, window: int | None) -> BlockMask:
    """Which blocks of keys each block of queries sees: from where its first document starts up to itself."""
    B, T = starts_BT.shape
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


class CachedAttention:
    """Dense attention over a KV cache, whose rows hold sequences of different lengths from position 0 on."""

    def __init__(self, size: Size, rows: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        self.size = size
        shape = (size.layers, 2, rows, size.kv_heads, capacity, size.head_dim)
        self.cache = torch.zeros(shape, device=device, dtype=dtype)
        self.positions_BT = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.length = 0

    def advance(self, positions_BT: Tensor) -> None:
        """Says where the tokens of the next forward pass stand."""
        self.positions_BT = positions_BT
        self.length = int(positions_BT.max()) + 1

    def __call__(self, layer: int, q_BNTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, sinks_N: Tensor) -> Tensor:
        index = self.positions_BT[:, None, :, None].expand_as(k_BGTD)
        keys, values = self.cache[layer]
        keys.scatter_(2, index, k_BGTD.to(keys.dtype))
        values.scatter_(2, index, v_BGTD.to(values.dtype))
        return attend_densely(
            q_BNTD, keys[:, :, : self.length], values[:, :, : self.length], sinks_N, self._seen_BTS(layer)
        )

    def _seen_BTS(self, layer: int) -> Tensor:
        k = torch.arange(self.length, device=self.positions_BT.device)
        q = self.positions_BT[..., None]
        seen = k <= q
        return seen & (q - k < self.size.window) if self.size.is_sliding(layer) else seen


class DocumentAttention:
    """Dense attention over packed rows: what PackedAttention computes, for devices without it."""

    def __init__(self, size: Size, starts_BT: Tensor) -> None:
        self.size = size
        self.starts_BT = starts_BT

    def __call__(self, layer: int, q_BNTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, sinks_N: Tensor) -> Tensor:
        k = torch.arange(self.starts_BT.shape[1], device=self.starts_BT.device)
        q = k[:, None]
        seen = (k <= q) & (k >= self.starts_BT[..., None])
        if self.size.is_sliding(layer):
            seen = seen & (q - k < self.size.window)
        return attend_densely(q_BNTD, k_BGTD, v_BGTD, sinks_N, seen)


def attend_densely(q_BNTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, sinks_N: Tensor, seen_BTS: Tensor) -> Tensor:
    """Softmax attention whose denominator also counts exp(sink), for queries grouped over fewer KV heads."""
    groups = k_BGSD.shape[1]
    q = q_BNTD.unflatten(1, (groups, -1))
    scores = (q @ k_BGSD[:, :, None].transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen_BTS[:, None, None], -torch.inf)
    sinks = sinks_N.float().view(groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
    probabilities = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1].to(v_BGSD.dtype)
    return (probabilities @ v_BGSD[:, :, None]).flatten(1, 2)
