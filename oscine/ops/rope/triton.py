"""Rotation of a finished projection and the write of its keys and values into the paged cache, for any CUDA GPU.

The definition is reference.py beside this file. A program takes a few heads of a few tokens; its heads are all
queries, all keys or all values. Queries may be left as they are, for attention to rotate as it reads them: with many
tokens, reading and writing them once more takes as long as a seventh of the projection.

Shape suffixes: T tokens of a program, B heads of a program, D half of a head's dimensions.
"""

from math import gcd

import triton
import triton.language as tl
from torch import Tensor

from oscine.ops.interface import Queries, UnrotatedQueries
from oscine.ops.kv.fp8 import page_size_of
from oscine.ops.kv.triton import exponent_for, power_of_two, to_bytes
from oscine.ops.launch import depend
from oscine.ops.target import Target


@triton.jit
def load_queries(q_ptr, first_T, head_R, real_TR, cos_sin_ptr, position_T, HEAD_DIM: tl.constexpr):
    """[T * R, D]: some heads of the tokens that begin at first_T, rotated unless cos_sin_ptr is None."""
    first_TR = first_T[:, None] + (head_R * HEAD_DIM)[None, :]
    if cos_sin_ptr is None:
        at_TRD = first_TR[:, :, None] + tl.arange(0, HEAD_DIM)[None, None, :]
        q_TRD = tl.load(q_ptr + at_TRD, mask=real_TR[:, :, None], other=0.0)
    else:
        HALF: tl.constexpr = HEAD_DIM // 2
        dim_D = tl.arange(0, HALF)
        at_TRD = first_TR[:, :, None] + dim_D[None, None, :]
        first = tl.load(q_ptr + at_TRD, mask=real_TR[:, :, None], other=0.0).to(tl.float32)
        second = tl.load(q_ptr + at_TRD + HALF, mask=real_TR[:, :, None], other=0.0).to(tl.float32)
        angle_TD = cos_sin_ptr + position_T[:, None] * HEAD_DIM + dim_D[None, :]
        cos = tl.load(angle_TD)[:, None, :]
        sin = tl.load(angle_TD + HALF)[:, None, :]
        halves = tl.join(first * cos - second * sin, second * cos + first * sin).to(q_ptr.dtype.element_ty)
        q_TRD = tl.permute(halves, (0, 1, 3, 2))
    return tl.reshape(q_TRD, [real_TR.shape[0] * real_TR.shape[1], HEAD_DIM])


