"""Prompt lookup: drafts are what followed the last tokens where they occurred before.

The last n tokens of a sequence are looked up in its own prompt and answer, then in recent answers of other sequences,
for a few lengths n. Tokens that a grammar forces are always drafts, and the lookup continues after them. The longest n
decides, then the own text, then the latest occurrence. There are only as many drafts as are likely to be accepted: how
often they were right is counted by cache salt, by n, by the kind of text, and by their place. All of it is
deterministic: every rank of a model makes the same drafts from the same calls.

A run of n tokens is found by its hash, and compared before it is used. The tokens that are known at the first lookup
are indexed at once, as sorted keys (hash, end): 8 bytes per token and length. Later tokens are added to a dict, one by
one. So the cost of a lookup does not depend on the length of the text, and a sequence without a lookup costs nothing.
"""

from array import array
from bisect import bisect_left
from functools import lru_cache
from itertools import takewhile
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from oscine.types import NewSequence, SamplingParams

POOL_TOKENS = 1 << 16  # in each of the two halves of the pool
LEAST_CHANCE = 0.3  # of a draft to be accepted: about what its row costs, in plain steps
_RATE_AT_START = 0.7
_RATE_STEP = 0.1  # weight of the latest draft in a rate
_MAX_SALTS = 1024  # with rates; of more, the salt used longest ago starts again
_PLACES = 4  # places in a draft with a rate of their own; later places share the last rate
_END_BITS = 24  # of a sorted key: where the run ends
_END_MASK = (1 << _END_BITS) - 1
_MASK = (1 << 39) - 1  # of a hash, so that a key is a positive int64
_BASE = 0x5E_3779_B97F
_NO_RUN = -1  # no hash
_NOTHING = NewSequence(0, [], 0, 0, [], SamplingParams(0))  # in a slot that no sequence has had
_BREAK = -1  # between the answers of the pool; no run has it

Tokens: TypeAlias = "array[int]"
Runs = dict[int, int]  # the hash of a run -> where it ended last
Rates = list[float]  # by place: how often a draft is right if all before it are
RatesByLevel = list[tuple[Rates, Rates]]  # by length: of drafts from answers of others, and from the own text


def run_lengths(shortest: int, longest: int) -> tuple[int, ...]:
    """The lengths that are looked up: each twice the one before."""
    return tuple(shortest << i for i in range(longest.bit_length()) if shortest << i <= longest)


def _hashes(tokens: Tokens, n: int) -> NDArray[np.int64]:
    """Of all runs of n tokens, by their first token: a polynomial modulo a power of two."""
    values = np.array(tokens, np.int64)
    count = max(0, len(values) - n + 1)
    hashes = np.zeros(count, np.int64)
    for i in range(n):
        hashes = hashes * _BASE + values[i : i + count]  # wraps, which leaves the lower bits right
    return hashes & _MASK


def _sorted_keys(tokens: Tokens, n: int) -> Tokens:
    """(hash, end) of all runs of n tokens."""
    hashes = _hashes(tokens, n)
    return array("q", np.sort(hashes << _END_BITS | np.arange(n, n + len(hashes))).tobytes())


