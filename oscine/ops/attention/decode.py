"""Decode attention: one query per sequence, with the query heads of a key head packed into the rows of one tile.

A program takes one sequence, one key head and one split of the context: every n-th block of n splits, up to a length
that is read at run time, so that a captured launch serves every length. splits.py gives the number of splits of each
context. With several (split-KV), each leaves its sum of p v, its maximum and its sum of p in a workspace. The program
that arrives last adds them up and resets the counter of its sequence and head.

    m = max(sink, s_j), l = exp(sink - m) + sum_j exp(s_j - m), o = sum_j exp(s_j - m) v_j / l      all in base 2

A running maximum that starts at the sink is finite from the start; only the first split counts the sink in l.
Keys and values past the end are never loaded: a page's earlier owner may have left NaN.

Shape suffixes: S sequences, W warps, M query heads of a key head padded to a tile, R the same padded to a power of two,
N keys of a warp or of a block, D head dimension, C splits of a context combined at once.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from oscine.ops.attention.pages import key_rows, page_of, scales_of
from oscine.ops.attention.splits import split_of
from oscine.ops.kv.triton import from_bytes
from oscine.ops.rope.triton import load_queries

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def block_keys(BLOCK_N: tl.constexpr, WARPS: tl.constexpr):
    """The keys of a block that each warp takes."""
    return tl.arange(0, WARPS)[:, None] * (BLOCK_N // WARPS) + tl.arange(0, BLOCK_N // WARPS)[None, :]


@triton.jit
def block_scales(
    pages,
    page,
    first,
    end,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,
    WARPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Of keys and values in FP8; nothing otherwise."""
    table_ptr, key_ptr, value_ptr, stride_page = pages
    if key_ptr.dtype.element_ty == tl.uint8:
        index_WN = block_keys(BLOCK_N, WARPS)
        scales = scales_of(
            key_ptr, value_ptr, table_ptr, page, first, index_WN, end, stride_page, PAGE, ALIGNED, HEAD_DIM
        )
    else:
        scales = ()
    return scales