@triton.jit(do_not_specialize=["num_tokens"])
def rope_and_write_kernel(
    qkv_ptr,
    cos_sin_ptr,
    positions_ptr,
    slots_ptr,
    q_ptr,
    kv_ptr,
    exponents_ptr,
    num_tokens,
    kv_page_stride,
    kv_kind_stride,
    kv_head_stride,
    kv_slot_stride,
    QUERY_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (parts of the tokens, parts of the heads); without q_ptr, only of the heads of keys and values."""
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    first_head = tl.program_id(1) * HEADS
    if q_ptr is None:
        first_head += QUERY_HEADS
    head_B = first_head + tl.arange(0, HEADS)
    depend(PDL)
    valid_T = token_T < num_tokens
    valid = valid_T[:, None, None]
    dim_D = tl.arange(0, HALF)
    all_heads: tl.constexpr = QUERY_HEADS + 2 * KV_HEADS
    row_TB = token_T[:, None].to(tl.int64) * all_heads + head_B[None, :]
    at_TBD = row_TB[:, :, None] * (2 * HALF) + dim_D[None, None, :]
    first = tl.load(qkv_ptr + at_TBD, valid, other=0.0).to(tl.float32)
    second = tl.load(qkv_ptr + at_TBD + HALF, valid, other=0.0).to(tl.float32)
    if first_head < QUERY_HEADS + KV_HEADS:
        position_T = tl.load(positions_ptr + token_T, valid_T, other=0)
        angle_TD = position_T[:, None] * (2 * HALF) + dim_D[None, :]
        cos = tl.load(cos_sin_ptr + angle_TD)[:, None, :]
        sin = tl.load(cos_sin_ptr + angle_TD + HALF)[:, None, :]
        a, b = first, second
        first = a * cos - b * sin
        second = b * cos + a * sin
    if first_head < QUERY_HEADS:
        if q_ptr is not None:
            row_TB = token_T[:, None].to(tl.int64) * QUERY_HEADS + head_B[None, :]
            out_TBD = row_TB[:, :, None] * (2 * HALF) + dim_D[None, None, :]
            tl.store(q_ptr + out_TBD, first.to(q_ptr.dtype.element_ty), valid)
            tl.store(q_ptr + out_TBD + HALF, second.to(q_ptr.dtype.element_ty), valid)
    else:
        slot_T = tl.load(slots_ptr + token_T, valid_T, other=0)
        kind_B = (head_B - QUERY_HEADS) // KV_HEADS
        group_B = (head_B - QUERY_HEADS) % KV_HEADS
        page_T = (slot_T // PAGE) * kv_page_stride
        at_T = page_T + (slot_T % PAGE) * kv_slot_stride
        at_B = kind_B.to(tl.int64) * kv_kind_stride + group_B * kv_head_stride
        out_TBD = at_T[:, None, None] + at_B[None, :, None] + dim_D[None, None, :]
        if kv_ptr.dtype.element_ty == tl.uint8:
            if exponents_ptr is None:
                exponent_TB = exponent_for(tl.max(tl.maximum(tl.abs(first), tl.abs(second)), 2))
            else:
                exponent_B = tl.load(exponents_ptr + head_B - QUERY_HEADS).to(tl.int32)
                exponent_TB = tl.broadcast_to(exponent_B[None, :], (TOKENS, HEADS))
            inverse = power_of_two(254 - exponent_TB)[:, :, None]
            scales_T = page_T + PAGE * kv_slot_stride + slot_T % PAGE
            tl.store(kv_ptr + scales_T[:, None] + at_B[None, :], exponent_TB.to(tl.uint8), valid_T[:, None])
            tl.store(kv_ptr + out_TBD, to_bytes(first * inverse), valid)
            tl.store(kv_ptr + out_TBD + HALF, to_bytes(second * inverse), valid)
        else:
            tl.store(kv_ptr + out_TBD, first.to(kv_ptr.dtype.element_ty), valid)
            tl.store(kv_ptr + out_TBD + HALF, second.to(kv_ptr.dtype.element_ty), valid)


def rope_and_write(
    target: Target,
    qkv: Tensor,
    cos_sin: Tensor,
    positions_T: Tensor,
    kv_pages: Tensor,
    slots_T: Tensor,
    exponents_2G: Tensor | None = None,
    *,
    leave_rotation: bool = False,
) -> Queries:
    """qkv [T, (Q + 2G) * D], contiguous -> q [T, Q, D]; keys and values go to slots_T of kv_pages [pages, 2, G, R, D].

    exponents_2G: as in QkvProjection. leave_rotation: the queries stay in qkv, and attention rotates them.
    D / 2 must be a power of two, and the last dimension of kv_pages contiguous.
    """
    _, _, num_kv_heads, _, head_dim = kv_pages.shape
    half = head_dim // 2
    if half & (half - 1):
        raise ValueError(f"head_dim {head_dim}: this op needs a power of two")
    num_tokens = qkv.shape[0]
    num_heads = qkv.shape[1] // head_dim
    num_query_heads = num_heads - 2 * num_kv_heads
    heads = gcd(num_query_heads, num_kv_heads, 8)
    tokens = max(1, min(16, triton.next_power_of_2(num_tokens // 16)))
    page_stride, kind_stride, head_stride, slot_stride, _ = kv_pages.stride()
    q_TQD = None if leave_rotation else qkv.new_empty(num_tokens, num_query_heads, head_dim)
    programs = (2 * num_kv_heads if leave_rotation else num_heads) // heads
    rope_and_write_kernel[(triton.cdiv(num_tokens, tokens), programs)](
        qkv,
        cos_sin,
        positions_T,
        slots_T,
        q_TQD,
        kv_pages,
        exponents_2G,
        num_tokens,
        page_stride,
        kind_stride,
        head_stride,
        slot_stride,
        QUERY_HEADS=num_query_heads,
        KV_HEADS=num_kv_heads,
        HALF=half,
        PAGE=page_size_of(kv_pages),
        TOKENS=tokens,
        HEADS=heads,
        num_warps=4,
        **target.launch_options,
    )
    if q_TQD is not None:
        return q_TQD
    return UnrotatedQueries(qkv.view(num_tokens, num_heads, head_dim)[:, :num_query_heads], cos_sin, positions_T)
