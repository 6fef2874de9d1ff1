"""Paged attention on Hopper: prompts by hopper_prefill.py, decodes by hopper_decode.py, all else by the Triton kernels.

Definition: reference.py. Nothing here reads device data, so a call can be captured in a CUDA graph.

Shape suffixes as in interface.py.
"""

from functools import partial

import torch
from torch import Tensor

from oscine.kv_group import pages_of_window
from oscine.ops.attention import triton as portable
from oscine.ops.attention.hopper_decode import HEAD_DIM, HEADS, MAX, MAX_SEQUENCES, PAGE, decode_kernel, parts_of
from oscine.ops.attention.hopper_prefill import CONSUMERS, LAUNCH_REGISTERS, ROUNDS, SUMS_SIZE, TOKENS, prefill_kernel
from oscine.ops.attention.splits import MAX_SPLITS, max_total_splits
from oscine.ops.interface import Shapes, Use, unmet
from oscine.ops.kv.fp8 import is_fp8, page_size_of
from oscine.ops.launch import NUM_ARRIVALS, arrivals
from oscine.ops.linear.hopper_stream import descriptor
from oscine.ops.target import Target

CAN_ROTATE = True  # takes UnrotatedQueries
# Numbers of sequences. One sequence is as fast in the Triton kernel, or faster if it is long. More than MAX_DECODES
# make enough programs there to hide the same latencies.
FEWEST_DECODES, MAX_DECODES = 2, MAX_SEQUENCES.value
MAX_GROUP = 4


def fits(q_TQD: Tensor, kv_pages: Tensor) -> bool:
    """Whether the model is cut as hopper_decode.py wants it; gpt-oss is."""
    _, _, num_kv_heads, _, head_dim = kv_pages.shape
    sizes = q_TQD.shape[1] // num_kv_heads, page_size_of(kv_pages), head_dim
    return q_TQD.dtype == torch.bfloat16 and sizes == (HEADS.value, PAGE.value, HEAD_DIM.value)


