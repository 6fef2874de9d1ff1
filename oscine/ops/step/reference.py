"""What a step reads of the persistent state: its tokens, and where its sequences keep their keys and values. And what
it leaves there.

    j of t           -1 - given[t] where that is not negative: t is the j-th draft after the last sampled token (j = 0)
    token id of t    given[t]; else last_ids[s] for j = 0, or drafts[s, j - 1]        s = token_slots[t]: t's sequence
    position of t    positions[t] where the id is given; else lens[s] - 1 + j
    context of i     1 + the position of the last token of sequence i
    slot of t        table[s, position / P] * P + position % P                        in each page group
    page table of i  table[slots[i]]; columns after its context may be anything       in each page group

A draft is accepted if it is what was sampled before it, and all drafts before it are accepted. With m the last accepted
row of a sequence:

    last_ids[s] = sampled id of m, lens[s] = 2 + position of m

The definition, and the path on a CPU. Shape suffixes as in ops/interface.py.
"""

from torch import Tensor, where

from oscine.ops.interface import Batch, PageGroup, PreparedStep
from oscine.ops.packed import REJECTED, BatchState, PackedStep


def prepare_step(packed: PackedStep[Tensor], state: BatchState) -> PreparedStep:
    """What comes out shares no memory with what goes in."""
    slots_T, is_given_T = packed.token_slots_T, packed.given_T >= 0
    place_T = (-1 - packed.given_T).clamp(min=0)
    drafts_T = state.drafts[slots_T, (place_T - 1).clamp(min=0)]
    unknown_T = where(place_T == 0, state.last_ids[slots_T], drafts_T)
    positions_T = where(is_given_T, packed.positions_T, state.lens[slots_T] - 1 + place_T).long()
    return PreparedStep(
        token_ids_T=where(is_given_T, packed.given_T, unknown_T).long(),
        positions_T=positions_T,
        context_lens_S=(positions_T[packed.query_starts_S1[1:] - 1] + 1).int(),
        groups=tuple(_group(packed, table, positions_T, state.page_size) for table in state.tables),
        logits_rows_N=packed.logits_rows_N.long(),
    )


def accept(packed: PackedStep[Tensor], batch: Batch, state: BatchState, ids_M: Tensor) -> Tensor:
    """ids_M: int32 or int64, of the first rows. -1, whose sequence ends, is kept as 0 in last_ids. Padding leaves
    nothing."""
    ids_M, count = ids_M.long(), len(ids_M)
    rows_M, sampled_slots_M = packed.logits_rows_N[:count].long(), packed.sampled_slots_M[:count]
    tokens_M, positions_M = batch.token_ids_T[rows_M], batch.positions_T[rows_M]
    is_draft_M = packed.given_T[rows_M] < -1
    follows_M = is_draft_M.clone()
    follows_M[1:] &= ids_M[:-1] == tokens_M[1:]
    accepted_M = ~is_draft_M
    for _ in range(state.drafts.shape[1]):
        accepted_M[1:] |= follows_M[1:] & accepted_M[:-1]
    ends_M = accepted_M.clone()
    ends_M[:-1] &= ~(accepted_M[1:] & is_draft_M[1:])
    # All shapes are fixed, for CUDA graphs: what leaves nothing writes the last row, which stays as it is.
    ends_M &= sampled_slots_M < len(state.lens) - 1
    slots_M = where(ends_M, sampled_slots_M, len(state.lens) - 1).long()
    state.last_ids[slots_M] = where(ends_M, ids_M.clamp(min=0), state.last_ids[-1]).int()
    state.lens[slots_M] = where(ends_M, positions_M + 2, state.lens[-1]).int()
    return where(accepted_M, ids_M, REJECTED)


def _group(packed: PackedStep[Tensor], table: Tensor, positions_T: Tensor, page_size: int) -> PageGroup:
    entries_T = packed.token_slots_T.long() * table.shape[1] + positions_T // page_size
    pages_T = table.view(-1).index_select(0, entries_T).long()
    return PageGroup(table.index_select(0, packed.slots_S), pages_T * page_size + positions_T % page_size)
