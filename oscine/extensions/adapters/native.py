"""The products of adapters in C, for CPUs. All but the factors is float32. Definitions: products.py."""

from functools import cache

import torch
from torch import Tensor

from oscine.extensions.adapters.products import Norm, Reference, Rows
from oscine.ops.native.library import check, library
from oscine.ops.native.weights import matrix


class Native(Reference):
    """A Backend."""

    def shrink(self, x: Tensor, rows: Rows, into: Tensor, segments: int) -> Tensor:
        x, y = x.contiguous(), torch.empty(rows.size, into.shape[-2])
        per_row = rows.size // len(x) if len(x) else 1
        inputs = x.data_ptr(), rows.keys_P.data_ptr(), *_factors(into)
        check(library().oscine_low_rank_in(*inputs, y.data_ptr(), rows.size, per_row, *into.shape[-2:]))
        return y

    def expand(
        self,
        y: Tensor,
        rows: Rows,
        out_of: Tensor,
        out: Tensor,
        *,
        adds: bool,
        ends: tuple[int, ...] = (),
        norm: Norm | None = None,
    ) -> None:
        assert out.is_contiguous()
        y, parts = y if norm is None else norm.of(y), _integers(ends or (out_of.shape[-2],))
        inputs = y.data_ptr(), rows.keys_P.data_ptr(), *_factors(out_of), parts.data_ptr(), out.data_ptr()
        stride = out.numel() // max(1, rows.size)
        check(library().oscine_low_rank_out(*inputs, rows.size, len(parts), *out_of.shape[-2:], stride, adds))


def _factors(tensor: Tensor) -> tuple[int, int, int, int]:
    """[S, (E,) N, K]: address, type, E, and elements from a slot to the next."""
    one = tensor[0]
    assert one.is_contiguous()
    experts = one.shape[0] if one.dim() == 3 else 1
    return *matrix(one.flatten(0, -2))[:2], experts, tensor.stride(0)


@cache
def _integers(numbers: tuple[int, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)
