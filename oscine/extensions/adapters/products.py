"""The products of low-rank adapters: each row of a step by the factors of its own adapter. The definition; any device.

    y[p] = A[key(p)] x[row(p)]          shrink
    out[p] (+)= w[p] * B[key(p)] y[p]   expand

A row is a token, or a pair of a token and an expert. Its key is slot * E + expert, or below 0 where it has no adapter:
then it adds nothing.

Shape suffixes: P rows, S slots, E experts (1 for matrices of all tokens), R rank, K columns, N rows of a matrix.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from oscine.ops.interface import Entries, ExpertTokens, LowRankRows


@dataclass(frozen=True)
class Rows:
    """The rows of one product, and which factors each has."""

    keys_T: Tensor  # int32: slots of the adapters of tokens; below 0: none
    ids_P: Tensor | None = None  # of pairs: their experts, those of a token beside each other; None: rows are tokens
    experts: int = 1  # E
    order_P: Tensor | None = None  # int32: the rows sorted by key, those without one last, where there is a table of
    blocks_B3: Tensor | None = None  # int32: key, first place in the order, and number of rows; 0: unused

    @property
    def size(self) -> int:
        return len(self.keys_T) if self.ids_P is None else len(self.ids_P)

    @property
    def per_token(self) -> int:
        return self.size // len(self.keys_T) if len(self.keys_T) else 1

    @cached_property
    def keys_P(self) -> Tensor:  # noqa: N802
        """int32."""
        if self.ids_P is None:
            return self.keys_T
        slots_P = self.keys_T.repeat_interleave(self.per_token)
        return torch.where(slots_P < 0, -1, slots_P * self.experts + self.ids_P).int()


class Norm(NamedTuple):
    """x is divided by the root of its mean square, over `width` columns."""

    squares_TS: Tensor  # sums of parts
    eps: float
    width: int

    def of(self, y: Tensor) -> Tensor:
        """Products y of x, as they are of x after the norm."""
        return y * torch.rsqrt(self.squares_TS.sum(1, keepdim=True) / self.width + self.eps)


class Backend(Protocol):
    """The products of this module, or kernels for a GPU."""

    def rows(self, keys_T: Tensor, num_slots: int, ids_TK: Tensor | None = None, experts: int = 1) -> Rows:
        """Of tokens, or of their pairs with experts. Keys are below num_slots."""
        ...

    def shrink(self, x: Tensor, rows: Rows, into: Tensor, segments: int) -> Tensor: ...

    def shrink_entries(
        self, tokens: ExpertTokens, entries: Entries, keys_T: Tensor, into: Tensor, out_of: Tensor, *, first: bool
    ) -> LowRankRows:
        """The first product of pairs in entries. into [S, E, R, K].

        first: tokens have a row each, and a kernel that is launched next may read what is older than this call without
        waiting (gdc_wait). Else each pair has a row, in the order of the entries.
        """
        ...

    def expand(
        self,
        y: Tensor,
        rows: Rows,
        out_of: Tensor,
        out: Tensor,
        *,
        adds: bool,
        ends: tuple[int, ...] = (),
        norm: Norm | None = None,
    ) -> None: ...

    def through(
        self,
        tokens: Tensor,
        rows: Rows,
        into: Tensor,
        out_of: Tensor,
        out_TKN: Tensor,
        *,
        adds: bool,
        weights_P: Tensor | None = None,
    ) -> None: ...


class Reference:
    """A Backend in plain torch. It waits for values of the device."""

    def rows(self, keys_T: Tensor, num_slots: int, ids_TK: Tensor | None = None, experts: int = 1) -> Rows:
        return Rows(keys_T, None if ids_TK is None else ids_TK.flatten(), experts)

    def shrink(self, x: Tensor, rows: Rows, into: Tensor, segments: int) -> Tensor:
        """x [T, K], or [P, K]; into [S, (E,) segments * R, K]. Returns float32 [P, segments * R].

        segments: independent parts of the result.
        """
        per_token = rows.size // len(x) if len(x) else 1
        y = torch.zeros(rows.size, into.shape[-2], dtype=torch.float32, device=x.device)
        for key, chosen in _groups(rows.keys_P):
            factors = _of_key(into, key)
            y[chosen] = x[chosen // per_token].float() @ factors.float().T
        return y

    def shrink_entries(
        self, tokens: ExpertTokens, entries: Entries, keys_T: Tensor, into: Tensor, out_of: Tensor, *, first: bool
    ) -> LowRankRows:
        slots, rank = len(into), into.shape[-2]
        x = _unplaned(tokens.rows) if tokens.rows.dim() == 3 else tokens.rows.float()
        most, per_token = min(slots, entries.rows), entries.pairs // len(keys_T)
        values = into.new_zeros(most, entries.pairs, entries.planes, rank)
        lists = torch.zeros(entries.most, 1 + most, dtype=torch.int32)
        order = range(entries.pairs) if entries.order_P is None else entries.order_P.tolist()
        for entry, (expert, start, number) in enumerate(found_in(entries)):
            own = [int(keys_T[pair // per_token]) for pair in order[start : start + number]]
            found = sorted({*own} - {-1}, reverse=True)
            lists[entry, 0] = len(found)
            for j, slot in enumerate(found):
                lists[entry, 1 + j] = slot
                for row in (start + i for i in range(number) if own[i] == slot):
                    at = order[row] // per_token if first else row
                    values[j, row, 0] = (x[at] @ into[slot, expert].float().T / tokens.factor).to(into.dtype)
        return LowRankRows(values, lists.to(keys_T.device), out_of)

    def expand(
        self,
        y: Tensor,
        rows: Rows,
        out_of: Tensor,
        out: Tensor,
        *,
        adds: bool,
        ends: tuple[int, ...] = (),
        norm: Norm | None = None,
    ) -> None:
        """Adds to, or writes, the first N columns of `out` [P, ...]. out_of [S, (E,) N, R].

        ends: of the parts of N, each of which reads its own R columns of y.
        """
        num_rows, rank = out_of.shape[-2:]
        target = out.flatten(1)[:, :num_rows]
        if not adds:
            target.zero_()
        y = y if norm is None else norm.of(y)
        for key, chosen in _groups(rows.keys_P):
            factors, start = _of_key(out_of, key).float(), 0
            for part, end in enumerate(ends or (num_rows,)):
                own = y[chosen, part * rank : (part + 1) * rank] @ factors[start:end].T
                target[chosen, start:end] = (target[chosen, start:end].float() + own).to(out.dtype)
                start = end

    def through(
        self,
        tokens: Tensor,
        rows: Rows,
        into: Tensor,
        out_of: Tensor,
        out_TKN: Tensor,
        *,
        adds: bool,
        weights_P: Tensor | None = None,
    ) -> None:
        """Both products of pairs: adds them to `out`, or writes them. tokens: [T, K], each for all of its pairs, or
        [P, K]."""
        y = self.shrink(tokens, rows, into, 1)
        if weights_P is not None:
            y = y * weights_P[:, None]
        self.expand(y, rows, out_of, out_TKN.view(rows.size, out_of.shape[-2]), adds=adds)


def found_in(entries: Entries) -> list[tuple[int, int, int]]:
    """(expert, first row, rows) of each entry. Waits for the device."""
    if entries.order_P is not None:
        words = entries.table.tolist()
        return [(words[4 * i], words[4 * i + 1], words[4 * i + 2]) for i in range(1, 1 + words[0])]
    chosen = entries.table.flatten()
    if chosen.is_floating_point():
        chosen = chosen.nan_to_num(-torch.inf, torch.inf, -torch.inf).sort(descending=True, stable=True).indices
    return [(expert, row, 1) for row, expert in enumerate(chosen[: entries.pairs].tolist())]


def _of_key(factors: Tensor, key: int) -> Tensor:
    """[S, (E,) ...] -> one matrix. Slots are parts of a larger memory, so to flatten them would copy all."""
    return factors[key] if factors.dim() == 3 else factors[divmod(key, factors.shape[1])]


def _groups(keys_P: Tensor) -> list[tuple[int, Tensor]]:
    return [(key, (keys_P == key).nonzero()[:, 0]) for key in sorted({*keys_P.tolist()}) if key >= 0]


def _unplaned(planes: Tensor) -> Tensor:
    """Values of rows that are two planes of FP8 (ops/planes.py), without their scales. [P, 2, K] -> float32 [P, K]."""
    i = torch.arange(planes.shape[2], device=planes.device)
    high, low = planes.float()[..., (i & ~15) | (i & 7) << 1 | (i >> 3) & 1].unbind(1)
    return high + low / 16
