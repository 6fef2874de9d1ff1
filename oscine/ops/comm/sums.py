"""Sums over ranks within a Triton kernel.

Each rank rounds its part to bfloat16 (or sends float32), and every rank adds the same parts in rank order in float32,
so all ranks have the same bits. One shot: every rank sends its part to all others and adds them itself. Two shots: the
owner of a row, row % RANKS, gets the parts, and sends their sum to all others; a link then carries each row twice
instead of RANKS - 1 times. Programs of one row push before they poll, and programs start in order, so none waits for
one that cannot start.

The memory that all ranks can write belongs to a communicator, which gives kernels their arguments (norm_arguments).
"""

from typing import Any

import triton
import triton.language as tl

from oscine.ops.comm.push import poll, push
from oscine.ops.target import Target

COLUMNS_PER_WARP = 256  # of bfloat16, or more: 16 bytes of a message per thread
ALONE = {"addresses": None, "slot": None, "rank": None, "state": None, "RANKS": 1, "TWO_SHOT": False}


def partial_sums(target: Target, name: str, num_rows: int, hidden: int) -> dict[str, Any]:
    """The arguments of a kernel that adds up bfloat16 rows over the target's ranks, or has nothing to add up."""
    arguments = getattr(target.communicator, "norm_arguments", None)
    return ALONE if arguments is None else arguments(name, num_rows, hidden)


@triton.constexpr_function
def row_bytes(hidden: int) -> int:
    """Of a row of bfloat16 in a slot."""
    return (hidden + 7) // 8 * 16


@triton.jit
def places_of(row, column_H, inside_H, H: tl.constexpr):
    """Of the elements of a row of bfloat16 in a slot: bytes from its start, -1 outside."""
    STRIDE: tl.constexpr = row_bytes(H)
    return tl.where(inside_H, row.to(tl.int32) * STRIDE + column_H * 2, -1)


@triton.jit
def slot_at(addresses, other, RANKS: tl.constexpr):
    """The address of this rank's slot at a rank, by its number among the others."""
    address = addresses[1]
    for peer in tl.static_range(1, RANKS - 1):
        address = tl.where(other == peer, addresses[1 + peer], address)
    return address


@triton.jit
def of_rank(own, others, rank, SOURCE: tl.constexpr, RANKS: tl.constexpr, COUNT: tl.constexpr, INDEX: tl.constexpr):
    """The message INDEX of COUNT of rank SOURCE; `others` has the messages of all other ranks."""
    BEFORE: tl.constexpr = COUNT * (SOURCE if SOURCE < RANKS - 1 else SOURCE - 1) + INDEX
    AFTER: tl.constexpr = COUNT * (SOURCE - 1 if SOURCE > 0 else 0) + INDEX
    return tl.where(rank == SOURCE, own, tl.where(rank > SOURCE, others[BEFORE], others[AFTER]))


@triton.jit
def add_ranks(own, others, rank, RANKS: tl.constexpr):
    """float32 sum in rank order."""
    total = of_rank(own, others, rank, 0, RANKS, 1, 0).to(tl.float32)
    for source in tl.static_range(1, RANKS):
        total += of_rank(own, others, rank, source, RANKS, 1, 0).to(tl.float32)
    return total


@triton.jit
def sum_over_ranks(
    part, place, row, addresses, slot, rank, state, RANKS: tl.constexpr, TWO_SHOT: tl.constexpr, PACK: tl.constexpr
):
    """float32 sum of all ranks' parts, which are bfloat16 (PACK 8) or float32 (PACK 4); `row` decides the owner."""
    if TWO_SHOT:
        owner = row % RANKS
        other = tl.where(owner > rank, owner - 1, owner)  # among the others
        if owner == rank:
            parts = poll((part,), place, addresses[0], slot, state, RANKS - 1, True, 1, PACK, 4)
            total = add_ranks(part, parts, rank, RANKS).to(part.dtype)
            total = push((total,), place, addresses, 1, PACK, 4)[0]
        else:
            address = slot_at(addresses, other, RANKS)
            sent = push((part,), place, (address, address), 1, PACK, 4)
            total = poll(sent, place, addresses[0] + other * slot.to(tl.int64), slot, state, 1, True, 1, PACK, 4)[0]
        return total.to(tl.float32)
    own = push((part,), place, addresses, 1, PACK, 4)
    others = poll(own, place, addresses[0], slot, state, RANKS - 1, True, 1, PACK, 4)
    return add_ranks(own[0], others, rank, RANKS)
