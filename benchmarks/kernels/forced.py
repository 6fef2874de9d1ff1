"""benchmarks.draft.forced in one launch, which a CUDA graph of a step hardly feels."""

import triton
import triton.language as tl
from torch import Tensor

from oscine.ops.interface import Batch
from oscine.ops.packed import PackedStep


def forced(packed: PackedStep[Tensor], batch: Batch, ids_M: Tensor, chance_K: Tensor) -> Tensor:
    """Arguments and result as there; chance_K ends with a 0."""
    found_M = ids_M.clone()
    _forced_kernel[(1,)](
        found_M,
        ids_M,
        packed.logits_rows_N,
        packed.given_T,
        batch.token_ids_T,
        batch.positions_T,
        packed.sampled_slots_M,
        chance_K,
        len(ids_M),
        LAST=len(chance_K) - 1,
        BLOCK_M=triton.next_power_of_2(len(ids_M)),
    )
    return found_M


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["rows", "given", "slots"])
def _forced_kernel(
    found, ids, rows, given, tokens, positions, slots, chances, num_rows, LAST: tl.constexpr, BLOCK_M: tl.constexpr
):
    place_M = tl.arange(0, BLOCK_M)
    is_row_M, has_next_M = place_M < num_rows, place_M + 1 < num_rows
    row_M = tl.load(rows + place_M, is_row_M, other=0)
    next_row_M = tl.load(rows + place_M + 1, has_next_M, other=0)
    given_M, next_given_M = tl.load(given + row_M), tl.load(given + next_row_M)
    verifies_M = has_next_M & (given_M < 0) & (next_given_M == given_M - 1)
    draft_M, id_M = tl.load(tokens + next_row_M).to(tl.int64), tl.load(ids + place_M, is_row_M, other=0).to(tl.int64)
    mixed_M = tl.load(positions + row_M).to(tl.int64) * 0x9E3779B1
    mixed_M += tl.load(slots + place_M, is_row_M, other=0).to(tl.int64) * 0x85EBCA6B
    mixed_M = ((mixed_M ^ (mixed_M >> 15)) * 0x2C1B3C6D >> 12) & 0xFFFF
    chance_M = tl.load(chances + tl.minimum(tl.maximum(-1 - given_M, 0), LAST))
    other_M = tl.where(id_M == draft_M, id_M ^ 1, id_M)
    chosen_M = tl.where(mixed_M.to(tl.float32) / 65536 < chance_M, draft_M, other_M)
    tl.store(found + place_M, chosen_M.to(found.dtype.element_ty), is_row_M & verifies_M)
