"""Preparation and end of a step, in C. Definition: reference.py."""

import torch
from torch import Tensor

from oscine.ops.interface import Batch, PageGroup, PreparedStep
from oscine.ops.native.library import check, library
from oscine.ops.packed import BatchState, PackedStep


def prepare_step(packed: PackedStep[Tensor], state: BatchState) -> PreparedStep:
    num_groups, table_rows, columns = state.tables.shape
    num_tokens, num_sequences, num_rows = len(packed.given_T), len(packed.slots_S), len(packed.logits_rows_N)
    token_ids_T, positions_T, rows_N = (torch.empty(n, dtype=torch.int64) for n in (num_tokens, num_tokens, num_rows))
    context_lens_S = torch.empty(num_sequences, dtype=torch.int32)
    page_tables = torch.empty(num_groups, num_sequences, columns, dtype=torch.int32)
    slots = torch.empty(num_groups, num_tokens, dtype=torch.int64)
    check(
        library().oscine_prepare_step(
            packed.given_T.data_ptr(),
            packed.positions_T.data_ptr(),
            packed.token_slots_T.data_ptr(),
            packed.slots_S.data_ptr(),
            packed.query_starts_S1.data_ptr(),
            packed.logits_rows_N.data_ptr(),
            state.tables.data_ptr(),
            state.last_ids.data_ptr(),
            state.lens.data_ptr(),
            state.drafts.data_ptr(),
            state.drafts.shape[1],
            num_tokens,
            num_sequences,
            num_rows,
            num_groups,
            table_rows,
            columns,
            state.page_size,
            token_ids_T.data_ptr(),
            positions_T.data_ptr(),
            context_lens_S.data_ptr(),
            rows_N.data_ptr(),
            page_tables.data_ptr(),
            slots.data_ptr(),
        )
    )
    groups = tuple(PageGroup(page_tables[group], slots[group]) for group in range(num_groups))
    return PreparedStep(token_ids_T, positions_T, context_lens_S, groups, rows_N)


def accept(packed: PackedStep[Tensor], batch: Batch, state: BatchState, ids_M: Tensor) -> Tensor:
    ids_M = ids_M.long()
    accepted_M = torch.empty(len(ids_M), dtype=torch.int64)
    check(
        library().oscine_accept(
            packed.given_T.data_ptr(),
            packed.logits_rows_N.data_ptr(),
            packed.sampled_slots_M.data_ptr(),
            batch.token_ids_T.data_ptr(),
            batch.positions_T.data_ptr(),
            ids_M.data_ptr(),
            len(ids_M),
            len(state.lens) - 1,
            state.last_ids.data_ptr(),
            state.lens.data_ptr(),
            accepted_M.data_ptr(),
        )
    )
    return accepted_M
