"""Attention over a paged cache, in C: float32, contiguous, heads of a multiple of 8. Definition: reference.py."""

import torch
from torch import Tensor

from oscine.ops.attention import reference
from oscine.ops.interface import Batch, PageGroup
from oscine.ops.native.library import check, library


def attention(
    q_TQD: Tensor, kv_pages: Tensor, batch: Batch, group: PageGroup, sinks_Q: Tensor, window: int | None
) -> Tensor:
    if kv_pages.shape[4] % 8:
        return reference.attention(q_TQD, kv_pages, batch, group, sinks_Q, window)
    out = torch.empty(q_TQD.shape[0], q_TQD.shape[1] * q_TQD.shape[2])
    _, _, num_kv_heads, page_size, head_dim = kv_pages.shape
    check(
        library().oscine_attention(
            q_TQD.data_ptr(),
            kv_pages.data_ptr(),
            kv_pages.stride(0),
            num_kv_heads,
            page_size,
            head_dim,
            group.page_table_SB.data_ptr(),
            group.page_table_SB.shape[1],
            batch.query_starts_S1.data_ptr(),
            batch.context_lens_S.data_ptr(),
            batch.context_lens_S.shape[0],
            sinks_Q.data_ptr(),
            q_TQD.shape[1],
            window or 0,
            out.data_ptr(),
        )
    )
    return out
