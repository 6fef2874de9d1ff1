"""Attention over a paged cache, with a sink logit per head and an optional sliding window.

For query i and key j of one sequence (j <= i, and j > i - window in a sliding layer), head q reading key head g:

    s_ij = q_i . k_j / sqrt(D)
    p_ij = exp(s_ij) / (exp(sink_q) + sum_j exp(s_ij))          the sink is in the denominator only
    o_i  = sum_j p_ij v_j

This is the definition, and the path on a CPU without native kernels. Sequences with one token are computed together,
page by page. A longer chunk is computed alone, in blocks of queries, so that few scores are alive at once. Pages before
the window are never read. Computes in float32, rounds once.

Shape suffixes as in interface.py; R query heads per key head (Q / G), W pages read of all sequences together,
C keys read, L queries of a block.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from oscine.ops.interface import Batch, PageGroup
from oscine.ops.kv.fp8 import page_size_of
from oscine.ops.kv.reference import load

MAX_GATHERED = 1 << 18  # float32 key elements copied out of the pages at once for a group of decodes
MAX_SCORES = 1 << 19  # float32 scores alive at once, of one block of queries, unless that has
LEAST_QUERIES = 32  # as all keys are read for each block


def attention(
    q_TQD: Tensor, kv_pages: Tensor, batch: Batch, group: PageGroup, sinks_Q: Tensor, window: int | None
) -> Tensor:
    """q [T, Q, D], kv_pages [pages, 2, G, R, D] with this step's keys and values -> [T, Q * D] in q's dtype."""
    num_kv_heads = kv_pages.shape[2]
    num_tokens, _, head_dim = q_TQD.shape
    q = q_TQD.float().view(num_tokens, num_kv_heads, -1, head_dim) * head_dim**-0.5
    sinks_GR = sinks_Q.float().view(num_kv_heads, -1)
    out = torch.empty_like(q)
    starts, contexts = batch.query_starts_S1.tolist(), batch.context_lens_S.tolist()
    for spans in _decode_groups(starts, contexts, kv_pages, window):
        sequences = list(spans)
        tokens = batch.query_starts_S1[sequences].long()
        table, lens = group.page_table_SB[sequences], batch.context_lens_S[sequences]
        out[tokens] = _attend_single_tokens(q[tokens], kv_pages, table, lens, list(spans.values()), sinks_GR, window)
    for s, context in enumerate(contexts):
        start, end = starts[s], starts[s + 1]
        if end - start > 1:
            out[start:end] = _attend_chunk(q[start:end], kv_pages, group.page_table_SB[s], context, sinks_GR, window)
    return out.flatten(1).to(q_TQD.dtype)


def _decode_groups(
    starts: list[int], contexts: list[int], kv_pages: Tensor, window: int | None
) -> Iterator[dict[int, tuple[int, int]]]:
    """Page spans of the sequences with one token, in groups whose keys fit a processor's cache."""
    group: dict[int, tuple[int, int]] = {}
    pages, limit = 0, MAX_GATHERED // kv_pages[0, 0].numel()
    for s, context in enumerate(contexts):
        if starts[s + 1] - starts[s] != 1:
            continue
        first, last = _page_span(context - 1, context, page_size_of(kv_pages), window)
        if group and pages + last - first > limit:
            yield group
            group, pages = {}, 0
        group[s] = (first, last)
        pages += last - first
    if group:
        yield group


def _page_span(first_query: int, end: int, page_size: int, window: int | None) -> tuple[int, int]:
    """The pages [first, last) that hold every key visible to queries first_query .. end - 1."""
    first_key = 0 if window is None else max(0, first_query - window + 1)
    return first_key // page_size, -(-end // page_size)


