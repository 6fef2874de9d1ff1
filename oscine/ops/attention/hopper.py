"""Paged attention on Hopper: decodes by hopper_decode.py where it fits the model, all else by the Triton kernels.

Definition: reference.py. Nothing here reads device data, so a call can be captured in a CUDA graph.

Shape suffixes as in interface.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from oscine.ops.attention import triton as portable
from oscine.ops.attention.hopper_decode import HEAD_DIM, HEADS, PAGE, decode_kernel
from oscine.ops.interface import Batch, PageGroup
from oscine.ops.launch import NUM_ARRIVALS, arrivals

# Sequences; one alone is no slower in the Triton kernel, and quicker if it is long. More than the most are programs
# enough to hide there, too, what is hidden here.
FEWEST_DECODES, MOST_DECODES = 2, 64
PROGRAMS = 192  # about so many are wanted, beside which the output projection's weights have room to come in
MAX_SHARES = 32
MAX_GROUP = 4


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    shares: int  # of a context
    group: int  # pages multiplied at once
    stages: int  # pages under way in a program


def attention(
    q_TQD: Tensor, kv_pages: Tensor, batch: Batch, group: PageGroup, sinks_Q: Tensor, window: int | None
) -> Tensor:
    """As the portable one: q [T, Q, D], kv_pages [pages, 2, G, P, D] -> [T, Q * D] in q's dtype."""
    if not FEWEST_DECODES <= batch.num_decodes <= MOST_DECODES or not fits(q_TQD, kv_pages):
        return portable.attention(q_TQD, kv_pages, batch, group, sinks_Q, window)
    out = torch.empty_like(q_TQD)
    config = decode_config(batch.num_decodes, kv_pages.shape[2], window)
    decode(out, q_TQD, kv_pages, batch, group, sinks_Q, window, config)
    if len(batch.context_lens_S) > batch.num_decodes:
        chunks = portable.prefill_config(warp_groups=True)
        portable.prefill(out, q_TQD, kv_pages, batch, group, sinks_Q, window, chunks)
    return out.flatten(1)


def fits(q_TQD: Tensor, kv_pages: Tensor) -> bool:
    """Whether the model is cut as hopper_decode.py wants it; gpt-oss is."""
    num_kv_heads, page, head_dim = kv_pages.shape[2:]
    repeats = q_TQD.shape[1] // num_kv_heads
    return q_TQD.dtype == torch.bfloat16 and (repeats, page, head_dim) == (HEADS.value, PAGE.value, HEAD_DIM.value)


def decode_config(num_decodes: int, num_kv_heads: int, window: int | None) -> DecodeConfig:
    """Depends on nothing that changes between replays of a graph. Chosen by measurement on an H200."""
    if window is not None:
        pages = (window + PAGE.value - 2) // PAGE.value + 1  # that a window can touch
        return DecodeConfig(shares=1, group=min(pages, MAX_GROUP), stages=min(pages, MAX_GROUP))
    shares = min(MAX_SHARES, -(-PROGRAMS // (num_decodes * num_kv_heads)))
    return DecodeConfig(shares, group=3, stages=6)


def constants(config: DecodeConfig) -> dict[str, int]:
    """The constants of decode_kernel that a configuration decides."""
    return {"SHARES": config.shares, "GROUP": config.group, "STAGES": config.stages}


def decode(
    out_TQD: Tensor,
    q_TQD: Tensor,
    kv_pages: Tensor,
    batch: Batch,
    group: PageGroup,
    sinks_Q: Tensor,
    window: int | None,
    config: DecodeConfig,
) -> None:
    """Writes the rows of the leading batch.num_decodes sequences."""
    num_decodes, num_kv_heads = batch.num_decodes, kv_pages.shape[2]
    groups = num_decodes * num_kv_heads if config.shares > 1 else 0
    assert groups <= NUM_ARRIVALS
    partial = q_TQD.new_empty((groups, config.shares, HEADS.value, HEAD_DIM.value), dtype=torch.float32)
    stats = q_TQD.new_empty((groups, config.shares, 2, HEADS.value), dtype=torch.float32)
    q_rows = q_TQD.flatten(0, 1)
    decode_kernel[(num_kv_heads, num_decodes, config.shares)](
        TensorDescriptor.from_tensor(q_rows, [HEADS.value, HEAD_DIM.value], gl.NVMMASharedLayout(128, 16, 2)),
        descriptor(kv_pages),
        out_TQD,
        group.page_table_SB,
        batch.context_lens_S,
        sinks_Q,
        partial,
        stats,
        arrivals(q_TQD.device),
        group.page_table_SB.stride(0),
        portable.scale(HEAD_DIM.value),
        KV_HEADS=num_kv_heads,
        WINDOW=window or 0,
        **constants(config),
        num_warps=4,
        launch_pdl=True,
    )


def descriptor(kv_pages: Tensor) -> TensorDescriptor:
    """Boxes of a page's keys and values of one head."""
    box = [1, 2, 1, PAGE.value, HEAD_DIM.value]
    layout = gl.NVMMASharedLayout(128, 16, len(box))
    return TensorDescriptor(kv_pages, list(kv_pages.shape), list(kv_pages.stride()), box, layout)
