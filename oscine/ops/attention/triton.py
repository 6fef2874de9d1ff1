"""Paged attention in Triton, for CUDA GPUs from sm_80 on: one launch for the decodes, one for the chunks.

Definition: reference.py. Knows shapes, launch sizes and workspaces; the arithmetic is in decode.py and prefill.py.
Nothing here reads device data, so a call can be captured in a CUDA graph and replayed for other context lengths.

Shape suffixes as in interface.py.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from oscine.ops.attention.decode import decode_kernel
from oscine.ops.attention.prefill import prefill_kernel
from oscine.ops.attention.splits import MAX_SPLITS, max_total_splits
from oscine.ops.interface import Batch, PageGroup, Queries, UnrotatedQueries
from oscine.ops.kv.fp8 import is_fp8, page_size_of
from oscine.ops.launch import NUM_ARRIVALS, arrivals
from oscine.ops.target import Target

CAN_ROTATE = True  # takes UnrotatedQueries
# MIN_PARTS and MAX_PARTS of splits.py, times key heads, by sequences times key heads: FEW_PARTS for fewer than
# FEW_PROGRAMS, MANY_PARTS from MANY_PROGRAMS on, PARTS in between. PADDED_PARTS: of mixed steps in CUDA graphs.
FEW_PARTS, PARTS, MANY_PARTS, PADDED_PARTS = (256, 256), (128, 1024), (512, 1024), (256, 1024)
FEW_PROGRAMS = 128
MANY_PROGRAMS = 512  # so many hide each other's latencies with fewer warps
PREFILL_ROWS = 128  # of a tile: tokens x query heads of a key head


class Inputs(NamedTuple):
    """What every attention kernel reads."""

    q_TQD: Tensor
    kv_pages: Tensor
    batch: Batch
    group: PageGroup
    sinks_Q: Tensor
    window: int | None
    rotation: tuple[Tensor, Tensor] | None = None  # (cos_sin, positions_T) of UnrotatedQueries

    @property
    def kv_heads(self) -> int:
        return self.kv_pages.shape[2]

    @property
    def repeats(self) -> int:
        """Query heads per key head."""
        return self.q_TQD.shape[1] // self.kv_heads

    @property
    def scale(self) -> float:
        """Of the scores, for exponentials in base 2."""
        return math.log2(math.e) / math.sqrt(self.q_TQD.shape[2])

    @property
    def queries(self) -> tuple[Tensor, int, Tensor | None, Tensor | None]:
        """Arguments of the kernels: queries, their stride per token in elements, angles, positions."""
        return self.q_TQD, self.q_TQD.stride(0), *(self.rotation or (None, None))

    @property
    def constants(self) -> dict[str, int]:
        """The constants of the Triton kernels that the model decides."""
        _, _, kv_heads, _, head_dim = self.kv_pages.shape
        window = self.window or 0
        return {
            "KV_HEADS": kv_heads,
            "REPEATS": self.repeats,
            "HEAD_DIM": head_dim,
            "PAGE": page_size_of(self.kv_pages),
            "WINDOW": window,
        }


# (target, out_TQD, inputs): writes the rows of the leading batch.num_decodes sequences
Decode = Callable[[Target, Tensor, Inputs], None]
Prefill = Decode  # the same arguments: writes the rows of the sequences after them


def decode_tiling(
    num_decodes: int, num_kv_heads: int, repeats: int, window: int | None, *, exact: bool = True
) -> dict[str, int]:
    """Depends on nothing that changes between replays of a graph. Chosen by measurement on an H200.

    `exact`: num_decodes is no bound (the batch has no counts_2). MIN_PARTS, MAX_PARTS and MAX_SPLITS as in splits.py.
    """
    block_n, min_parts, max_parts, stages, warps = 64, 1, 1, 4, 4
    programs = num_decodes * num_kv_heads
    many = programs >= MANY_PROGRAMS
    alone, few = exact and num_decodes == 1, exact and programs < FEW_PROGRAMS
    if window is not None and window <= 128:
        block_n = max(64, triton.next_power_of_2(window))
    else:
        warps = 2 if many else 4
        stages = 6 if few else 4
        if programs <= NUM_ARRIVALS:
            wanted = PADDED_PARTS if not exact else FEW_PARTS if few else MANY_PARTS if many else PARTS
            min_parts, max_parts = (max(1, parts // num_kv_heads) for parts in wanted)
            max_parts = min(max_parts, MAX_SPLITS) if alone else max_parts
    most = min(max_parts, MAX_SPLITS)
    return {
        "MIN_PARTS": min_parts,
        "MAX_PARTS": max_parts,
        "MAX_SPLITS": most,
        "ALONE": alone,
        "BLOCK_M": max(16, triton.next_power_of_2(repeats)),  # the fewest rows of a tensor-core product
        "BLOCK_R": triton.next_power_of_2(repeats),
        "BLOCK_N": block_n,  # keys of a block
        "BLOCK_C": min(16, most),  # splits added up at once
        "STAGES": stages,
        "WARPS": warps,
        "num_warps": warps,
    }


def prefill_tiling(target: Target, repeats: int, *, fp8: bool = False) -> dict[str, int]:
    """Without warp groups, operands are in registers, and in FP8 scales are: more warps share a tile."""
    block_r, warps = triton.next_power_of_2(repeats), 4 if target.warp_groups and not fp8 else 8
    tokens = max(1, PREFILL_ROWS // block_r)
    tiling = {"TOKENS": tokens, "BLOCK_R": block_r, "BLOCK_N": 64, "BLOCK_S": 32, "STAGES": 3, "num_warps": warps}
    return tiling | ({"maxnreg": 168} if target.tensor_memory and not fp8 else {})


def decode(target: Target, out_TQD: Tensor, inputs: Inputs) -> None:
    """Implements Decode."""
    batch, table_SB = inputs.batch, inputs.group.page_table_SB
    exact = batch.counts_2 is None
    tiling = decode_tiling(batch.num_decodes, inputs.kv_heads, inputs.repeats, inputs.window, exact=exact)
    if target.architecture:
        tiling["STAGES"] = 2  # more do not compile for gfx950 (Triton 3.6), and six do not fit gfx942
    decode_kernel[(inputs.kv_heads, max_total_splits(batch.num_decodes, tiling["MAX_PARTS"]))](
        out_TQD,
        *inputs.queries,
        inputs.kv_pages,
        table_SB,
        batch.context_lens_S,
        batch.counts_2,
        inputs.sinks_Q,
        *workspace(inputs, tiling["MAX_PARTS"]),
        table_SB.stride(0),
        batch.num_decodes,
        *strides(inputs.kv_pages),
        inputs.scale,
        **inputs.constants,
        **tiling,
        **target.launch_options,
    )


def workspace(inputs: Inputs, max_parts: int) -> tuple[Tensor, Tensor, Tensor]:
    """What the splits of a context leave for the last of them: sums of p v, and (maxima, sums of p), float32.

    Then the counters that tell which is the last.
    """
    q_TQD, repeats, kv_heads, decodes = inputs.q_TQD, inputs.repeats, inputs.kv_heads, inputs.batch.num_decodes
    assert max_parts == 1 or decodes * kv_heads <= NUM_ARRIVALS
    splits = max_total_splits(decodes, max_parts) if max_parts > 1 else 0
    partial = q_TQD.new_empty((kv_heads, splits, repeats, q_TQD.shape[2]), dtype=torch.float32)
    stats = q_TQD.new_empty((kv_heads, splits, 2, repeats), dtype=torch.float32)
    return partial, stats, arrivals(q_TQD.device)


def prefill(target: Target, out_TQD: Tensor, inputs: Inputs) -> None:
    """Implements Prefill."""
    batch, table_SB = inputs.batch, inputs.group.page_table_SB
    tiling = prefill_tiling(target, inputs.repeats, fp8=is_fp8(inputs.kv_pages))
    num_tiles = most_tiles(out_TQD, batch, tiling["TOKENS"])
    prefill_kernel[(num_tiles * inputs.kv_heads,)](
        out_TQD,
        *inputs.queries,
        inputs.kv_pages,
        table_SB,
        batch.query_starts_S1,
        batch.context_lens_S,
        batch.counts_2,
        inputs.sinks_Q,
        table_SB.stride(0),
        *strides(inputs.kv_pages),
        batch.num_decodes,
        len(batch.context_lens_S),
        len(out_TQD),
        num_tiles,
        inputs.scale,
        **inputs.constants,
        **tiling,
        **target.launch_options,
    )


def most_tiles(out_TQD: Tensor, batch: Batch, tokens: int) -> int:
    """A bound of the tiles of so many tokens, for the sequences after the decodes: each may begin one."""
    decodes = batch.num_decodes if batch.counts_2 is None else 0
    return (len(out_TQD) - decodes) // tokens + len(batch.context_lens_S) - decodes


def attention(
    target: Target,
    queries: Queries,
    kv_pages: Tensor,
    batch: Batch,
    group: PageGroup,
    sinks_Q: Tensor,
    window: int | None,
    decode: Decode = decode,
    prefill: Prefill = prefill,
) -> Tensor:
    """q [T, Q, D], kv_pages [pages, 2, G, R, D] with this step's keys and values -> [T, Q * D] in q's dtype."""
    rotation = None
    if isinstance(queries, UnrotatedQueries):
        q_TQD, rotation = queries.q_TQD, (queries.cos_sin, queries.positions_T)
    else:
        q_TQD = queries
    inputs = Inputs(q_TQD, kv_pages, batch, group, sinks_Q, window, rotation)
    out_TQD = torch.empty_like(q_TQD, memory_format=torch.contiguous_format)
    if batch.num_decodes:
        decode(target, out_TQD, inputs)
    if batch.counts_2 is not None or len(batch.context_lens_S) > batch.num_decodes:
        prefill(target, out_TQD, inputs)
    return out_TQD.flatten(1)


def strides(kv_pages: Tensor) -> tuple[int, int, int]:
    """Elements between pages, between keys and values, and between heads; rows of a page lie one after the other."""
    page, kv, head, row, column = kv_pages.stride()
    assert (row, column) == (kv_pages.shape[-1], 1)
    return page, kv, head
