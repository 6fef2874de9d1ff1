"""Constrains the headers of harmony messages to a grammar. Text is free, and costs almost nothing.

The grammar describes one header, from the marker that begins it to <|message|>. No matcher follows a sequence. In text,
the tokens of all rows of a step are compared with the markers at once. In a header, the allowed tokens are looked up by
the header's tokens so far, in a table that all sequences of one grammar share.

In text the host does not wait for the last token, so the step after a marker is launched before the marker is known.
The first token of such a header is therefore free. It is ignored if the grammar does not allow it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count
from typing import NamedTuple

import numpy as np

from oscine.executor.masks import GrammarCache, Markers
from oscine.executor.slots import IntArray
from oscine.types import NewSequence

_MOST_RULES = 256  # rules that are kept
_MOST_BEGINS = 512  # beginnings of headers that are kept per rule, with their next tokens

_MOST_CHOSEN = 1024  # tokens in the rows of a Few

_Tokens = tuple[int, ...]


class Few(NamedTuple):
    """The allowed tokens of some rows of a step, if they are few. Suffixes as in ops/choose/few.py."""

    rows_K: IntArray
    ids_KA: IntArray

    @classmethod
    def of(cls, allowed: dict[int, IntArray]) -> "Few | None":
        """Made from the result of Headers.advance; None if the tokens are more than _MOST_CHOSEN."""
        longest = max(map(len, allowed.values()))
        if longest * len(allowed) > _MOST_CHOSEN:
            return None
        ids = [np.pad(ids, (0, longest - len(ids)), "edge") for ids in allowed.values()]
        return cls(np.array([*allowed], np.int64), np.stack(ids))


class HeaderRule:
    """A grammar of headers."""

    def __init__(self, grammars: GrammarCache, grammar: str) -> None:
        """Raises ValueError for a grammar that cannot be compiled."""
        self._matcher = grammars.matcher(grammar)
        self.next = lru_cache(_MOST_BEGINS)(self._find)

    def _find(self, begin: _Tokens) -> IntArray:
        """The tokens that may follow the beginning of a header, ascending."""
        self._matcher.reset()
        self._matcher.consume_tokens([*begin])
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        bytes_ = mask.nonzero()[0]  # few of many
        row, bit = np.unpackbits(mask[bytes_, None], axis=1, bitorder="little").nonzero()
        return 8 * bytes_[row] + bit


@dataclass(slots=True)
class _Sequence:
    rule: HeaderRule
    header: _Tokens | None = None  # its tokens so far; None in text
    ruled_from: int = 0  # first constrained position: the token after a marker is free


@dataclass(frozen=True, slots=True)
class _Step:
    """The tokens that a step sampled."""

    slots_M: IntArray
    positions_M: IntArray
    owners_M: IntArray  # as Headers._owners; 0 for rows without a rule and rows already read
    token_ids: Callable[[], list[int]]  # waits


class Headers:
    """The headers of the sequences that run. One thread calls everything."""

    def __init__(self, grammars: GrammarCache, num_slots: int) -> None:
        self._grammars = grammars
        self._markers = Markers(-1, -1, -1, -1)  # until the first rule: the vocabulary is read in the background
        self._rule = lru_cache(_MOST_RULES)(partial(HeaderRule, grammars))
        self._sequences: dict[int, _Sequence] = {}  # by slot
        self._errors: dict[int, str] = {}  # by slot
        self._owners = np.zeros(num_slots, np.int64)  # by slot: a number for each sequence; 0 without a rule
        self._in_header = np.zeros(num_slots, np.bool_)
        self._steps: deque[_Step] = deque()
        self._numbers = count(1)

    def assign(self, new: NewSequence) -> None:
        """A sequence takes a slot, with or without a rule, and perhaps with tokens that it has generated.

        The prompt ends in the header of its last message, or in the text after it. Its last tokens say which.
        """
        slot, grammar = new.slot, new.sampling.headers
        self._sequences.pop(slot, None)
        self._errors.pop(slot, None)
        self._owners[slot], self._in_header[slot] = 0, False
        if grammar is None or new.sampling.grammar is not None:
            return
        try:
            self._sequences[slot] = _Sequence(self._rule(grammar))
        except ValueError as error:
            self._errors[slot] = f"the grammar of headers cannot be compiled: {error}"
            return
        self._owners[slot] = next(self._numbers)
        self._markers = self._grammars.markers
        start = _last(new.token_ids, self._markers.start, new.num_prompt_tokens)
        self._take_all(slot, np.array(new.token_ids[start:], np.int64), start)

    def errors(self, slots: Iterable[int]) -> dict[int, str]:
        """Why sequences of these slots cannot go on."""
        return {slot: self._errors[slot] for slot in slots if slot in self._errors} if self._errors else {}

    def sampled(self, slots_M: IntArray, positions_M: IntArray, token_ids: Callable[[], list[int]]) -> None:
        """Notes that a step samples tokens for these slots and positions; `token_ids` waits for them."""
        owners_M = self._owners[slots_M]
        if owners_M.any():
            self._steps.append(_Step(slots_M, positions_M, owners_M, token_ids))

    def advance(self, slots_N: IntArray, positions_N: IntArray) -> dict[int, IntArray]:
        """The allowed tokens by row, ascending; unconstrained rows are left out.

        Waits for the tokens that were sampled last if one of the slots is in a header.
        """
        while len(self._steps) > 1:
            self._see(self._steps.popleft(), in_text=True)
        if not self._in_header[slots_N].any():
            return {}
        for step in self._steps:
            self._see(step, in_text=False)
        found: dict[int, IntArray] = {}
        for row in self._in_header[slots_N].nonzero()[0].tolist():
            sequence = self._sequences[int(slots_N[row])]
            if sequence.header is not None and positions_N[row] >= sequence.ruled_from:
                found[row] = sequence.rule.next(sequence.header)
        return found

    def _see(self, step: _Step, *, in_text: bool) -> None:
        """Reads the tokens that a step sampled for sequences in a header; with `in_text` also the markers in text."""
        in_header_M = self._in_header[step.slots_M]
        if not (in_text or in_header_M.any()):
            return
        ids_M = np.array(step.token_ids(), np.int64)
        due_M = in_header_M | self._markers.among(ids_M) if in_text else in_header_M
        if not due_M.any():
            return
        due_M &= (step.owners_M != 0) & (step.owners_M == self._owners[step.slots_M])
        for row in due_M.nonzero()[0].tolist():
            self._take(int(step.slots_M[row]), int(ids_M[row]), int(step.positions_M[row]))
        step.owners_M[due_M] = 0

    def _take_all(self, slot: int, token_ids: IntArray, position: int) -> None:
        """Reads the tokens of a slot from a position on."""
        marked = self._markers.among(token_ids).nonzero()[0]
        i = 0
        while i < len(token_ids):
            self._take(slot, int(token_ids[i]), position + i)
            later = marked[np.searchsorted(marked, i + 1) :]
            i = i + 1 if self._in_header[slot] else int(later[0]) if len(later) else len(token_ids)

    def _take(self, slot: int, token: int, position: int) -> None:
        markers, sequence = self._markers, self._sequences[slot]
        header = sequence.header
        if token == markers.message:
            sequence.header = None
        elif header is not None and token in sequence.rule.next(header):
            sequence.header = (*header, token)
        elif token in markers.begin:
            sequence.header = (token,)
            if header is None:
                sequence.ruled_from = position + 2
        self._in_header[slot] = sequence.header is not None


def _last(token_ids: Sequence[int], token: int, end: int) -> int:
    """The last index of a token before `end`; `end` if there is none."""
    return next((i for i in range(end - 1, -1, -1) if token_ids[i] == token), end)
