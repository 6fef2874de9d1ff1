"""The embedding as one kernel, for one of several ranks, or from host memory. sm_80 and newer.

Definitions: reference.py.

If the ranks have memory that all can write (oscine/ops/comm), the kernel also adds up over them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.ops.comm.sums import COLUMNS_PER_WARP, partial_sums, places_of, sum_over_ranks
from oscine.ops.embed import reference
from oscine.ops.launch import depend
from oscine.ops.target import Target

ADDS_UP = True  # partial sums over ranks (extensions/parallel/comm/ops.py)

prepare_embedding = reference.prepare_embedding


def embed(target: Target, token_ids_T: Tensor, weight_VH: Tensor) -> Tensor:
    """Uses torch's kernel, unless the weights are in pinned host memory."""
    if weight_VH.device == token_ids_T.device:
        return reference.embed(token_ids_T, weight_VH)
    return embed_part(target, token_ids_T, weight_VH, 0)


def embed_part(target: Target, token_ids_T: Tensor, weight_VH: Tensor, first: int) -> Tensor:
    """The same as reference.embed_part, or its sum over the ranks."""
    num_tokens, (vocab, hidden) = len(token_ids_T), weight_VH.shape
    x_TH = torch.empty((num_tokens, hidden), dtype=weight_VH.dtype, device=token_ids_T.device)
    block = max(COLUMNS_PER_WARP, triton.next_power_of_2(hidden))
    if num_tokens:
        embed_part_kernel[(num_tokens,)](
            token_ids_T,
            weight_VH,
            x_TH,
            first,
            vocab,
            **partial_sums(target, "embedding", num_tokens, hidden),
            H=hidden,
            BLOCK_H=block,
            num_warps=min(16, block // COLUMNS_PER_WARP),
            **target.launch_options,
        )
    return x_TH


@triton.jit(do_not_specialize=["first", "rank"])
def embed_part_kernel(
    token_ids,
    weight,
    x,
    first,
    vocab,
    addresses,
    slot,
    rank,
    state,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    RANKS: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column_H = tl.arange(0, BLOCK_H)
    inside_H = column_H < H
    depend(PDL)
    row = tl.load(token_ids + token) - first
    mine = (row >= 0) & (row < vocab)
    x_H = tl.load(weight + row * H + column_H, mask=inside_H & mine, other=0)
    if RANKS > 1:
        place_H = places_of(token, column_H, inside_H, H)
        sum_H = sum_over_ranks(x_H, place_H, token.to(tl.int32), addresses, slot, rank, state, RANKS, TWO_SHOT, PACK=8)
        x_H = sum_H.to(x_H.dtype)  # exact: only one rank has the token
    tl.store(x + token * H + column_H, x_H, mask=inside_H)
