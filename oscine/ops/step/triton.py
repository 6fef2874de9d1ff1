"""Preparation and end of a step in Triton, one launch each: sm_80 and newer. Definitions: reference.py.

Reads the columns of a packed step through its first one: they lie in one array. Sizes are not specialised on,
so that every step runs the same compiled kernel. Shape suffixes as in ops/interface.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.ops.interface import Batch, PageGroup, PreparedStep
from oscine.ops.packed import REJECTED, BatchState, PackedSizes, PackedStep

BLOCK = 256  # tokens, or columns of a page table, of one program at a time


def prepare_step(packed: PackedStep[Tensor], state: BatchState) -> PreparedStep:
    """The packed columns must be views of one array."""
    num_tokens, num_sequences, num_rows = (len(c) for c in (packed.given_T, packed.slots_S, packed.logits_rows_N))
    starts = PackedSizes(num_tokens, num_sequences, num_rows, len(packed.sampled_slots_M)).starts
    device = packed.given_T.device
    stride = starts[1]  # of the columns of tokens, also in `wide`
    num_groups, _, columns = state.tables.shape
    num_wide = 2 + num_groups
    wide = torch.empty(num_wide * stride + num_rows, dtype=torch.int64, device=device)
    token_ids, positions, *slots = (wide[i * stride :][:num_tokens] for i in range(num_wide))
    tables = torch.empty((num_groups, num_sequences, columns), dtype=torch.int32, device=device)
    context_lens = torch.empty(num_sequences, dtype=torch.int32, device=device)
    token_blocks = triton.cdiv(max(num_tokens, num_rows), BLOCK)
    _prepare_kernel[(token_blocks + num_sequences,)](
        packed.given_T,
        state.last_ids,
        state.lens,
        state.drafts,
        state.tables,
        wide,
        context_lens,
        tables,
        num_tokens,
        num_sequences,
        num_rows,
        stride,
        starts[3],
        starts[4],
        starts[5],
        token_blocks,
        state.tables.stride(0),
        DRAFTS=state.drafts.shape[1],
        GROUPS=num_groups,
        P=state.page_size,
        B=columns,
        BLOCK=BLOCK,
        enable_fp_fusion=True,
    )
    groups = tuple(map(PageGroup, tables.unbind(0), slots))
    return PreparedStep(token_ids, positions, context_lens, groups, wide[num_wide * stride :])


def accept(packed: PackedStep[Tensor], batch: Batch, state: BatchState, ids_M: Tensor) -> Tensor:
    count = len(ids_M)
    accepted_M = torch.empty(count, dtype=torch.int64, device=ids_M.device)
    _accept_kernel[(triton.cdiv(count, BLOCK),)](
        packed.given_T,
        packed.logits_rows_N,
        packed.sampled_slots_M,
        batch.token_ids_T,
        batch.positions_T,
        ids_M,
        state.last_ids,
        state.lens,
        accepted_M,
        count,
        len(state.lens) - 1,
        DRAFTS=state.drafts.shape[1],
        REJECTED=REJECTED,
        BLOCK=BLOCK,
        enable_fp_fusion=True,
    )
    return accepted_M


@triton.jit
def _token_at(packed, last_ids, lens, drafts, t, inside, stride, DRAFTS: tl.constexpr):
    """(id, position, row of the state) of tokens of the step."""
    given = tl.load(packed + t, mask=inside, other=0)
    position = tl.load(packed + stride + t, mask=inside, other=0)
    slot = tl.load(packed + 2 * stride + t, mask=inside, other=0).to(tl.int64)
    unknown = inside & (given < 0)
    place = -1 - given
    last = tl.load(last_ids + slot, mask=unknown & (place == 0), other=0)
    draft = tl.load(drafts + slot * DRAFTS + place - 1, mask=unknown & (place > 0), other=0)
    length = tl.load(lens + slot, mask=unknown, other=0)
    id = tl.where(unknown, tl.where(place == 0, last, draft), given)
    return id, tl.where(unknown, length - 1 + place, position), slot


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_sequences",
        "num_rows",
        "stride",
        "slots_start",
        "query_starts_start",
        "rows_start",
        "token_blocks",
    ]
)
def _prepare_kernel(
    packed,  # the one array: given_T, positions_T and token_slots_T, `stride` apart; then others, at their starts
    last_ids,
    lens,
    drafts,  # [slots + 1, DRAFTS]
    state_tables,  # [groups, slots, B]
    wide,  # token ids [T], positions [T], slots of each group [T], rows [N]
    context_lens,  # [S]
    tables,  # [groups, S, B]
    num_tokens,
    num_sequences,
    num_rows,
    stride,
    slots_start,
    query_starts_start,
    rows_start,
    token_blocks,
    stride_group,  # of state_tables
    DRAFTS: tl.constexpr,
    GROUPS: tl.constexpr,
    P: tl.constexpr,
    B: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    if program < token_blocks:
        t = program * BLOCK + lane
        inside = t < num_tokens
        id, position, slot = _token_at(packed, last_ids, lens, drafts, t, inside, stride, DRAFTS)
        entry = slot * B + position // P
        offset = position % P
        tl.store(wide + t, id.to(tl.int64), mask=inside)
        tl.store(wide + stride + t, position.to(tl.int64), mask=inside)
        for group in tl.static_range(GROUPS):
            page = tl.load(state_tables + group * stride_group + entry, mask=inside, other=0).to(tl.int64)
            tl.store(wide + (2 + group) * stride + t, page * P + offset, mask=inside)
        wanted = t < num_rows
        row = tl.load(packed + rows_start + t, mask=wanted, other=0)
        tl.store(wide + (2 + GROUPS) * stride + t, row.to(tl.int64), mask=wanted)
    else:
        sequence = (program - token_blocks).to(tl.int64)
        last = tl.load(packed + query_starts_start + sequence + 1) - 1 + 0 * lane
        _, position, _ = _token_at(packed, last_ids, lens, drafts, last, lane == 0, stride, DRAFTS)
        tl.store(context_lens + sequence + lane, position + 1, mask=lane == 0)
        table_row = tl.load(packed + slots_start + sequence).to(tl.int64)
        for first in range(0, B, BLOCK):
            column = first + lane
            used = column < B
            source, target = table_row * B + column, sequence * B + column
            for group in tl.static_range(GROUPS):
                entries = tl.load(state_tables + group * stride_group + source, mask=used)
                tl.store(tables + target + group * num_sequences.to(tl.int64) * B, entries, mask=used)


@triton.jit(do_not_specialize=["count", "padding"], do_not_specialize_on_alignment=["ids_M"])
def _accept_kernel(
    given_T,
    rows_N,
    slots_M,
    tokens_T,
    positions_T,
    ids_M,
    last_ids,
    lens,
    accepted_M,
    count,
    padding,
    DRAFTS: tl.constexpr,
    REJECTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A lane is the first row of a sequence, and walks over its drafts. Lanes of drafts do nothing."""
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = m < count
    row = tl.load(rows_N + m, mask=inside, other=0)
    is_first = inside & (tl.load(given_T + row, mask=inside, other=-2) >= -1)
    alive = is_first
    id = tl.load(ids_M + m, mask=alive, other=0).to(tl.int64)
    tl.store(accepted_M + m, id, mask=alive)
    slot = tl.load(slots_M + m, mask=alive, other=0)
    last_id = id
    last_row = row
    is_draft = alive
    for j in tl.static_range(1, DRAFTS + 1):
        is_draft &= m + j < count
        row = tl.load(rows_N + m + j, mask=is_draft, other=0)
        is_draft &= tl.load(given_T + row, mask=is_draft, other=0) == -1 - j
        token = tl.load(tokens_T + row, mask=is_draft, other=0)
        alive &= is_draft & (id == token)
        id = tl.load(ids_M + m + j, mask=is_draft, other=0).to(tl.int64)
        tl.store(accepted_M + m + j, tl.where(alive, id, REJECTED), mask=is_draft)
        last_id = tl.where(alive, id, last_id)
        last_row = tl.where(alive, row, last_row)
    kept = is_first & (slot != padding)
    position = tl.load(positions_T + last_row, mask=kept, other=0)
    tl.store(last_ids + slot, tl.maximum(last_id, 0).to(tl.int32), mask=kept)
    tl.store(lens + slot, (position + 2).to(tl.int32), mask=kept)
