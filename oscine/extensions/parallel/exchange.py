"""Tokens and sums of experts on their way between the ranks of a group on CPUs, through shared memory.

A rank writes into an area of its own, says so, and reads the areas of the others once all have said it. An area has two
parts, used in turns: a rank writes one again only after all ranks have come to the other, and so have read the first.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch import Tensor

from oscine.extensions.parallel.comm.memory_order import memory_order
from oscine.extensions.parallel.rendezvous import tensors_of, wait, words_of
from oscine.ops.interface import Routing
from oscine.types import RankHandle


class MemoryExchange:
    """An oscine.ops.target.Exchange."""

    failed: Tensor | None = None  # it raises instead

    def __init__(self, handle: RankHandle, most_tokens: int, row_bytes: int, limit_s: float) -> None:
        """`most_tokens`: of one rank in a step. `row_bytes`: of a token with its routing, which is more than its sums.
        `limit_s`: as of StepClock.
        """
        self.tokens: tuple[int, ...] = ()
        self._rank, self._num_ranks, self._limit_s = handle.rank, handle.num_ranks, limit_s
        part = most_tokens * row_bytes
        self._area_bytes, self._sums_start = part * (1 + handle.num_ranks), part
        self._memory = tensors_of(handle, self._area_bytes * handle.num_ranks)
        self._all_words = words_of(handle)
        self._words = self._all_words[2 * handle.num_ranks : 3 * handle.num_ranks]  # beside those of the clock
        self._met = 0
        self._order = memory_order().order

    def share(self, moe: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def shared(x_TH: Tensor, routing: Routing, experts: Any, swiglu_limit: float) -> Tensor:
            x, expert_ids, weights = self.gather(x_TH, routing.expert_ids_TK, routing.weights_TK)
            return self.scatter(moe(x, Routing(expert_ids, weights), experts, swiglu_limit))

        return shared

    def rehearsal(self) -> AbstractContextManager[None]:
        return nullcontext()

    def serve(self) -> None:
        pass

    def gather(self, *columns: Tensor) -> list[Tensor]:
        """[T, ...] each -> the same of the tokens of all ranks, in the order of the ranks."""
        for column, written in zip(columns, self._columns(self._rank, columns), strict=True):
            written.copy_(column)
        self._meet()
        parts = [self._columns(rank, columns) for rank in range(self._num_ranks)]
        return [torch.cat(of_column) for of_column in zip(*parts, strict=True)]

    def scatter(self, partial: Tensor) -> Tensor:
        """Partial sums of the tokens of all ranks, [n, H] -> sums over ranks, [T, H]."""
        assert partial.dim() == 2, "the backends of CPUs add up their own partial sums"
        self._sums(self._rank, partial).copy_(partial)
        self._meet()
        end = sum(self.tokens[: self._rank + 1])
        mine = slice(end - self.tokens[self._rank], end)
        return torch.stack([self._sums(rank, partial)[mine] for rank in range(self._num_ranks)]).sum(0)

    def _columns(self, rank: int, columns: tuple[Tensor, ...]) -> list[Tensor]:
        """Where a rank writes its columns: one after the other."""
        shapes = [(self.tokens[rank], *column.shape[1:]) for column in columns]
        sizes = [prod(shape) * column.itemsize for shape, column in zip(shapes, columns, strict=True)]
        starts = accumulate(sizes, initial=rank * self._area_bytes)
        return [
            self._view(start, shape, column.dtype)
            for start, shape, column in zip(starts, shapes, columns, strict=False)
        ]

    def _sums(self, rank: int, like: Tensor) -> Tensor:
        return self._view(rank * self._area_bytes + self._sums_start, tuple(like.shape), like.dtype)

    def _view(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not prod(shape):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=prod(shape), offset=start).view(shape)

    def _meet(self) -> None:
        self._met += 1
        self._order()
        self._words[self._rank] = self._met
        wait(self._all_words, self._absent, self._limit_s)
        self._order()

    def _absent(self) -> int | None:
        return next((rank for rank, met in enumerate(self._words.tolist()) if met < self._met), None)