@triton.jit
def attend_block(
    q_WMD,
    state,
    pages,
    page,
    scales,
    first,
    end,
    scale,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Adds the keys first .. first + BLOCK_N - 1 that come before end to the running softmax of each warp.

    state: (max_WM, sum_WM, out_WMD). pages: (table_ptr, key_ptr, value_ptr, stride_page). scales: of block_scales, for
    these keys. scale includes log2(e). A product of three dimensions gives each warp its own N keys, so that nothing
    crosses warps: no barrier but those of the loads.
    """
    max_WM, sum_WM, out_WMD = state
    table_ptr, key_ptr, value_ptr, stride_page = pages
    HEAD_DIM: tl.constexpr = q_WMD.shape[2]
    WARPS: tl.constexpr = q_WMD.shape[0]
    index_WN = block_keys(BLOCK_N, WARPS)
    rows_WN, _, inside_WN = key_rows(table_ptr, page, first, index_WN, end, stride_page, PAGE, ALIGNED, HEAD_DIM)
    offsets_WND = rows_WN[:, :, None] + tl.arange(0, HEAD_DIM)[None, None, :]
    key_WND = tl.load(key_ptr + offsets_WND, mask=inside_WN[:, :, None], other=0)
    value_WND = tl.load(value_ptr + offsets_WND, mask=inside_WN[:, :, None], other=0)
    FP8: tl.constexpr = key_ptr.dtype.element_ty == tl.uint8
    if FP8:
        key_WND = from_bytes(key_WND, q_WMD.dtype)
        value_WND = from_bytes(value_WND, q_WMD.dtype)
    scores_WMN = tl.dot(q_WMD, tl.permute(key_WND, (0, 2, 1)))
    if FP8:
        scores_WMN *= scales[0][:, None, :]
    scores_WMN = tl.where(inside_WN[:, None, :], scores_WMN * scale, float("-inf"))
    new_max_WM = tl.maximum(max_WM, tl.max(scores_WMN, 2))
    p_WMN = tl.exp2(scores_WMN - new_max_WM[:, :, None])
    rescale_WM = tl.exp2(max_WM - new_max_WM)
    sum_WM = sum_WM * rescale_WM + tl.sum(p_WMN, 2)
    if FP8:
        p_WMN *= tl.where(inside_WN, scales[1], 0.0)[:, None, :]
    out_WMD = tl.dot(p_WMN.to(value_WND.dtype), value_WND, out_WMD * rescale_WM[:, :, None])
    return new_max_WM, sum_WM, out_WMD


@triton.jit
def sum_warps(x_WMD):
    """Adds the parts of all warps, a power of two. Halving the last dimension moves data once; a reduction over the
    first would go through shared memory element by element."""
    WARPS: tl.constexpr = x_WMD.shape[0]
    if WARPS == 1:
        sum_MD = tl.reshape(x_WMD, [x_WMD.shape[1], x_WMD.shape[2]])
    else:
        pairs = tl.reshape(tl.permute(x_WMD, (1, 2, 0)), [x_WMD.shape[1], x_WMD.shape[2], WARPS // 2, 2])
        even, odd = tl.split(pairs)
        sum_MD = sum_warps(tl.permute(even + odd, (2, 0, 1)))
    return sum_MD


@triton.jit
def combine(
    out_ptr,
    partial_ptr,
    stats_ptr,
    num_splits,
    REPEATS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Adds up the first `num_splits` partial results of one sequence and key head, each relative to its own maximum.

    Every thread keeps its elements of the result and walks over the splits, C at a time so that loads overlap.
    """
    row_R = tl.arange(0, BLOCK_R)
    real_R = row_R < REPEATS
    rows_RD = row_R[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    max_R = tl.full([BLOCK_R], float("-inf"), tl.float32)
    sum_R = tl.zeros([BLOCK_R], tl.float32)
    out_RD = tl.zeros([BLOCK_R, HEAD_DIM], tl.float32)
    for first in tl.static_range(0, MAX_SPLITS, BLOCK_C):
        if first < num_splits:
            # Other programs wrote these: read from L2, where a line of L1 could be stale.
            maxima, sums, parts = (), (), ()
            for c in tl.static_range(BLOCK_C):
                stat_ptr = stats_ptr + (first + c) * (2 * REPEATS) + row_R
                part_ptr = partial_ptr + (first + c) * (REPEATS * HEAD_DIM) + rows_RD
                wanted_R = real_R & (first + c < num_splits)
                maxima += (tl.load(stat_ptr, mask=wanted_R, other=float("-inf"), cache_modifier=".cg"),)
                sums += (tl.load(stat_ptr + REPEATS, mask=wanted_R, other=0.0, cache_modifier=".cg"),)
                parts += (tl.load(part_ptr, mask=wanted_R[:, None], other=0.0, cache_modifier=".cg"),)
            new_max_R = max_R
            for c in tl.static_range(BLOCK_C):
                new_max_R = tl.maximum(new_max_R, maxima[c])
            # Padding rows have no maximum at all; theirs must not become inf - inf.
            new_max_R = tl.where(real_R, new_max_R, 0.0)
            rescale_R = tl.exp2(max_R - new_max_R)
            sum_R *= rescale_R
            out_RD *= rescale_R[:, None]
            for c in tl.static_range(BLOCK_C):
                weight_R = tl.exp2(maxima[c] - new_max_R)
                sum_R += weight_R * sums[c]
                out_RD += weight_R[:, None] * parts[c]
            max_R = new_max_R
    out_RD = out_RD / tl.where(real_R, sum_R, 1.0)[:, None]
    tl.store(out_ptr + rows_RD, out_RD.to(out_ptr.dtype.element_ty), mask=real_R[:, None])


@triton.jit(
    do_not_specialize=["table_stride", "num_sequences"], do_not_specialize_on_alignment=["table_ptr", "lens_ptr"]
)
def decode_kernel(
    out_ptr,
    q_ptr,
    q_stride,
    cos_sin_ptr,
    positions_ptr,
    kv_ptr,
    table_ptr,
    lens_ptr,
    counts_ptr,
    sinks_ptr,
    partial_ptr,
    stats_ptr,
    arrivals_ptr,
    table_stride,
    num_sequences,
    stride_page,
    stride_kv,
    stride_head,
    scale,
    KV_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_PARTS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    ALONE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    STAGES: tl.constexpr,
    WARPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid (G, num_sequences + MAX_PARTS - 1): the splits of all contexts, then programs without work.

    WINDOW 0 is full attention; with a window no larger than BLOCK_N there is one block. counts: of Batch, or None.
    ALONE: exactly one sequence, so that its split needs no search.
    """
    head, index = tl.program_id(0), tl.program_id(1)
    ALIGNED: tl.constexpr = WINDOW == 0 and PAGE % BLOCK_N == 0
    if PDL:
        gdc_launch_dependents()
    row_M = tl.arange(0, BLOCK_M)
    real_M = row_M < REPEATS
    sink_M = tl.load(sinks_ptr + head * REPEATS + row_M, mask=real_M, other=0.0).to(tl.float32) * LOG2E
    if PDL:
        gdc_wait()
    if counts_ptr is not None:
        num_sequences = tl.load(counts_ptr)
    if ALONE or MAX_PARTS == 1:
        sequence, split = index // MAX_PARTS, index % MAX_PARTS
    else:
        sequence, split, splits = split_of(
            index, lens_ptr, num_sequences, BLOCK_N, MIN_PARTS, MAX_PARTS, MAX_SPLITS, WINDOW
        )
        sequence = tl.minimum(
            sequence, tl.maximum(num_sequences - 1, 0)
        )  # of programs without work, too: for the loads
    heads = KV_HEADS * REPEATS
    rows_MD = row_M[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    result = (sequence.to(tl.int64) * heads + head * REPEATS) * HEAD_DIM
    table_ptr += sequence.to(tl.int64) * table_stride
    # These loads wait for nothing but the search, so they share one trip to memory; the page is unused if the context
    # ends before it.
    end = tl.load(lens_ptr + sequence)
    page = page_of(table_ptr, split * BLOCK_N, table_stride * PAGE, PAGE, ALIGNED)
    token_T = sequence + tl.arange(0, 1)
    position_T = token_T if cos_sin_ptr is None else tl.load(positions_ptr + token_T)
    first_T, head_M = token_T.to(tl.int64) * q_stride, head * REPEATS + row_M
    q_MD = load_queries(q_ptr, first_T, head_M, real_M[None, :], cos_sin_ptr, position_T, HEAD_DIM)
    start = 0
    if WINDOW:
        start = tl.maximum(end - WINDOW, 0)
    blocks = tl.cdiv(end - start, BLOCK_N)
    if ALONE or MAX_PARTS == 1:
        splits = tl.minimum(blocks, MAX_PARTS)
    # One exit, after the loads: another one before them takes more registers.
    if (split >= splits) | (sequence >= num_sequences):
        return
    step = MAX_PARTS if ALONE or MAX_PARTS == 1 else splits  # blocks, to the next of this split

    key_ptr = kv_ptr + head * stride_head
    value_ptr = key_ptr + stride_kv
    pages = (table_ptr, key_ptr, value_ptr, stride_page)
    q_WMD = tl.broadcast_to(q_MD[None, :, :], [WARPS, BLOCK_M, HEAD_DIM])
    max_WM = tl.broadcast_to(sink_M[None, :], [WARPS, BLOCK_M])
    sinks_W = tl.where((tl.arange(0, WARPS) == 0) & (split == 0), 1.0, 0.0)
    sum_WM = tl.broadcast_to(sinks_W[:, None], [WARPS, BLOCK_M])
    out_WMD = tl.zeros([WARPS, BLOCK_M, HEAD_DIM], tl.float32)
    if WINDOW > 0 and WINDOW <= BLOCK_N:
        scales = block_scales(pages, 0, start, end, PAGE, BLOCK_N, ALIGNED, WARPS, HEAD_DIM)
        max_WM, sum_WM, out_WMD = attend_block(
            q_WMD, (max_WM, sum_WM, out_WMD), pages, 0, scales, start, end, scale, PAGE, BLOCK_N, ALIGNED
        )
    elif kv_ptr.dtype.element_ty == tl.uint8:
        scales = block_scales(pages, page, start + split * BLOCK_N, end, PAGE, BLOCK_N, ALIGNED, WARPS, HEAD_DIM)
        for block in tl.range(split, blocks, step, num_stages=STAGES):
            first = start + block * BLOCK_N
            next_first = first + step * BLOCK_N
            next_page = page_of(table_ptr, next_first, end, PAGE, ALIGNED)
            next_scales = block_scales(pages, next_page, next_first, end, PAGE, BLOCK_N, ALIGNED, WARPS, HEAD_DIM)
            max_WM, sum_WM, out_WMD = attend_block(
                q_WMD, (max_WM, sum_WM, out_WMD), pages, page, scales, first, end, scale, PAGE, BLOCK_N, ALIGNED
            )
            page = next_page
            scales = next_scales
    else:
        for block in tl.range(split, blocks, step, num_stages=STAGES):
            first = start + block * BLOCK_N
            next_page = page_of(table_ptr, first + step * BLOCK_N, end, PAGE, ALIGNED)
            max_WM, sum_WM, out_WMD = attend_block(
                q_WMD, (max_WM, sum_WM, out_WMD), pages, page, (), first, end, scale, PAGE, BLOCK_N, ALIGNED
            )
            page = next_page

    max_M = tl.max(max_WM, 0)
    weight_WM = tl.exp2(max_WM - max_M[None, :])
    sum_M = tl.sum(sum_WM * weight_WM, 0)
    out_MD = sum_warps(out_WMD * weight_WM[:, :, None])
    if splits == 1:
        out_MD = out_MD / sum_M[:, None]
        tl.store(out_ptr + result + rows_MD, out_MD.to(out_ptr.dtype.element_ty), mask=real_M[:, None])
    elif MAX_PARTS > 1:
        group = sequence * KV_HEADS + head
        place = head * tl.num_programs(1) + index
        stats_ptr += place * (REPEATS * 2)
        partial_ptr += place.to(tl.int64) * (REPEATS * HEAD_DIM)
        tl.store(stats_ptr + row_M, max_M, mask=real_M)
        tl.store(stats_ptr + REPEATS + row_M, sum_M, mask=real_M)
        tl.store(partial_ptr + rows_MD, out_MD, mask=real_M[:, None])
        # Every thread's part must be written before the one thread that counts says so.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + group, 1, sem="acq_rel")
        if arrived == splits - 1:
            tl.store(arrivals_ptr + group, 0)
            stats_ptr -= split * (REPEATS * 2)
            partial_ptr -= split * (REPEATS * HEAD_DIM)
            combine(out_ptr + result, partial_ptr, stats_ptr, splits, REPEATS, HEAD_DIM, BLOCK_R, MAX_SPLITS, BLOCK_C)
