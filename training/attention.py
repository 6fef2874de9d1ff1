"""Dense attention: over a cache for generation, over packed documents where flex_attention cannot train.

Shapes as in model.py; S cached positions.
"""

import torch
from torch import Tensor

from training.model import Size


class CachedAttention:
    """Dense attention over a KV cache, whose rows hold sequences of different lengths from position 0 on."""

    def __init__(self, size: Size, rows: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        self.size = size
        shape = (size.layers, 2, rows, size.kv_heads, capacity, size.head_dim)
        self.cache = torch.zeros(shape, device=device, dtype=dtype)
        self.positions_BT = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self.length = 0

    def advance(self, positions_BT: Tensor) -> None:
        """Sets the positions of the next forward pass."""
        self.positions_BT = positions_BT
        self.length = int(positions_BT.max()) + 1

    def __call__(self, layer: int, q_BNTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, sinks_N: Tensor) -> Tensor:
        index = self.positions_BT[:, None, :, None].expand_as(k_BGTD)
        keys, values = self.cache[layer]
        keys.scatter_(2, index, k_BGTD.to(keys.dtype))
        values.scatter_(2, index, v_BGTD.to(values.dtype))
        return attend_densely(
            q_BNTD, keys[:, :, : self.length], values[:, :, : self.length], sinks_N, self._seen(layer)
        )

    def _seen(self, layer: int) -> Tensor:
        k = torch.arange(self.length, device=self.positions_BT.device)
        q = self.positions_BT[..., None]
        seen = k <= q
        return seen & (q - k < self.size.window) if self.size.is_sliding(layer) else seen


class DocumentAttention:
    """Dense attention over packed rows: the same as PackedAttention, for devices without flex_attention."""

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
