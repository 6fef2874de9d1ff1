"""One kernel that writes tokens from a GPU to pinned host memory, and one that reads the sums of their experts.

Copies and conversions would be seven kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.ops.interface import Routing


def send(x_TH: Tensor, routing: Routing, out_TH: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> None:
    """Writes float32 [T, H], int64 [T, K] and float32 [T, K] on the host."""
    (num_tokens, hidden), per_token = x_TH.shape, ids_TK.shape[1]
    if num_tokens:
        send_kernel[(num_tokens,)](
            x_TH,
            routing.expert_ids_TK,
            routing.weights_TK,
            out_TH,
            ids_TK,
            weights_TK,
            H=hidden,
            K=per_token,
            BLOCK_H=triton.next_power_of_2(hidden),
            BLOCK_K=triton.next_power_of_2(per_token),
            enable_fp_fusion=True,
        )


def receive(sums_TH: Tensor, device: torch.device) -> Tensor:
    """[T, H] on the host -> [T, H] on the device."""
    out_TH = torch.empty(sums_TH.shape, dtype=sums_TH.dtype, device=device)
    if len(sums_TH):
        hidden = sums_TH.shape[1]
        block = triton.next_power_of_2(hidden)
        receive_kernel[(len(sums_TH),)](sums_TH, out_TH, H=hidden, BLOCK_H=block, enable_fp_fusion=True)
    return out_TH


@triton.jit
def send_kernel(
    x,
    expert_ids,
    weights,
    x_out,
    ids_out,
    weights_out,
    H: tl.constexpr,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    token = tl.program_id(0)
    column_H, chosen_K = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_K)
    tl.store(x_out + token * H + column_H, tl.load(x + token * H + column_H, mask=column_H < H), mask=column_H < H)
    at_K = token * K + chosen_K
    tl.store(ids_out + at_K, tl.load(expert_ids + at_K, mask=chosen_K < K), mask=chosen_K < K)
    tl.store(weights_out + at_K, tl.load(weights + at_K, mask=chosen_K < K), mask=chosen_K < K)


@triton.jit
def receive_kernel(sums, out, H: tl.constexpr, BLOCK_H: tl.constexpr):
    column_H = tl.arange(0, BLOCK_H)
    at_H = tl.program_id(0) * H + column_H
    tl.store(out + at_H, tl.load(sums + at_H, mask=column_H < H), mask=column_H < H)
