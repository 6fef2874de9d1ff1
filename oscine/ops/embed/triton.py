"""The embedding of a part of the vocabulary as one kernel: sm_80 and newer. Definitions: reference.py."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.ops.embed import reference
from oscine.ops.launch import depend
from oscine.ops.target import Target


def embed(token_ids_T: Tensor, weight_VH: Tensor) -> Tensor:
    """By torch's kernel."""
    return reference.embed(token_ids_T, weight_VH)


def embed_part(target: Target, token_ids_T: Tensor, weight_VH: Tensor, first: int) -> Tensor:
    num_tokens, (vocab, hidden) = len(token_ids_T), weight_VH.shape
    x_TH = torch.empty((num_tokens, hidden), dtype=weight_VH.dtype, device=weight_VH.device)
    if num_tokens:
        embed_part_kernel[(num_tokens,)](
            token_ids_T,
            weight_VH,
            x_TH,
            first,
            vocab,
            H=hidden,
            BLOCK_H=triton.next_power_of_2(hidden),
            num_warps=4,
            **target.launch_options,
        )
    return x_TH


@triton.jit(do_not_specialize=["first"])
def embed_part_kernel(token_ids, weight, x, first, vocab, H: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column_H = tl.arange(0, BLOCK_H)
    inside_H = column_H < H
    depend(PDL)
    row = tl.load(token_ids + token) - first
    mine = (row >= 0) & (row < vocab)
    x_H = tl.load(weight + row * H + column_H, mask=inside_H & mine, other=0)
    tl.store(x + token * H + column_H, x_H, mask=inside_H)
