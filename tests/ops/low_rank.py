"""Adapters of one product for tests of the kernels that take them along: the definition in plain torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oscine.ops.interface import LowRank


@dataclass(frozen=True)
class Adapters:
    """An AddedProducts. What is not to be read is NaN."""

    keys_T: Tensor
    into: Tensor  # [slots, segments * R, K]
    out_of: Tensor  # [slots, N, R]
    ends: Sequence[int]  # of the segments, in N

    def add(self, x_TK: Tensor, out: Tensor) -> None:
        has_T = self.keys_T >= 0
        target = out if out.dim() == 2 else out[:, 0]
        target[has_T] += self._products(self._values(x_TK), self.out_of.float())[has_T].to(out.dtype)

    def shrink(self, x_TK: Tensor) -> LowRank:
        y_TR = self._values(x_TK)
        parts = torch.stack((y_TR / 4, y_TR / 2, y_TR / 4))
        parts[:, self.keys_T < 0] = torch.nan
        return LowRank(self.keys_T, parts, self.out_of)

    def expand(self, low: LowRank, squares_TS: Tensor, eps: float) -> Tensor:
        rms_T1 = (squares_TS.sum(1, keepdim=True) / self.into.shape[-1] + eps).sqrt()
        products = self._products(low.y_STR.sum(0) / rms_T1, self.out_of.float())
        return products.to(self.out_of.dtype)

    def _values(self, x_TK: Tensor) -> Tensor:
        return torch.einsum("tk,trk->tr", x_TK.float(), self.into.float()[self.keys_T.clamp(min=0)])

    def _products(self, y_TR: Tensor, out_of: Tensor) -> Tensor:
        rank, starts = self.out_of.shape[-1], (0, *self.ends)
        own = out_of[self.keys_T.clamp(min=0)]
        found = [
            torch.einsum("tr,tnr->tn", y_TR[:, i * rank : (i + 1) * rank], own[:, starts[i] : end])
            for i, end in enumerate(self.ends)
        ]
        return torch.cat(found, 1)


def adapters(num_tokens: int, columns: int, ends: Sequence[int], device: str, rank: int = 16) -> Adapters:
    """Three slots, of which the tokens take some in turn; the second token has none."""
    generator = torch.Generator().manual_seed(num_tokens + columns)
    keys_T = (torch.arange(num_tokens, dtype=torch.int32) * 2) % 3
    keys_T[1::5] = -1

    def factors(*shape: int) -> Tensor:
        """Of slots that other factors lie between."""
        memory = torch.full((3, torch.Size(shape).numel() + 64), torch.nan)
        memory[:, :-64] = torch.randn(3, torch.Size(shape).numel(), generator=generator) / shape[-1] ** 0.5
        return memory.bfloat16().to(device)[:, :-64].unflatten(1, shape)

    into, out_of = factors(len(ends) * rank, columns), factors(ends[-1], rank)
    return Adapters(keys_T.to(device), into, out_of, tuple(ends))
