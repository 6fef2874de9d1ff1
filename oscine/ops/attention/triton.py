"""Paged attention in Triton, for CUDA GPUs from sm_80 on: one launch for the decodes, one for the chunks.

Definition: reference.py. Knows shapes, launch sizes and workspaces; the arithmetic is in decode.py and prefill.py.
Nothing here reads device data, so a call can be captured in a CUDA graph and replayed for other context lengths.

Shape suffixes as in interface.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from oscine.ops.attention.decode import decode_kernel
from oscine.ops.attention.prefill import prefill_kernel
from oscine.ops.interface import Batch, PageGroup
from oscine.ops.launch import NUM_ARRIVALS, arrivals
from oscine.ops.target import Target

FEW_PROGRAMS = 128  # fewer sequences x key heads leave an H200 idle, so each context is split,
SPLIT_PROGRAMS = 256  # until there are about this many programs,
MAX_SPLITS = 32  # but not further
MANY_PROGRAMS = 512  # so many hide each other's latencies with fewer warps


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    block_n: int = 64  # keys of a block
    warps: int = 4
    stages: int = 4
    num_splits: int = 1  # of a context
    block_c: int = 16  # splits added up at once


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    rows: int = 128  # rows of a tile: tokens x query heads of a key head
    block_n: int = 64
    warps: int = 4
    stages: int = 3


# (target, out_TQD, q_TQD, kv_pages, batch, group, sinks_Q, window): writes the rows of the leading batch.num_decodes
# sequences
Decode = Callable[[Target, Tensor, Tensor, Tensor, Batch, PageGroup, Tensor, int | None], None]


def attention(
    target: Target,
    q_TQD: Tensor,
    kv_pages: Tensor,
    batch: Batch,
    group: PageGroup,
    sinks_Q: Tensor,
    window: int | None,
) -> Tensor:
    """q [T, Q, D], kv_pages [pages, 2, G, P, D] with this step's keys and values -> [T, Q * D] in q's dtype."""
    return attend(target, decode, q_TQD, kv_pages, batch, group, sinks_Q, window)


def attend(
    target: Target,
    decode: Decode,
    q_TQD: Tensor,
    kv_pages: Tensor,
    batch: Batch,
    group: PageGroup,
    sinks_Q: Tensor,
    window: int | None,
) -> Tensor:
    """`attention` with decodes by any kernel."""
    out = torch.empty_like(q_TQD)
    if batch.num_decodes:
        decode(target, out, q_TQD, kv_pages, batch, group, sinks_Q, window)
    if len(batch.context_lens_S) > batch.num_decodes:
        prefill(target, out, q_TQD, kv_pages, batch, group, sinks_Q, window)
    return out.flatten(1)


def decode_config(num_decodes: int, num_kv_heads: int, window: int | None) -> DecodeConfig:
    """Depends on nothing that changes between replays of a graph. Chosen by measurement on an H200."""
    if window is not None and window <= 128:
        return DecodeConfig(block_n=max(64, triton.next_power_of_2(window)))
    programs = num_decodes * num_kv_heads
    if programs >= FEW_PROGRAMS:
        return DecodeConfig(warps=2 if programs >= MANY_PROGRAMS else 4)
    num_splits = min(MAX_SPLITS, triton.next_power_of_2(-(-SPLIT_PROGRAMS // programs)))
    return DecodeConfig(stages=6, num_splits=num_splits)


def prefill_config(target: Target) -> PrefillConfig:
    """Without warp groups, operands are in registers: more warps share a tile."""
    return PrefillConfig() if target.warp_groups else PrefillConfig(warps=8)


def decode(
    target: Target,
    out_TQD: Tensor,
    q_TQD: Tensor,
    kv_pages: Tensor,
    batch: Batch,
    group: PageGroup,
    sinks_Q: Tensor,
    window: int | None,
) -> None:
    """Implements Decode."""
    (_, num_heads, head_dim), (_, _, num_kv_heads, page_size, _) = q_TQD.shape, kv_pages.shape
    repeats = num_heads // num_kv_heads
    config = decode_config(batch.num_decodes, num_kv_heads, window)
    partial, stats = workspace(q_TQD, batch.num_decodes, num_kv_heads, config.num_splits)
    decode_kernel[(num_kv_heads, batch.num_decodes, config.num_splits)](
        out_TQD,
        q_TQD,
        kv_pages,
        group.page_table_SB,
        batch.context_lens_S,
        sinks_Q,
        partial,
        stats,
        arrivals(q_TQD.device),
        group.page_table_SB.stride(0),
        *strides(kv_pages),
        scale(head_dim),
        KV_HEADS=num_kv_heads,
        REPEATS=repeats,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        WINDOW=window or 0,
        **decode_constants(config, repeats),
        num_warps=config.warps,
        **target.launch_options,
    )


def workspace(q_TQD: Tensor, num_decodes: int, num_kv_heads: int, num_splits: int) -> tuple[Tensor, Tensor]:
    """What the splits of a context leave for the last of them: sums of p v, and (maxima, sums of p); float32."""
    _, num_heads, head_dim = q_TQD.shape
    repeats = num_heads // num_kv_heads
    groups = num_decodes * num_kv_heads if num_splits > 1 else 0
    assert groups <= NUM_ARRIVALS
    partial = q_TQD.new_empty((groups, num_splits, repeats, head_dim), dtype=torch.float32)
    return partial, q_TQD.new_empty((groups, num_splits, 2, repeats), dtype=torch.float32)


def prefill(
    target: Target,
    out_TQD: Tensor,
    q_TQD: Tensor,
    kv_pages: Tensor,
    batch: Batch,
    group: PageGroup,
    sinks_Q: Tensor,
    window: int | None,
) -> None:
    """Writes the rows of the sequences after the leading batch.num_decodes."""
    (num_tokens, num_heads, head_dim), (_, _, num_kv_heads, page_size, _) = q_TQD.shape, kv_pages.shape
    repeats = num_heads // num_kv_heads
    config = prefill_config(target)
    constants = prefill_constants(config, repeats)
    num_sequences = len(batch.context_lens_S)
    num_chunks = num_sequences - batch.num_decodes
    num_tiles = (num_tokens - batch.num_decodes) // constants["TOKENS"] + num_chunks
    prefill_kernel[(num_tiles * num_kv_heads,)](
        out_TQD,
        q_TQD,
        kv_pages,
        group.page_table_SB,
        batch.query_starts_S1,
        batch.context_lens_S,
        sinks_Q,
        group.page_table_SB.stride(0),
        *strides(kv_pages),
        batch.num_decodes,
        num_sequences,
        num_tiles,
        scale(head_dim),
        KV_HEADS=num_kv_heads,
        REPEATS=repeats,
        HEAD_DIM=head_dim,
        PAGE=page_size,
        WINDOW=window or 0,
        **constants,
        num_warps=config.warps,
        **target.launch_options,
    )


def decode_constants(config: DecodeConfig, repeats: int) -> dict[str, int]:
    """The constants of decode_kernel that a configuration decides, for so many query heads a key head."""
    return {
        "NUM_SPLITS": config.num_splits,
        "BLOCK_M": max(16, triton.next_power_of_2(repeats)),  # the fewest rows of a tensor-core product
        "BLOCK_R": triton.next_power_of_2(repeats),
        "BLOCK_N": config.block_n,
        "BLOCK_C": min(config.block_c, config.num_splits),
        "STAGES": config.stages,
        "WARPS": config.warps,
    }


def prefill_constants(config: PrefillConfig, repeats: int) -> dict[str, int]:
    """The constants of prefill_kernel that a configuration decides, for so many query heads a key head."""
    block_r = triton.next_power_of_2(repeats)
    return {
        "TOKENS": max(1, config.rows // block_r),
        "BLOCK_R": block_r,
        "BLOCK_N": config.block_n,
        "BLOCK_S": 32,
        "STAGES": config.stages,
    }


def strides(kv_pages: Tensor) -> tuple[int, int, int]:
    """Elements between pages, between keys and values, and between heads; rows of a page lie one after the other."""
    page, kv, head, row, column = kv_pages.stride()
    assert (row, column) == (kv_pages.shape[-1], 1)
    return page, kv, head


def scale(head_dim: int) -> float:
    """Of the scores, for exponentials in base 2."""
    return math.log2(math.e) / math.sqrt(head_dim)