def lacking_of(shapes: Shapes) -> str | None:
    """What keeps a model from fitting, in words."""
    return unmet(
        ("dtype", torch.bfloat16, shapes.dtype),
        ("page size", PAGE.value, shapes.page_size),
        ("head dimension", HEAD_DIM.value, shapes.head_dim),
        ("query heads per key head", HEADS.value, shapes.query_heads // shapes.kv_heads),
    )


def attention_use(shapes: Shapes) -> Use:
    steps = f"prompts with keys in bfloat16, decodes of {FEWEST_DECODES}-{MAX_DECODES} sequences alone"
    return Use(steps, "triton", lacking_of(shapes))


def decode_tiling(target: Target, num_kv_heads: int, window: int | None) -> dict[str, int]:
    """MAX_PARTS and MAX_SPLITS as in splits.py. The kernel chooses the number of parts (hopper_decode._parts_of).

    GROUP pages are multiplied at once; STAGES pages of a program are under way. Chosen by measurement on an H200.
    """
    if window is not None:
        pages = min(pages_of_window(window, PAGE.value), MAX_GROUP)
        return {"RESIDENT": 0, "MAX_PARTS": 1, "MAX_SPLITS": 1, "GROUP": pages, "STAGES": pages}
    resident = 2 * target.sm_count  # by their shared memory
    parts = max(1, parts_of(MAX.value, resident, num_kv_heads))
    splits = min(parts, MAX_SPLITS)
    return {"RESIDENT": resident, "MAX_PARTS": parts, "MAX_SPLITS": splits, "GROUP": 3, "STAGES": 6}


def decode(target: Target, out_TQD: Tensor, inputs: portable.Inputs) -> None:
    """Implements triton.Decode."""
    batch = inputs.batch
    few = batch.counts_2 is None and FEWEST_DECODES <= batch.num_decodes <= MAX_DECODES
    # hopper_decode.py rotates none.
    if few and inputs.rotation is None and fits(inputs.q_TQD, inputs.kv_pages):
        launch_decode(target, out_TQD, inputs, decode_tiling(target, inputs.kv_heads, inputs.window))
    else:
        portable.decode(target, out_TQD, inputs)


def launch_decode(target: Target, out_TQD: Tensor, inputs: portable.Inputs, tiling: dict[str, int]) -> None:
    """Implements triton.Decode for inputs that fit hopper_decode.py."""
    q_TQD, kv_pages, batch, group, sinks_Q, window, _ = inputs
    decode_kernel[(inputs.kv_heads, max_total_splits(batch.num_decodes, tiling["MAX_PARTS"]))](
        descriptor(q_TQD.flatten(0, 1), [HEADS.value, HEAD_DIM.value]),
        descriptor(kv_pages, [1, 2, 1, PAGE.value, HEAD_DIM.value]),  # keys and values of a page and head
        descriptor(kv_pages, [1, 2, 1, 1, PAGE.value], swizzled=False) if is_fp8(kv_pages) else None,  # their scales
        out_TQD,
        group.page_table_SB,
        batch.context_lens_S,
        sinks_Q,
        *portable.workspace(inputs, tiling["MAX_PARTS"]),
        group.page_table_SB.stride(0),
        batch.num_decodes,
        inputs.scale,
        KV_HEADS=inputs.kv_heads,
        WINDOW=window or 0,
        **tiling,
        num_warps=4,
        launch_pdl=True,
        enable_fp_fusion=True,
    )


def prefill_tiling(window: int | None, *, shared: bool) -> dict[str, int]:
    """BLOCK keys and STAGES of the ring. A window masks both ends of its keys: small blocks mask fewer of them.

    If `shared`, up to SHARES programs read one context; where none do, this costs 1 to 7 %. Chosen by measurement on an
    H200.
    """
    if window is not None:
        return {"BLOCK": 64, "STAGES": 8, "SHARES": 1}
    return {"BLOCK": 128, "STAGES": 4, "SHARES": 16 if shared else 1}


def shares_contexts(target: Target, num_tokens: int, num_kv_heads: int) -> bool:
    """Whether steps of so many tokens can be so few tiles that programs share their contexts."""
    tiles: int = num_tokens // (CONSUMERS.value * TOKENS.value)
    return bool(tiles * num_kv_heads < ROUNDS.value * target.sm_count)


def prefill(target: Target, out_TQD: Tensor, inputs: portable.Inputs) -> None:
    """Implements triton.Prefill."""
    if fits(inputs.q_TQD, inputs.kv_pages) and not is_fp8(inputs.kv_pages):
        shared = shares_contexts(target, len(out_TQD), inputs.kv_heads)
        launch_prefill(target, out_TQD, inputs, prefill_tiling(inputs.window, shared=shared))
    else:
        portable.prefill(target, out_TQD, inputs)


def launch_prefill(target: Target, out_TQD: Tensor, inputs: portable.Inputs, tiling: dict[str, int]) -> None:
    """Implements triton.Prefill for inputs that fit hopper_prefill.py. `tiling`: as prefill_tiling returns it."""
    q_TQD, kv_pages, batch, group, sinks_Q, window, rotation = inputs
    num_tiles = portable.most_tiles(out_TQD, batch, CONSUMERS.value * TOKENS.value)
    programs = min(target.sm_count, num_tiles * inputs.kv_heads * tiling["SHARES"])
    parts = programs * ROUNDS.value * CONSUMERS.value if tiling["SHARES"] > 1 else 0
    assert parts < NUM_ARRIVALS
    prefill_kernel[(programs,)](
        descriptor(q_TQD, [TOKENS.value, HEADS.value, HEAD_DIM.value]),
        descriptor(rotation[0], [TOKENS.value, HEAD_DIM.value // 2]) if rotation else None,
        descriptor(kv_pages, [1, 1, 1, PAGE.value, HEAD_DIM.value]),
        out_TQD,
        group.page_table_SB,
        batch.query_starts_S1,
        batch.context_lens_S,
        batch.counts_2,
        sinks_Q,
        arrivals(q_TQD.device),
        q_TQD.new_empty((parts, SUMS_SIZE.value), dtype=torch.float32),
        group.page_table_SB.stride(0),
        batch.num_decodes,
        len(batch.context_lens_S),
        len(out_TQD),
        KV_HEADS=inputs.kv_heads,
        WINDOW=window or 0,
        **tiling,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS.value,
        launch_pdl=True,
        enable_fp_fusion=True,
    )


attention = partial(portable.attention, decode=decode, prefill=prefill)
