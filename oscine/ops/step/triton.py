"""The preparation of a step in Triton, one launch each: sm_80 and newer. Definitions: reference.py.

Reads the columns of a packed step through its first one: they lie in one array. Sizes are not specialised on,
so that every step runs the same compiled kernel. Shape suffixes as in ops/interface.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.ops.interface import PageGroup, PreparedStep
from oscine.ops.packed import BatchState, PackedSizes, PackedStep

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
    token_blocks = triton.cdiv(max(num_tokens, num_rows), BLOCK)
    _prepare_kernel[(token_blocks + num_sequences,)](
        packed.given_T,
        state.last_ids,
        state.tables,
        wide,
        tables,
        num_tokens,
        num_sequences,
        num_rows,
        stride,
        starts[3],
        starts[6],
        token_blocks,
        state.tables.stride(0),
        GROUPS=num_groups,
        P=state.page_size,
        B=columns,
        BLOCK=BLOCK,
    )
    groups = tuple(map(PageGroup, tables.unbind(0), slots))
    return PreparedStep(token_ids, positions, groups, wide[num_wide * stride :])


def write_back(state: BatchState, sampled_slots_M: Tensor, ids_M: Tensor) -> None:
    """ids_M: int32 or int64; -1 is stored as 0."""
    count = len(ids_M)
    _write_back_kernel[(triton.cdiv(count, BLOCK),)](state.last_ids, sampled_slots_M, ids_M, count, BLOCK=BLOCK)


@triton.jit(
    do_not_specialize=["num_tokens", "num_sequences", "num_rows", "stride", "slots_start", "rows_start", "token_blocks"]
)
def _prepare_kernel(
    packed,  # the one array: given_T, positions_T and token_slots_T, `stride` apart; then others, at their starts
    last_ids,
    state_tables,  # [groups, slots, B]
    wide,  # token ids [T], positions [T], slots of each group [T], rows [N]
    tables,  # [groups, S, B]
    num_tokens,
    num_sequences,
    num_rows,
    stride,
    slots_start,
    rows_start,
    token_blocks,
    stride_group,  # of state_tables
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
        given = tl.load(packed + t, mask=inside, other=0)
        position = tl.load(packed + stride + t, mask=inside, other=0)
        slot = tl.load(packed + 2 * stride + t, mask=inside, other=0)
        last = tl.load(last_ids + slot, mask=inside, other=0)
        entry = slot.to(tl.int64) * B + position // P
        offset = position % P
        tl.store(wide + t, tl.where(given < 0, last, given).to(tl.int64), mask=inside)
        tl.store(wide + stride + t, position.to(tl.int64), mask=inside)
        for group in tl.static_range(GROUPS):
            page = tl.load(state_tables + group * stride_group + entry, mask=inside, other=0).to(tl.int64)
            tl.store(wide + (2 + group) * stride + t, page * P + offset, mask=inside)
        wanted = t < num_rows
        row = tl.load(packed + rows_start + t, mask=wanted, other=0)
        tl.store(wide + (2 + GROUPS) * stride + t, row.to(tl.int64), mask=wanted)
    else:
        sequence = (program - token_blocks).to(tl.int64)
        table_row = tl.load(packed + slots_start + sequence).to(tl.int64)
        for first in range(0, B, BLOCK):
            column = first + lane
            used = column < B
            source, target = table_row * B + column, sequence * B + column
            for group in tl.static_range(GROUPS):
                entries = tl.load(state_tables + group * stride_group + source, mask=used)
                tl.store(tables + target + group * num_sequences.to(tl.int64) * B, entries, mask=used)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["ids_M"])
def _write_back_kernel(last_ids, slots_M, ids_M, count, BLOCK: tl.constexpr):
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = m < count
    slot = tl.load(slots_M + m, mask=inside, other=0)
    id = tl.maximum(tl.load(ids_M + m, mask=inside, other=0), 0)
    tl.store(last_ids + slot, id.to(tl.int32), mask=inside)
