"""Sampling parameters of the running sequences, and what a step samples with them.

Greedy rows cost an argmax. One row with penalties or log-probabilities makes all rows sampled with it pay for them. The
arithmetic itself is an op. Nothing here waits for the device. Suffixes as in ops/interface.py.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oscine.executor.batch.copies import upload, upload_columns
from oscine.executor.batch.slots import ColumnArray, IntArray, Rows
from oscine.executor.kv.memory import LOGITS_AT_ONCE, SAMPLED_AT_ONCE
from oscine.executor.sampling.headers import CandidateSet
from oscine.executor.sampling.logit_changes import LogitChanges
from oscine.executor.sampling.logprobs import joined
from oscine.ops.interface import Sampled, SamplingBatch
from oscine.ops.sample.noise import gumbel_of
from oscine.types import NewSequence

_INTEGERS = ("top_k", "seed")
_FLOATS = ("temperature", "top_p", "min_p")

# (x_KH, few_KA, temperature_K, noise_KA) -> token ids_K, as in ops/choose/few.py
ChooseFew = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class AllowedTokens(NamedTuple):
    """The tokens that grammars allow in the rows of a step."""

    masks_KW: Tensor  # as SamplingBatch.allowed_KW
    row_N: ColumnArray  # as SamplingBatch.allowed_row_N


class Sampler:
    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device, sample: Callable[[Tensor, SamplingBatch], Sampled]
    ) -> None:
        self._device, self._sample = device, sample
        self._integers = np.zeros((len(_INTEGERS), num_slots), np.int64)
        self._floats = np.zeros((len(_FLOATS), num_slots), np.float32)
        self._temperature: NDArray[np.float32] = self._floats[_FLOATS.index("temperature")]  # a view
        self._truncated = np.zeros(num_slots, np.bool_)
        self._num_logprobs = np.full(num_slots, -1, np.int64)  # -1: none
        self._changes = LogitChanges(num_slots, vocab_size, device)
        self._no_floats = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self._no_integers = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def assign(self, new: NewSequence) -> None:
        slot, sampling = new.slot, new.sampling
        self._integers[:, slot] = [getattr(sampling, name) for name in _INTEGERS]
        self._floats[:, slot] = [getattr(sampling, name) for name in _FLOATS]
        shortens = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
        self._truncated[slot] = shortens and sampling.temperature > 0
        self._num_logprobs[slot] = -1 if sampling.logprobs is None else sampling.logprobs
        self._changes.assign(new)

    def wants_argmax(self, slots_N: IntArray) -> bool:
        """Whether these rows need only the most probable token."""
        return not (self._temperature[slots_N].any() or self._wants_logits(slots_N))

    def _wants_logits(self, slots_N: IntArray) -> bool:
        """Whether a row asks for log-probabilities, or changes logits."""
        special = self._changes.slots
        return bool((self._num_logprobs[slots_N] >= 0).any() or (special and not special.isdisjoint(slots_N.tolist())))

    def num_logprobs(self, slots_N: IntArray) -> list[int]:
        """How many most probable tokens each row asked for; -1 where it asked for no log-probabilities."""
        wanted: list[int] = self._num_logprobs[slots_N].tolist()
        return wanted

    def greedy(self, num_rows: int) -> SamplingBatch:
        """Works on any rows, so also in a graph. Its columns are not read, and may have fewer rows."""
        floats, integers = self._no_floats[:num_rows], self._no_integers[:num_rows]
        return SamplingBatch(floats, integers, floats, floats, integers, integers, greedy=True, truncated=False)

    def is_plain(self, slots_N: IntArray) -> bool:
        """Whether all rows use at most temperature, and all are sampled at once."""
        if self._wants_logits(slots_N):
            return False
        sampled_at_once = len(slots_N) <= SAMPLED_AT_ONCE and not self._truncated[slots_N].any()
        return sampled_at_once or not self._temperature[slots_N].any()

    def plain(
        self, slots_N: IntArray, positions: Callable[[], Tensor], allowed: AllowedTokens | None = None
    ) -> SamplingBatch:
        """The sampling parameters of plain rows, for a chooser. `positions`: int64 [N], of the tokens to be sampled."""
        is_greedy = not self._temperature[slots_N].any()
        batch = self.greedy(len(slots_N)) if is_greedy else self._batch(slots_N, positions(), None)
        return batch if allowed is None else self._restricted(batch, allowed.masks_KW, allowed.row_N)

    def narrowed(self, ids_N: Tensor, x_NH: Tensor, choose_few: ChooseFew, rows: Rows, few: CandidateSet) -> Tensor:
        """The tokens of plain rows. Rows in `few` are chosen among its tokens."""
        rows_K, few_KA = upload(few.rows_K, self._device), upload(few.ids_KA, self._device)
        if few_KA.shape[1] == 1:
            return ids_N.index_copy(0, rows_K, few_KA[:, 0])
        slots_K = rows.slots_N[few.rows_K]
        seed_K = torch.from_numpy(self._integers[_INTEGERS.index("seed"), slots_K])
        position_K = torch.from_numpy(rows.positions()[few.rows_K])
        noise_KA = gumbel_of(seed_K, position_K, torch.from_numpy(few.ids_KA))
        temperature_K = upload(self._temperature[slots_K], self._device)
        noise_KA = upload(noise_KA.numpy(), self._device)
        return ids_N.index_copy(0, rows_K, choose_few(x_NH[rows_K], few_KA, temperature_K, noise_KA))

    def sample(
        self,
        logits_of: Callable[[slice], Tensor],
        rows: Rows,
        token_ids_N: Tensor,
        positions_N: Tensor,
        allowed: AllowedTokens | None = None,
    ) -> Sampled:
        """One token per row; log-probabilities if any row asked for them.

        `logits_of`: float32 [n, V] of some rows; it is called in order. `token_ids_N`: what the rows computed.
        `positions_N`: int64, of the tokens to be sampled.
        """
        most_logprobs = int(self._num_logprobs[rows.slots_N].max())
        num_logprobs = most_logprobs if most_logprobs >= 0 else None

        def batch_of(part: slice) -> SamplingBatch:
            batch = self._batch(rows.slots_N[part], positions_N[part], num_logprobs)
            changes = self._changes.fields(rows, part, token_ids_N)
            batch = replace(batch, **changes)  # type: ignore[arg-type]
            if allowed is not None and (allowed.row_N[part] >= 0).any():
                batch = self._restricted(batch, allowed.masks_KW, allowed.row_N[part])
            return batch

        parts, count = [], len(rows.slots_N)
        for first in range(0, count, LOGITS_AT_ONCE):
            end = min(first + LOGITS_AT_ONCE, count)
            logits_NV = logits_of(slice(first, end))
            for start in range(first, end, SAMPLED_AT_ONCE):
                part = slice(start, min(start + SAMPLED_AT_ONCE, end))
                parts.append(self._sample(logits_NV[start - first : part.stop - first], batch_of(part)))
            del logits_NV  # before there are others
        return joined(parts)

    def count(self, slots_N: IntArray, token_ids_N: Tensor) -> None:
        """Adds tokens to the histories of sequences with penalties; negative ids are none."""
        self._changes.count(slots_N, token_ids_N)

    def _batch(self, slots_N: IntArray, positions_N: Tensor, num_logprobs: int | None) -> SamplingBatch:
        top_k_N, seed_N = upload_columns(self._integers[:, slots_N], self._device)
        temperature_N, top_p_N, min_p_N = upload_columns(self._floats[:, slots_N], self._device)
        return SamplingBatch(
            temperature_N=temperature_N,
            top_k_N=top_k_N,
            top_p_N=top_p_N,
            min_p_N=min_p_N,
            seed_N=seed_N,
            position_N=positions_N,
            greedy=not self._temperature[slots_N].any(),
            truncated=bool(self._truncated[slots_N].any()),
            num_logprobs=num_logprobs,
        )

    def _restricted(self, batch: SamplingBatch, masks_KW: Tensor, row_N: ColumnArray) -> SamplingBatch:
        return replace(batch, allowed_KW=masks_KW, allowed_row_N=upload(row_N, self._device))
