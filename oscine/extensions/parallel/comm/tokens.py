"""Tokens on their way to the experts of all GPUs, and their sums on the way back: an Exchange, see ../target.py.

    dispatch   stores its own tokens at every other rank, and takes theirs
    combine    adds up the partial sums of each token, sends those of a token to its rank, and adds what others sent

Tokens of all ranks stand in the order of the ranks, on every rank. A rank routes all of them: the router's product with
the tokens of others costs less than a further message with their experts would.

Messages are those of push.py. Every layer of every step is one dispatch, in the slots "attention", and one combine, in
the slots "experts", so the two take turns whatever follows what: eager steps, graphs, steps of padding. A rank that
dispatches has received a sum that the other rank sent after it had cleared all tokens of the dispatch before, and one
that combines has received a token that the other sent after it had cleared all sums of the combine before: each rank
has a token in every step. A kernel waits for what others launch in a step that all have agreed on, so they launch it
without waiting for this rank.

A rank that has waited in vain sends no sums from then on: the others wait in vain too, and no wrong token is given out.

Shape suffixes: T tokens of this rank, n tokens of all ranks, H hidden, J partial sums, E experts, K experts per token.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.extensions.parallel.comm.symmetric import SymmetricCommunicator
from oscine.ops.comm.push import poll, push
from oscine.ops.comm.sums import add_ranks, places_of, slot_at
from oscine.ops.launch import depend
from oscine.ops.norm.triton import add_partials, clear_counts
from oscine.ops.planes import Planes, plane_arguments, store_planes
from oscine.ops.target import Target

WARPS = 8


class SymmetricExchange:
    """An Exchange between GPUs of one host."""

    def __init__(self, communicator: SymmetricCommunicator) -> None:
        self._communicator = communicator
        self.failed: Tensor | None = communicator.failed
        self._options = Target.of(communicator.device).launch_options
        self._tokens: tuple[int, ...] = ()
        self._on_device: tuple[int, ...] = ()
        self._starts = torch.zeros(communicator.num_ranks + 1, dtype=torch.int32, device=communicator.device)

    @property
    def tokens(self) -> tuple[int, ...]:
        return self._tokens

    @tokens.setter
    def tokens(self, tokens: tuple[int, ...]) -> None:
        self._tokens = tokens
        if tokens != self._on_device:
            self._upload(tokens)

    def _upload(self, tokens: tuple[int, ...]) -> None:
        """Queued on the device, before each replay of a graph, but not while it is captured."""
        if not torch.cuda.is_current_stream_capturing():
            self._on_device = tokens
            starts = torch.tensor([0, *tokens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            self._starts.copy_(starts.pin_memory(), non_blocking=True)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Within it kernels wait for no rank, since some are not launched before they are compiled."""
        self.failed = None
        with self._communicator.rehearsal():
            yield
        self.failed = self._communicator.failed

    def serve(self) -> None:
        self._communicator.serve()

    def share(self, moe: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """The norm before has dispatched the tokens."""
        return lambda *arguments: self.combine(moe(*arguments))

    def dispatch(self, y_TH: Tensor, counts_E: Tensor | None, planes: Planes | None) -> Tensor:
        """The tokens of all ranks. Sets counts_E to zero on the way, and writes planes of all."""
        num_tokens, hidden = sum(self._tokens), y_TH.shape[1]
        gathered_nH = y_TH.new_empty(num_tokens, hidden)
        num_experts = 1 if counts_E is None else len(counts_E)
        _dispatch_kernel[(num_tokens,)](
            y_TH,
            gathered_nH,
            counts_E,
            **plane_arguments(planes),
            starts=self._starts,
            **self._places("attention", hidden),
            H=hidden,
            E=num_experts,
            BLOCK_H=triton.next_power_of_2(hidden),
            BLOCK_E=triton.next_power_of_2(num_experts),
            num_warps=WARPS,
            **self._options,
        )
        return gathered_nH

    def combine(self, partial: Tensor) -> Tensor:
        """bfloat16 [n, H] or [n, J, H] -> float32 [T, H]: the sums of this rank's tokens over J and over ranks."""
        assert partial.dtype == torch.bfloat16, "threads must have 16 bytes of a message side by side"
        num_tokens, hidden = partial.shape[0], partial.shape[-1]
        rank = self._communicator.rank
        total_TH = torch.empty(self._tokens[rank], hidden, dtype=torch.float32, device=partial.device)
        _combine_kernel[(num_tokens,)](
            partial,
            total_TH,
            self._starts,
            **self._places("experts", hidden),
            H=hidden,
            J=partial.shape[1] if partial.dim() == 3 else 1,
            BLOCK_H=triton.next_power_of_2(hidden),
            num_warps=WARPS,
            **self._options,
        )
        return total_TH

    def _places(self, name: str, hidden: int) -> dict[str, Any]:
        places = self._communicator.norm_arguments(name, max(self._tokens), hidden)
        return {name: value for name, value in places.items() if name != "TWO_SHOT"}


@triton.jit
def _owner(row, starts, rank, RANKS: tl.constexpr):
    """(rank of a token, its number among the other ranks, the token's number there)."""
    owner = tl.full((), 0, tl.int32)
    for other in tl.static_range(1, RANKS):
        owner += (row >= tl.load(starts + other)).to(tl.int32)
    return owner, tl.where(owner > rank, owner - 1, owner), row - tl.load(starts + owner)


@triton.jit(do_not_specialize=["rank"])
def _dispatch_kernel(
    y,
    gathered,
    counts,
    values,
    scale,
    starts,
    addresses,
    slot,
    rank,
    state,
    H: tl.constexpr,
    E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PLANES: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token in each program: first this rank's own, which are sent, then those of the others."""
    index = tl.program_id(0)
    column_H = tl.arange(0, BLOCK_H)
    inside_H = column_H < H
    depend(PDL)
    begin = tl.load(starts + rank)
    own = tl.load(starts + rank + 1) - begin
    row = tl.where(index < own, begin + index, tl.where(index - own < begin, index - own, index))
    _, other, number = _owner(row, starts, rank, RANKS)
    place_H = places_of(number, column_H, inside_H, H)
    y_H = tl.load(y + tl.minimum(index, own - 1).to(tl.int64) * H + column_H, mask=inside_H, other=0)
    if index < own:
        y_H = push((y_H,), place_H, addresses, 1, 8, 4)[0]
    else:
        source = addresses[0] + other * slot.to(tl.int64)
        y_H = poll((y_H,), place_H, source, slot, state, 1, True, 1, 8, 4)[0]
    tl.store(gathered + row.to(tl.int64) * H + column_H, y_H, mask=inside_H)
    if values is not None:
        store_planes(tl.where(inside_H, y_H, 0).to(tl.float32), values, scale, row.to(tl.int64), H, BLOCK_H, PLANES)
    if counts is not None:
        clear_counts(counts, index, E, BLOCK_E)


@triton.jit(do_not_specialize=["rank"])
def _combine_kernel(
    x,
    total,
    starts,
    addresses,
    slot,
    rank,
    state,
    H: tl.constexpr,
    J: tl.constexpr,
    BLOCK_H: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A token in each program: first those of other ranks, whose sums are sent, then this rank's own."""
    index = tl.program_id(0)
    column_H = tl.arange(0, BLOCK_H)
    inside_H = column_H < H
    depend(PDL)
    failed = tl.load(state)  # of kernels before this one
    begin = tl.load(starts + rank)
    own = tl.load(starts + rank + 1) - begin
    foreign = tl.num_programs(0) - own
    row = tl.where(index >= foreign, begin + index - foreign, tl.where(index < begin, index, index + own))
    _, other, number = _owner(row, starts, rank, RANKS)
    place_H = places_of(number, column_H, inside_H, H)
    part_H = add_partials(x, row.to(tl.int64), column_H, inside_H, H, J).to(tl.bfloat16)
    if index < foreign:
        address = slot_at(addresses, other, RANKS)
        push((part_H,), tl.where(failed == 0, place_H, -1), (address, address), 1, 8, 4)
    else:
        others = poll((part_H,), place_H, addresses[0], slot, state, RANKS - 1, True, 1, 8, 4)
        total_H = add_ranks(part_H, others, rank, RANKS)
        tl.store(total + number.to(tl.int64) * H + column_H, total_H, mask=inside_H)
