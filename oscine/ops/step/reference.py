"""What a step reads of the persistent state: its token ids, and where its sequences keep their keys and values.

    token id of t    given[t], or last_ids[s] where given[t] is -1       s = token_slots[t]: the row of t's sequence
    slot of t        table[s, position / P] * P + position % P           in each page group
    page table of i  table[slots[i]]                                     in each page group

The definition, and the path on a CPU. Shape suffixes as in ops/interface.py.
"""

from torch import Tensor, where

from oscine.ops.interface import PageGroup, PreparedStep
from oscine.ops.packed import BatchState, PackedStep


def prepare_step(packed: PackedStep[Tensor], state: BatchState) -> PreparedStep:
    """What comes out shares no memory with what goes in."""
    last_T = state.last_ids.index_select(0, packed.token_slots_T)
    positions_T = packed.positions_T.long()
    return PreparedStep(
        token_ids_T=where(packed.given_T < 0, last_T, packed.given_T).long(),
        positions_T=positions_T,
        groups=tuple(_group(packed, table, positions_T, state.page_size) for table in state.tables),
        logits_rows_N=packed.logits_rows_N.long(),
    )


def write_back(state: BatchState, sampled_slots_M: Tensor, ids_M: Tensor) -> None:
    """last_ids[slot] = id. -1, whose sequence ends, becomes 0. Only the unused last row may occur more than once."""
    state.last_ids[sampled_slots_M.long()] = ids_M.int().clamp(min=0)


def _group(packed: PackedStep[Tensor], table: Tensor, positions_T: Tensor, page_size: int) -> PageGroup:
    entries_T = packed.token_slots_T.long() * table.shape[1] + positions_T // page_size
    pages_T = table.view(-1).index_select(0, entries_T).long()
    return PageGroup(table.index_select(0, packed.slots_S), pages_T * page_size + positions_T % page_size)
