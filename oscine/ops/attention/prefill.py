"""Prefill attention: chunks of any length over a paged context, causal, with an optional window.

A program takes a tile of one sequence: some tokens times the query heads of one key head, rows of the same tile, so
that each key and value read serves all of them. Tiles are found on the device: sequence i of those after the decodes
may own tiles starts[i] // TOKENS + i and on, a bound that needs no prefix sum; tiles past its length do nothing. Late
tiles attend to the most keys and go first. The running softmax is that of the decode kernel.

Shape suffixes: M rows of a tile (TOKENS x heads), N keys of a block, D head dimension, S sequences.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from oscine.ops.attention.pages import key_rows, page_of, scales_of
from oscine.ops.kv.triton import from_bytes
from oscine.ops.rope.triton import load_queries

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_sequence(
    starts_ptr, lens_ptr, tile, first_sequence, num_sequences, TOKENS: tl.constexpr, BLOCK_S: tl.constexpr
):
    """The sequence that tile belongs to, its first token, the token after its last, its context, its first tile."""
    origin = tl.load(starts_ptr + first_sequence)
    sequence, start, end, context = 0, 0, 0, 0
    for block in range(first_sequence, num_sequences, BLOCK_S):
        sequence_S = block + tl.arange(0, BLOCK_S)
        inside_S = sequence_S < num_sequences
        start_S = tl.load(starts_ptr + sequence_S, mask=inside_S, other=0)
        end_S = tl.load(starts_ptr + sequence_S + 1, mask=inside_S, other=0)
        context_S = tl.load(lens_ptr + sequence_S, mask=inside_S, other=0)
        first_S = (start_S - origin) // TOKENS + (sequence_S - first_sequence)
        next_S = (end_S - origin) // TOKENS + (sequence_S - first_sequence) + 1
        owner_S = inside_S & (first_S <= tile) & (tile < next_S)  # true of one sequence
        sequence += tl.sum(tl.where(owner_S, sequence_S, 0))
        start += tl.sum(tl.where(owner_S, start_S, 0))
        end += tl.sum(tl.where(owner_S, end_S, 0))
        context += tl.sum(tl.where(owner_S, context_S, 0))
    return sequence, start, end, context, (start - origin) // TOKENS + (sequence - first_sequence)


@triton.jit(
    do_not_specialize=["table_stride", "first_sequence", "num_sequences", "num_tokens", "num_tiles"],
    do_not_specialize_on_alignment=["table_ptr", "starts_ptr", "lens_ptr"],
)
def prefill_kernel(
    out_ptr,
    q_ptr,
    q_stride,
    cos_sin_ptr,
    positions_ptr,
    kv_ptr,
    table_ptr,
    starts_ptr,
    lens_ptr,
    counts_ptr,
    sinks_ptr,
    table_stride,
    stride_page,
    stride_kv,
    stride_head,
    first_sequence,
    num_sequences,
    num_tokens,
    num_tiles,
    scale,
    KV_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (num_tiles * G): one key head after the other, so that programs running together share their keys.

    counts: of Batch, or None; then they are first_sequence and num_sequences.
    """
    ALIGNED: tl.constexpr = PAGE % BLOCK_N == 0
    FP8: tl.constexpr = kv_ptr.dtype.element_ty == tl.uint8
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(0) // num_tiles
    row_M = tl.arange(0, TOKENS * BLOCK_R)
    repeat_M = row_M % BLOCK_R
    head_M = head * REPEATS + repeat_M
    sink_M = tl.load(sinks_ptr + head_M, mask=repeat_M < REPEATS, other=0.0).to(tl.float32) * LOG2E
    if PDL:
        gdc_wait()
    if counts_ptr is not None:
        first_sequence = tl.load(counts_ptr)
        num_sequences = tl.load(counts_ptr + 1)
    last_tile = (num_tokens - first_sequence) // TOKENS + (num_sequences - first_sequence) - 1
    tile = last_tile - tl.program_id(0) % num_tiles
    if tile < 0:
        return
    sequence, start, stop, end, first_tile = find_sequence(
        starts_ptr, lens_ptr, tile, first_sequence, num_sequences, TOKENS, BLOCK_S
    )
    tile -= first_tile
    length = stop - start
    if tile * TOKENS >= length:
        return

    token_M = tile * TOKENS + row_M // BLOCK_R
    real_M = (token_M < length) & (repeat_M < REPEATS)
    column_D = tl.arange(0, HEAD_DIM)
    offsets_MD = ((start + token_M).to(tl.int64) * (KV_HEADS * REPEATS) + head_M)[:, None] * HEAD_DIM + column_D[
        None, :
    ]
    token_T, repeat_R = tile * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCK_R)
    real_T, first_T = token_T < length, (start + token_T).to(tl.int64) * q_stride
    position_T = token_T
    if cos_sin_ptr is not None:
        position_T = tl.load(positions_ptr + start + token_T, mask=real_T, other=0)
    real_TR = real_T[:, None] & (repeat_R < REPEATS)[None, :]
    q_MD = load_queries(q_ptr, first_T, head * REPEATS + repeat_R, real_TR, cos_sin_ptr, position_T, HEAD_DIM)
    first_query = end - length + tile * TOKENS
    last_query = tl.minimum(first_query + TOKENS, end) - 1
    query_M = first_query + row_M // BLOCK_R
    first_key = 0
    if WINDOW:
        first_key = tl.maximum(first_query - WINDOW + 1, 0)
        if ALIGNED:
            first_key = first_key // BLOCK_N * BLOCK_N

    table_ptr += sequence.to(tl.int64) * table_stride
    key_ptr = kv_ptr + head * stride_head
    value_ptr = key_ptr + stride_kv
    max_M = sink_M
    sum_M = tl.full([TOKENS * BLOCK_R], 1.0, tl.float32)
    out_MD = tl.zeros([TOKENS * BLOCK_R, HEAD_DIM], tl.float32)
    page = page_of(table_ptr, first_key, end, PAGE, ALIGNED)
    if FP8:
        scales = scales_of(
            *(key_ptr, value_ptr, table_ptr, page, first_key, tl.arange(0, BLOCK_N), last_query + 1, stride_page),
            *(PAGE, ALIGNED, HEAD_DIM),
        )
    for key in tl.range(first_key, last_query + 1, BLOCK_N, num_stages=STAGES):
        next_page = page_of(table_ptr, key + BLOCK_N, end, PAGE, ALIGNED)
        index_N = tl.arange(0, BLOCK_N)
        rows_N, _, inside_N = key_rows(
            table_ptr, page, key, index_N, last_query + 1, stride_page, PAGE, ALIGNED, HEAD_DIM
        )
        key_ND = tl.load(key_ptr + rows_N[:, None] + column_D[None, :], mask=inside_N[:, None], other=0)
        value_ND = tl.load(value_ptr + rows_N[:, None] + column_D[None, :], mask=inside_N[:, None], other=0)
        if FP8:
            next_scales = scales_of(
                *(key_ptr, value_ptr, table_ptr, next_page, key + BLOCK_N, index_N, last_query + 1, stride_page),
                *(PAGE, ALIGNED, HEAD_DIM),
            )
            key_ND = from_bytes(key_ND, q_MD.dtype)
            value_ND = from_bytes(value_ND, q_MD.dtype)
        scores_MN = tl.dot(q_MD, tl.trans(key_ND))
        if FP8:
            scores_MN *= scales[0][None, :]
        border = key + BLOCK_N > first_query + 1
        if WINDOW:
            border = border | (key <= last_query - WINDOW)
        if border:
            key_N = key + tl.arange(0, BLOCK_N)
            visible_MN = key_N[None, :] <= query_M[:, None]
            if WINDOW:
                visible_MN &= key_N[None, :] > query_M[:, None] - WINDOW
            scores_MN = tl.where(visible_MN, scores_MN, float("-inf"))
        new_max_M = tl.maximum(max_M, tl.max(scores_MN, 1) * scale)
        p_MN = tl.exp2(scores_MN * scale - new_max_M[:, None])
        rescale_M = tl.exp2(max_M - new_max_M)
        sum_M = sum_M * rescale_M + tl.sum(p_MN, 1)
        if FP8:
            p_MN *= tl.where(inside_N, scales[1], 0.0)[None, :]
        out_MD = tl.dot(p_MN.to(value_ND.dtype), value_ND, out_MD * rescale_M[:, None])
        max_M = new_max_M
        page = next_page
        if FP8:
            scales = next_scales
    out_MD = out_MD / sum_M[:, None]
    tl.store(out_ptr + offsets_MD, out_MD.to(out_ptr.dtype.element_ty), mask=real_M[:, None])