def _attend_single_tokens(
    q_SGRD: Tensor,
    kv_pages: Tensor,
    page_table_SB: Tensor,
    context_lens_S: Tensor,
    spans: list[tuple[int, int]],
    sinks_GR: Tensor,
    window: int | None,
) -> Tensor:
    """One query per sequence. Only the W pages in use are read; scores are padded to the longest sequence."""
    device, page_size = q_SGRD.device, page_size_of(kv_pages)
    num_sequences, (num_kv_heads, repeats) = q_SGRD.shape[0], sinks_GR.shape
    most = max(last - first for first, last in spans)
    row_W = torch.tensor([s for s, (a, b) in enumerate(spans) for _ in range(a, b)], device=device)
    page_W = torch.tensor([b for first, last in spans for b in range(first, last)], device=device)
    column_W = torch.tensor([b for first, last in spans for b in range(last - first)], device=device)
    pages = page_table_SB[row_W, page_W]
    keys, values = (load(kv_pages[:, i], pages).flatten(0, 1) for i in (0, 1))

    key_position_WP = page_W[:, None] * page_size + torch.arange(page_size, device=device)
    query_position_W1 = context_lens_S[row_W, None] - 1
    visible_WP = _visible(query_position_W1, key_position_WP, window)
    _clear_tails(values.view(len(pages), num_kv_heads, page_size, -1), visible_WP, spans)
    scores = torch.bmm(q_SGRD[row_W].flatten(0, 1), keys.transpose(1, 2)).view(-1, num_kv_heads, repeats, page_size)
    scores = scores.masked_fill(~visible_WP[:, None, None], -torch.inf)

    padded = scores.new_full((num_sequences, most, num_kv_heads, repeats, page_size), -torch.inf)
    padded[row_W, column_W] = scores
    weights = _softmax_with_sinks(padded.permute(0, 2, 3, 1, 4).flatten(3), sinks_GR[:, :, None])
    weights_WGRP = weights.view(num_sequences, num_kv_heads, repeats, most, page_size).permute(0, 3, 1, 2, 4)[
        row_W, column_W
    ]
    partial = torch.bmm(weights_WGRP.flatten(0, 1), values).view(len(pages), *q_SGRD.shape[1:])
    return torch.zeros_like(q_SGRD).index_add_(0, row_W, partial)


def _clear_tails(values_WGPD: Tensor, visible_WP: Tensor, spans: list[tuple[int, int]]) -> None:
    """Zeroes values past the end of each sequence: a page's earlier owner may have left NaN, and 0 * NaN is NaN."""
    tails = torch.tensor([last - first for first, last in spans], device=values_WGPD.device).cumsum(0) - 1
    values_WGPD[tails] = values_WGPD[tails].masked_fill_(~visible_WP[tails][:, None, :, None], 0)


def _attend_chunk(
    q_TGRD: Tensor, kv_pages: Tensor, page_table_B: Tensor, context_len: int, sinks_GR: Tensor, window: int | None
) -> Tensor:
    """The last T tokens of one sequence, in blocks of queries that each read only the keys they can see."""
    num_tokens, heads = q_TGRD.shape[0], sinks_GR.numel()
    page_size, start_of_chunk = page_size_of(kv_pages), context_len - q_TGRD.shape[0]
    first_page, last_page = _page_span(start_of_chunk, context_len, page_size, window)
    gathered = load(kv_pages, page_table_B[first_page:last_page])  # [W, 2, G, P, D]
    keys_GCD, values_GCD = gathered.permute(1, 2, 0, 3, 4).flatten(2, 3)
    keys_read = context_len if window is None else 2 * window
    most = num_tokens if window is None else window
    step = min(max(MAX_SCORES // (heads * keys_read), LEAST_QUERIES), most)
    outputs = []
    for start in range(0, num_tokens, step):
        block = q_TGRD[start : start + step]
        first_query = start_of_chunk + start
        end = first_query + len(block)
        first_key = _page_span(first_query, end, page_size, window)[0] * page_size
        seen = slice(first_key - first_page * page_size, end - first_page * page_size)
        visible_LC = _visible(
            torch.arange(first_query, end, device=block.device)[:, None],
            torch.arange(first_key, end, device=block.device),
            window,
        )
        outputs.append(_attend_block(block, keys_GCD[:, seen], values_GCD[:, seen], visible_LC, sinks_GR))
    return torch.cat(outputs)


def _attend_block(q_LGRD: Tensor, keys_GCD: Tensor, values_GCD: Tensor, visible_LC: Tensor, sinks_GR: Tensor) -> Tensor:
    length, _, repeats, _ = q_LGRD.shape
    q = q_LGRD.permute(1, 2, 0, 3).flatten(1, 2)
    scores_GRLC = torch.bmm(q, keys_GCD.transpose(1, 2)).view(-1, repeats, length, visible_LC.shape[1])
    scores_GRLC.masked_fill_(~visible_LC, -torch.inf)
    weights = _softmax_with_sinks(scores_GRLC, sinks_GR[:, :, None, None])
    out = torch.bmm(weights.flatten(1, 2), values_GCD).view(-1, repeats, length, q_LGRD.shape[-1])
    return out.permute(2, 0, 1, 3)


def _visible(query_position: Tensor, key_position: Tensor, window: int | None) -> Tensor:
    causal = key_position <= query_position
    return causal if window is None else causal & (key_position > query_position - window)


def _softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """Softmax over the last dimension with one more term, exp(sink), in the sum. The sink keeps the maximum finite."""
    top = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    weights = (scores - top).exp_()
    return weights / (weights.sum(-1, keepdim=True) + (sinks - top).exp())
