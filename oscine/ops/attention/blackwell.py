"""Paged attention on compute capability 10.x: prompts by blackwell_prefill.py, all else by the Triton kernels.

Definition: reference.py. Nothing here reads device data, so a call can be captured in a CUDA graph.

Shape suffixes as in interface.py.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from oscine.ops.attention import reference
from oscine.ops.attention import triton as portable
from oscine.ops.attention.blackwell_prefill import GROUPS, LAUNCH_REGISTERS, TOKENS, prefill_kernel
from oscine.ops.attention.hopper import fits, lacking_of
from oscine.ops.attention.hopper_decode import HEAD_DIM, HEADS, PAGE
from oscine.ops.interface import Batch, PageGroup, Shapes, UnrotatedQueries, Use
from oscine.ops.kv.fp8 import is_fp8
from oscine.ops.linear.hopper_stream import descriptor
from oscine.ops.target import Target
from oscine.ops.triton_range import lacking_for_blackwell

CAN_ROTATE = True  # takes UnrotatedQueries
STAGES = 8  # of a page of keys and one of values, 16 KiB
MAX_ERROR = 0.01  # of a trial; the rounding of p and of the results to bfloat16 is 0.003


def attention_use(shapes: Shapes) -> Use:
    return Use("prompts with keys in bfloat16", "triton", lacking_of(shapes) or lacking_for_blackwell())


def prefill(target: Target, out_TQD: Tensor, inputs: portable.Inputs) -> None:
    """Implements triton.Prefill."""
    if fits(inputs.q_TQD, inputs.kv_pages) and not is_fp8(inputs.kv_pages) and lacking_for_blackwell() is None:
        launch_prefill(target, out_TQD, inputs)
    else:
        portable.prefill(target, out_TQD, inputs)


def launch_prefill(target: Target, out_TQD: Tensor, inputs: portable.Inputs) -> None:
    """Implements triton.Prefill for inputs that fit blackwell_prefill.py."""
    q_TQD, kv_pages, batch, group, sinks_Q, window, rotation = inputs
    num_tiles = portable.most_tiles(out_TQD, batch, GROUPS.value * TOKENS.value)
    prefill_kernel[(min(target.sm_count, num_tiles * inputs.kv_heads),)](
        descriptor(kv_pages, [1, 1, 1, PAGE.value, HEAD_DIM.value]),
        out_TQD,
        q_TQD,
        q_TQD.stride(0),
        rotation[0] if rotation else None,
        group.page_table_SB,
        batch.query_starts_S1,
        batch.context_lens_S,
        batch.counts_2,
        sinks_Q,
        group.page_table_SB.stride(0),
        batch.num_decodes,
        len(batch.context_lens_S),
        len(out_TQD),
        KV_HEADS=inputs.kv_heads,
        WINDOW=window or 0,
        STAGES=STAGES,
        num_warps=4,
        maxnreg=LAUNCH_REGISTERS.value,
        launch_pdl=True,
        enable_fp_fusion=True,
    )


attention = partial(portable.attention, prefill=prefill)


def trial(target: Target) -> str | None:
    """What is wrong with the kernel on this GPU, in words: it runs on small prompts, beside the reference.

    They begin within a page, end within one, and take several tiles; memory that is not theirs is NaN.
    """
    counts, contexts, kv_heads = (40, 3, 150), (40, 130, 300), 8
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    table_SB = torch.tensor([[1, -1, -1, -1, -1], [9, 2, 5, -1, -1], [3, 8, 4, 7, 6]], dtype=torch.int32)
    kv_pages = random(10, 2, kv_heads, PAGE.value, HEAD_DIM.value)
    kv_pages[0] = torch.nan
    for row_B, context in zip(table_SB, contexts, strict=True):
        kv_pages[row_B[context // PAGE.value], :, :, context % PAGE.value :] = torch.nan
    positions_T = torch.cat([torch.arange(end - n, end) for n, end in zip(counts, contexts, strict=True)])
    starts_S1 = torch.tensor([0, *counts]).cumsum(0).int()
    cos_sin = torch.rand(max(contexts), HEAD_DIM.value, generator=generator) * 2 - 1  # any factors
    q_TQD, sinks_Q = random(sum(counts), kv_heads * HEADS.value, HEAD_DIM.value), random(kv_heads * HEADS.value)
    cos, sin = cos_sin[positions_T][:, None].chunk(2, 2)
    first, second = q_TQD.float().chunk(2, 2)
    rotated_TQD = torch.cat((first * cos - second * sin, second * cos + first * sin), 2).bfloat16().float()

    def batch(device: torch.device) -> Batch:
        group = PageGroup(table_SB.to(device), positions_T.to(device))
        lens_S = torch.tensor(contexts, dtype=torch.int32, device=device)
        return Batch(positions_T.to(device), positions_T.to(device), starts_S1.to(device), lens_S, (group,), None)

    there, here = batch(target.device), batch(torch.device("cpu"))
    counted = replace(there, counts_2=torch.tensor([0, len(counts)], dtype=torch.int32, device=target.device))
    queries = UnrotatedQueries(q_TQD.to(target.device), cos_sin.to(target.device), there.positions_T)
    worst = 0.0
    for window, queued in ((None, there), (128, counted)):
        expected = reference.attention(rotated_TQD, kv_pages, here, here.groups[0], sinks_Q, window)
        on_gpu = kv_pages.to(target.device), queued, queued.groups[0], sinks_Q.to(target.device)
        found = attention(target, queries, *on_gpu, window).float().cpu()
        error = float((found - expected).norm() / expected.norm())
        worst = max(worst, error if error == error else torch.inf)
    return f"the results of prefill attention are off by {worst:.3g} of their size" if worst > MAX_ERROR else None
