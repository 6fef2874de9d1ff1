"""Which tokens a step may sample, where grammars and the headers of harmony restrict them: the seam of the runner."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from oscine.executor.batch.copies import staging
from oscine.executor.batch.slots import ColumnArray, IntArray, Rows
from oscine.executor.sampling.headers import CandidateSet, Headers
from oscine.executor.sampling.masks import Constraints, GrammarCache, mask_of
from oscine.types import NewSequence, SamplingParams


class Masks(NamedTuple):
    """The tokens that grammars allow in the rows of a step."""

    masks_KW: Tensor  # as SamplingBatch.allowed_KW, in memory of `staging`
    row_N: ColumnArray  # as SamplingBatch.allowed_row_N


class Rules(Protocol):
    """The rules of the sequences in the slots of one executor."""

    def ready(self, sampling: SamplingParams) -> bool:
        """Whether a sequence that is sampled so can be assigned without waiting. If not, asking makes it ready."""
        ...

    def assign(self, new: NewSequence) -> None:
        """A sequence takes a slot."""
        ...

    def allowed(self, rows: Rows, is_plain: Callable[[IntArray], bool]) -> Masks | CandidateSet | None:
        """The tokens that may come next: a few tokens if all rows are plain, else masks; None if all may come.

        Waits for the tokens of the step before this one. `is_plain`: of slots, as Sampler.is_plain.
        """
        ...

    def forced(self, slots: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        """The forced next tokens of each slot: those without an alternative, up to `most` per slot.

        Waits for the tokens of the step before this one.
        """
        ...

    def sampled(self, rows: Rows, token_ids: Callable[[], IntArray]) -> None:
        """A step samples a token in each of these rows. `token_ids` waits for them; REJECTED is none.

        From then on the positions of the rows are known.
        """
        ...

    def errors(self, slots: Sequence[int]) -> dict[int, str]:
        """Why sequences of these slots cannot go on."""
        ...


NewRules = Callable[[int, torch.device], Rules]  # of an executor with so many slots, on this device


def grammar_rules(tokenizer_file: Path | None, vocab_size: int, at_once: bool) -> NewRules:
    """Reads the vocabulary in the background: now if `at_once`, else when it is first needed."""
    return partial(GrammarRules, GrammarCache(tokenizer_file, vocab_size, at_once=at_once))


class OpenRules:
    """Rules of a rehearsal, which needs no vocabulary: with any grammar, each token may come."""

    def __init__(self, num_tokens: int, num_slots: int, device: torch.device) -> None:
        self._num_words, self._device = -(-num_tokens // 32), device
        self._is_masked = np.zeros(num_slots, np.bool_)

    def ready(self, sampling: SamplingParams) -> bool:
        return True

    def assign(self, new: NewSequence) -> None:
        self._is_masked[new.slot] = new.sampling.grammar is not None

    def allowed(self, rows: Rows, is_plain: Callable[[IntArray], bool]) -> Masks | None:
        is_masked_N = self._is_masked[rows.slots_N]
        if not is_masked_N.any():
            return None
        masks_KW = staging((int(is_masked_N.sum()), self._num_words), self._device)
        masks_KW.fill_(-1)
        row_N = np.where(is_masked_N, np.cumsum(is_masked_N) - 1, -1)
        return Masks(masks_KW, row_N.astype(np.int32))

    def forced(self, slots: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        return [[] for _ in slots]

    def sampled(self, rows: Rows, token_ids: Callable[[], IntArray]) -> None:
        pass

    def errors(self, slots: Sequence[int]) -> dict[int, str]:
        return {}


class GrammarRules:
    """Rules of this process's own grammars."""

    def __init__(self, grammars: GrammarCache, num_slots: int, device: torch.device) -> None:
        self._grammars, self._device = grammars, device
        self._constraints = Constraints(grammars)
        self._headers = Headers(grammars, num_slots)

    def ready(self, sampling: SamplingParams) -> bool:
        grammar = sampling.headers if sampling.grammar is None else sampling.grammar
        return grammar is None or self._grammars.ready(grammar)

    def assign(self, new: NewSequence) -> None:
        self._constraints.assign(new)
        self._headers.assign(new)

    def allowed(self, rows: Rows, is_plain: Callable[[IntArray], bool]) -> Masks | CandidateSet | None:
        rows_K, headers = self._constraints.advance(rows.slots_N), self._headers.advance(rows)
        few = CandidateSet.of(headers) if headers and not rows_K and is_plain(rows.slots_N) else None
        if few is not None or not (rows_K or headers):
            return few
        return self._masks(rows, rows_K, headers)

    def forced(self, slots: Sequence[int], most: Sequence[int]) -> list[list[int]]:
        return self._constraints.forced(slots, most)

    def sampled(self, rows: Rows, token_ids: Callable[[], IntArray]) -> None:
        self._constraints.sampled(rows.slots_N, token_ids)
        self._headers.sampled(rows, token_ids)

    def errors(self, slots: Sequence[int]) -> dict[int, str]:
        return self._constraints.errors(slots) | self._headers.errors(slots)

    def _masks(self, rows: Rows, rows_K: list[int], headers: dict[int, IntArray]) -> Masks:
        """The masks of rows with a grammar, and of rows in a header with their allowed tokens."""
        count, num_words = len(rows_K), self._grammars.num_words
        masks_KW = staging((count + len(headers), num_words), self._device)
        if rows_K:
            self._constraints.fill(rows, rows_K, masks_KW[:count].numpy())
        for i, ids in enumerate(headers.values(), count):
            masks_KW[i].numpy()[:] = mask_of(ids, num_words)
        row_N = np.full(len(rows.slots_N), -1, np.int32)
        row_N[[*rows_K, *headers]] = np.arange(len(masks_KW))
        return Masks(masks_KW, row_N)
