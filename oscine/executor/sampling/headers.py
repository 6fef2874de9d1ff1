"""Constrains the headers of harmony messages to a grammar. Text is free, and costs almost nothing.

The grammar describes one header, from the marker that begins it to <|message|>. No matcher follows a sequence. In text,
the tokens of all rows of a step are compared with the markers at once. In a header, the allowed tokens are looked up by
the header's tokens so far, in a table that all sequences of one grammar share.

In text the host does not wait for the last token, so the step after a marker is launched before the marker is known.
The first token of such a header is therefore free. It is ignored if the grammar does not allow it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import count
from typing import NamedTuple

import numpy as np

from oscine.executor.batch.slots import IntArray, Rows
from oscine.executor.sampling.masks import GrammarCache
from oscine.executor.sampling.vocabulary import Markers
from oscine.ops.packed import REJECTED
from oscine.types import NewSequence

_MAX_RULES = 256  # rules that are kept
_MAX_BEGINS = 512  # beginnings of headers that are kept per rule, with their next tokens

_MAX_CHOSEN = 1024  # tokens in the rows of a CandidateSet

_Tokens = tuple[int, ...]


class CandidateSet(NamedTuple):
    """The allowed tokens of some rows of a step, if they are few. Suffixes as in ops/choose/few.py."""

    rows_K: IntArray
    ids_KA: IntArray

    @classmethod
    def of(cls, allowed: dict[int, IntArray]) -> "CandidateSet | None":
        """Made from the result of Headers.advance; None if the tokens are more than _MAX_CHOSEN."""
        longest = max(map(len, allowed.values()))
        if longest * len(allowed) > _MAX_CHOSEN:
            return None
        ids = [np.pad(ids, (0, longest - len(ids)), "edge") for ids in allowed.values()]
        return cls(np.array([*allowed], np.int64), np.stack(ids))


class HeaderRule:
    """A grammar of headers."""

    def __init__(self, grammars: GrammarCache, grammar: str) -> None:
        """Raises ValueError for a grammar that cannot be compiled."""
        self._matcher = grammars.matcher(grammar)
        self.next = lru_cache(_MAX_BEGINS)(self._find)

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

    def take(self, token: int, position: int, markers: Markers) -> None:
        """Reads one token."""
        if token == markers.message:
            self.header = None
        elif self.header is not None and token in self.rule.next(self.header):
            self.header = (*self.header, token)
        elif token in markers.begin:
            if self.header is None:
                self.ruled_from = position + 2
            self.header = (token,)

    def allowed(self, position: int) -> IntArray | None:
        """The tokens that may come at a position, ascending; None: all."""
        if self.header is None or position < self.ruled_from:
            return None
        return self.rule.next(self.header)


@dataclass(frozen=True, slots=True)
class _Step:
    """The tokens that a step sampled."""

    rows: Rows
    owners_N: IntArray  # as Headers._owners; 0 for rows without a rule and rows already read
    token_ids: Callable[[], IntArray]  # waits


class Headers:
    """The headers of the sequences that run. One thread calls everything."""

    def __init__(self, grammars: GrammarCache, num_slots: int) -> None:
        self._grammars = grammars
        self._markers = Markers(-1, -1, -1, -1)  # until the first rule: the vocabulary is read in the background
        self._rule = lru_cache(_MAX_RULES)(partial(HeaderRule, grammars))
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

    def sampled(self, rows: Rows, token_ids: Callable[[], IntArray]) -> None:
        """Notes that a step samples tokens in these rows; `token_ids` waits for them."""
        owners_N = self._owners[rows.slots_N]
        if owners_N.any():
            self._steps.append(_Step(rows, owners_N, token_ids))

    def advance(self, rows: Rows) -> dict[int, IntArray]:
        """The allowed tokens by row, ascending; unconstrained rows are left out.

        Waits for the tokens that were sampled last if one of the slots is in a header, or if there are drafts.
        """
        while len(self._steps) > 1 or (self._steps and (rows.have_drafts or self._steps[0].rows.have_drafts)):
            self._see(self._steps.popleft(), in_text=True)
        slots_N = rows.slots_N
        has_rule_N = self._owners[slots_N] > 0
        if not has_rule_N.any():
            return {}
        if rows.have_drafts:
            begins_N = (rows.places_N > 0) & self._markers.among(rows.drafts()) & has_rule_N
            due_N = np.isin(slots_N, slots_N[begins_N | self._in_header[slots_N]])
        else:
            due_N = self._in_header[slots_N]
        if not due_N.any():
            return {}
        for step in self._steps:
            self._see(step, in_text=False)
        return self._allowed(rows, due_N.nonzero()[0].tolist())

    def _allowed(self, rows: Rows, due: list[int]) -> dict[int, IntArray]:
        positions, drafts = rows.positions().tolist(), rows.drafts().tolist()
        found: dict[int, IntArray] = {}
        for row in due:
            if rows.places_N[row] == 0:
                sequence = replace(self._sequences[int(rows.slots_N[row])])  # as it will be after the drafts
            else:
                sequence.take(drafts[row], positions[row] - 1, self._markers)
            allowed = sequence.allowed(positions[row])
            if allowed is not None:
                found[row] = allowed
        return found

    def _see(self, step: _Step, *, in_text: bool) -> None:
        """Reads the tokens that a step sampled for sequences in a header; with `in_text` also the markers in text."""
        slots_N = step.rows.slots_N
        in_header_N = self._in_header[slots_N]
        if not (in_text or in_header_N.any()):
            return
        ids_N = step.token_ids()
        due_N = in_header_N | self._markers.among(ids_N) if in_text else in_header_N
        if not due_N.any():
            return
        if step.rows.have_drafts:
            due_N = np.isin(slots_N, slots_N[due_N])
        due_N &= (step.owners_N != 0) & (step.owners_N == self._owners[slots_N])
        positions_N = step.rows.positions()
        for row in due_N.nonzero()[0].tolist():
            if ids_N[row] != REJECTED:
                self._take(int(slots_N[row]), int(ids_N[row]), int(positions_N[row]))
        step.owners_N[due_N] = 0

    def _take_all(self, slot: int, token_ids: IntArray, position: int) -> None:
        """Reads the tokens of a slot from a position on."""
        marked = self._markers.among(token_ids).nonzero()[0]
        i = 0
        while i < len(token_ids):
            self._take(slot, int(token_ids[i]), position + i)
            later = marked[np.searchsorted(marked, i + 1) :]
            i = i + 1 if self._in_header[slot] else int(later[0]) if len(later) else len(token_ids)

    def _take(self, slot: int, token: int, position: int) -> None:
        sequence = self._sequences[slot]
        sequence.take(token, position, self._markers)
        self._in_header[slot] = sequence.header is not None


def _last(token_ids: Sequence[int], token: int, end: int) -> int:
    """The last index of a token before `end`; `end` if there is none."""
    return next((i for i in range(end - 1, -1, -1) if token_ids[i] == token), end)