class _Text:
    """The tokens of one sequence. Every run is indexed that ends before the last token."""

    def __init__(self, new: NewSequence, rates: RatesByLevel, lengths: tuple[int, ...]) -> None:
        self.tokens: Tokens = array("i", new.token_ids)
        self.num_prompt_tokens, self.shares, self.rates = new.num_prompt_tokens, not new.cache_salt, rates
        self._stop_token_ids = frozenset(new.sampling.stop_token_ids)
        self._has_ended = False
        self.runs_at_end = [_NO_RUN for _ in lengths]  # hashes of the last n tokens, per length
        self._prefixes: list[int] = []  # hashes of the text up to each token that is indexed one by one
        self._num_indexed = self._num_sorted = 0
        self._sorted: list[Tokens | None] = [None for _ in lengths]
        self._added: list[Runs] = [{} for _ in lengths]
        self._levels = [(n, pow(_BASE, n, _MASK + 1), added) for n, added in zip(lengths, self._added, strict=True)]

    @property
    def was_looked_up(self) -> bool:
        return bool(self._prefixes)

    def extend(self, token_ids: list[int]) -> list[int]:
        """Appends tokens up to the one that ends the sequence. Returns those.

        A step samples more if it was launched before the end was known, or if it verifies drafts behind the end.
        """
        count = next((i for i, token in enumerate(token_ids, 1) if token in self._stop_token_ids), None)
        taken = [] if self._has_ended else token_ids[:count]
        self._has_ended |= count is not None
        self.tokens.extend(taken)
        return taken

    def index(self) -> None:
        """Takes in the tokens that are new since the last call."""
        tokens, prefixes, levels, runs_at_end, mask = self.tokens, self._prefixes, self._levels, self.runs_at_end, _MASK
        if not prefixes:
            self._begin()
        prefix = prefixes[-1]
        for i in range(self._num_indexed, len(tokens)):
            prefix = (prefix * _BASE + tokens[i]) & mask
            prefixes.append(prefix)
            for level, (n, power, added) in enumerate(levels):
                added[runs_at_end[level]] = i
                runs_at_end[level] = (prefix - prefixes[-1 - n] * power) & mask
        self._num_indexed = len(tokens)

    def _begin(self) -> None:
        """All but the last token are left to the sorted keys."""
        self._num_indexed = self._num_sorted = max(0, len(self.tokens) - 1)
        longest = self._levels[-1][0]
        prefixes = self._prefixes
        prefixes += range(1 << 30, (1 << 30) + longest)  # before the text: the runs that begin there are never found
        for token in self.tokens[max(0, self._num_sorted - longest) : self._num_sorted]:
            prefixes.append((prefixes[-1] * _BASE + token) & _MASK)

    def last(self, n: int, forced: list[int]) -> Tokens:
        """The last n tokens of the text followed by `forced`; all of them if there are fewer."""
        return (self.tokens[-n:] + array("i", forced))[-n:] if forced else self.tokens[-n:]

    def last_run(self, level: int, forced: list[int]) -> int:
        """The hash of the last tokens, as many as the level's length."""
        if not forced:
            return self.runs_at_end[level]
        run, n = 0, self._levels[level][0]
        for token in self.last(n, forced):
            run = (run * _BASE + token) & _MASK
        return run

    def last_end(self, level: int, run: int) -> int:
        """Where a run of the level's length ended last; 0: nowhere."""
        end = self._added[level].get(run)
        if end is not None:
            return end
        keys = self._sorted[level]
        if keys is None:
            keys = self._sorted[level] = _sorted_keys(self.tokens[: self._num_sorted], self._levels[level][0])
        at = bisect_left(keys, (run + 1) << _END_BITS)
        key = keys[at - 1] if at else -1
        return key & _END_MASK if key >> _END_BITS == run else 0

    def after(self, end: int, most: int, forced: list[int]) -> list[int]:
        """What followed a run. Past the end of the text come `forced`; then the text is assumed to repeat itself."""
        drafts = self.tokens[end : end + most].tolist()
        return drafts if len(drafts) == most else ((drafts + forced) * most)[:most]


class _Answers:
    """Answers one after the other, and where runs ended in them last."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.tokens: Tokens = array("i")
        self._runs: list[tuple[int, Runs]] = [(n, {}) for n in lengths]

    def add(self, answer: Tokens) -> None:
        start = len(self.tokens)
        for n, runs in self._runs:
            hashes = _hashes(answer[:-1], n).tolist()  # a run at the end has nothing after it
            runs.update(zip(hashes, range(start + n, start + n + len(hashes)), strict=True))
        self.tokens += answer
        self.tokens.append(_BREAK)

    def last_end(self, level: int, run: int) -> int:
        return self._runs[level][1].get(run, 0)

    def after(self, end: int, most: int, forced: list[int]) -> list[int]:
        return list(takewhile(_BREAK.__ne__, self.tokens[end : end + most]))


class _Expected(NamedTuple):
    """Tokens that lookup found after the forced ones, also those too unlikely to be drafted."""

    start: int  # forced tokens before them
    rates: Rates
    drafts: list[int]


def _learn(rates: Rates, drafts: list[int], token_ids: list[int]) -> None:
    """Compares drafts with what came, up to the first that is wrong."""
    for i, (draft, token) in enumerate(zip(drafts, token_ids, strict=False)):
        place = min(i, _PLACES - 1)
        rates[place] += _RATE_STEP * ((draft == token) - rates[place])
        if draft != token:
            return


def _num_likely(rates: Rates, most: int) -> int:
    """How many drafts have the least chance to be accepted."""
    chance, count = 1.0, 0
    while count < most and (chance := chance * rates[min(count, _PLACES - 1)]) >= LEAST_CHANCE:
        count += 1
    return count


class PromptLookup:
    """Drafts for every slot: a HostDrafter.

    Sequences without a cache salt share their answers. A right draft makes an answer come sooner, so a client that
    shares could find out by timing which tokens recent answers had. How often drafts are right is learnt per salt, for
    the same reason.
    """

    def __init__(self, num_slots: int, lengths: tuple[int, ...] = (2, 4, 8), pool_tokens: int = POOL_TOKENS) -> None:
        """`lengths`: of the runs that are looked up, in rising order."""
        self._lengths, self._pool_tokens = lengths, pool_tokens
        self._texts = [_Text(_NOTHING, [], lengths)] * num_slots
        self._new, self._old = _Answers(lengths), _Answers(lengths)
        self._rates_of = lru_cache(_MAX_SALTS)(self._first_rates)
        self._expected: dict[int, _Expected] = {}  # by slot

    def _first_rates(self, salt: str) -> RatesByLevel:
        return [([_RATE_AT_START] * _PLACES, [_RATE_AT_START] * _PLACES) for _ in self._lengths]

    def assign(self, new: NewSequence) -> None:
        """A sequence takes its slot. The answer that was there goes to the pool."""
        slot, before = new.slot, self._texts[new.slot]
        if before.shares and before.was_looked_up:
            self._keep(before.tokens[before.num_prompt_tokens :])
        self._texts[slot] = _Text(new, self._rates_of(new.cache_salt), self._lengths)
        self._expected.pop(slot, None)

    def keeps(self, slot: int) -> bool:
        """Whether the answer in the slot goes to the pool, or may still show how good drafts are."""
        text = self._texts[slot]
        return slot in self._expected or (text.shares and text.was_looked_up)

    def append(self, slot: int, token_ids: list[int]) -> None:
        """The sequence has got these tokens."""
        token_ids = self._texts[slot].extend(token_ids)
        expected = self._expected.pop(slot, None)
        if expected is not None:
            _learn(expected.rates, expected.drafts, token_ids[expected.start :])

    def propose(self, slot: int, most: int, forced: list[int]) -> list[int]:
        """Up to `most` drafts of the tokens that come next: those that are forced, then what followed them before."""
        text, most_likely = self._texts[slot], most - len(forced)
        text.index()
        found = self._find_longest(text, forced) if most_likely > 0 else None
        if found is None:
            return forced[:most]
        level, source, end = found
        rates, drafts = text.rates[level][source is text], source.after(end, most_likely, forced)
        self._expected[slot] = _Expected(len(forced), rates, drafts)
        return forced + drafts[: _num_likely(rates, most_likely)]

    def _find_longest(self, text: _Text, forced: list[int]) -> tuple[int, _Text | _Answers, int] | None:
        """As _find, for the longest run that occurred before, with its level."""
        shortest = self._find(text, 0, forced)
        if shortest is None:
            return None
        for level in range(len(self._lengths) - 1, 0, -1):
            found = self._find(text, level, forced)
            if found is not None:
                return level, *found
        return 0, *shortest

    def _find(self, text: _Text, level: int, forced: list[int]) -> tuple[_Text | _Answers, int] | None:
        """Where the last tokens of a text occurred before: the first source that has them, and where they end there."""
        run, n = text.last_run(level, forced), self._lengths[level]
        for source in (text, self._new, self._old) if text.shares else (text,):
            end = source.last_end(level, run)
            if end >= n and source.tokens[end - n : end] == text.last(n, forced):
                return source, end
        return None

    def _keep(self, answer: Tokens) -> None:
        if len(self._new.tokens) + len(answer) > self._pool_tokens:
            self._new, self._old = _Answers(self._lengths), self._new
        self._new.add(answer[-self._pool_tokens :])
