"""Drafts of prompt lookup against a slow search through all texts."""

import random
from itertools import accumulate
from operator import mul

import pytest

from oscine.extensions.speculation.lookup import LEAST_CHANCE, PromptLookup, run_lengths
from oscine.types import NewSequence, SamplingParams

STOP = 99


def new(tokens: list[int], num_prompt_tokens: int | None = None, *, salt: str = "", slot: int = 0) -> NewSequence:
    """A sequence that takes a slot; all its tokens are its prompt unless told otherwise."""
    sampling = SamplingParams(100, stop_token_ids=(STOP,))
    return NewSequence(slot, tokens, num_prompt_tokens or len(tokens), 0, [], sampling, cache_salt=salt)


class Oracle:
    """The same by definition: all runs of all texts are compared."""

    def __init__(self, num_slots: int, lengths: tuple[int, ...], pool_tokens: int) -> None:
        self.lengths = lengths
        self.texts: list[list[int]] = [[] for _ in range(num_slots)]
        self.num_prompt_tokens = [0] * num_slots
        self.salts = [""] * num_slots
        self.has_ended = [False] * num_slots
        self.was_looked_up = [False] * num_slots
        self.old: list[list[int]] = []
        self.new: list[list[int]] = []
        self.pool_tokens = pool_tokens
        # By salt, by length, and whether the text is the sequence's own.
        self.rates: dict[tuple[str, int, bool], list[float]] = {}
        self.found: dict[int, tuple[int, list[float], list[int]]] = {}

    def assign(self, new: NewSequence) -> None:
        slot = new.slot
        if not self.salts[slot] and self.was_looked_up[slot]:
            answer = self.texts[slot][self.num_prompt_tokens[slot] :]
            if sum(len(kept) + 1 for kept in self.new) + len(answer) > self.pool_tokens:
                self.old, self.new = self.new, []
            self.new.append(answer[-self.pool_tokens :])
        self.texts[slot], self.num_prompt_tokens[slot] = list(new.token_ids), new.num_prompt_tokens
        self.salts[slot], self.was_looked_up[slot], self.has_ended[slot] = new.cache_salt, False, False
        self.found.pop(slot, None)

    def append(self, slot: int, tokens: list[int]) -> None:
        tokens = [] if self.has_ended[slot] else tokens
        if STOP in tokens:
            tokens, self.has_ended[slot] = tokens[: tokens.index(STOP) + 1], True
        self.texts[slot] += tokens
        start, rates, drafts = self.found.pop(slot, (0, [], []))
        tokens = tokens[start:]
        for i in range(len(drafts)):
            if drafts[:i] == tokens[:i] and i < len(tokens):
                place = min(i, len(rates) - 1)
                rates[place] += 0.1 * ((drafts[i] == tokens[i]) - rates[place])

    def propose(self, slot: int, most: int, forced: list[int]) -> list[int]:
        self.was_looked_up[slot] = True
        known = len(self.texts[slot])
        text, most = [*self.texts[slot], *forced], most - len(forced)
        answers = [*reversed(self.new), *reversed(self.old)] if not self.salts[slot] else []
        for n in reversed([n for n in self.lengths if n <= len(text) and most > 0]):
            for source in (text, *answers):
                for end in range((known if source is text else len(source)) - 1, n - 1, -1):
                    if source[end - n : end] == text[-n:]:
                        period = source[end:]
                        drafts = (period * most if source is text else period)[:most]
                        rates = self.rates.setdefault((self.salts[slot], n, source is text), [0.7] * 4)
                        self.found[slot] = len(forced), rates, drafts
                        chances = accumulate((rates[min(i, 3)] for i in range(len(drafts))), mul)
                        return forced + drafts[: sum(chance >= LEAST_CHANCE for chance in chances)]
        return forced[: len(forced) + min(0, most)]


@pytest.mark.parametrize("seed", range(12))
def test_drafts_are_those_of_a_slow_search(seed: int) -> None:
    draw = random.Random(seed)
    num_slots, pool_tokens, vocabulary = draw.choice([1, 3]), draw.choice([20, 200]), draw.choice([2, 3, 201_088])
    settings = num_slots, draw.choice([(2, 4, 8), (1,), (3, 6)]), pool_tokens
    lookup, oracle = PromptLookup(*settings), Oracle(*settings)
    common = [draw.randrange(vocabulary) for _ in range(40)]  # what texts of a large vocabulary have in common
    num_drafts = num_behind = 0
    for i in range(400):
        slot = i if i < num_slots else draw.randrange(num_slots)
        start = draw.randrange(40)
        if i < num_slots or draw.random() < 0.1:
            text = [draw.randrange(vocabulary) for _ in range(draw.choice([1, 5, 30]))] + common[start:]
            num_prompt_tokens, salt = draw.randint(1, len(text)), draw.choice(["", "", "", "mine", "yours"])
            for drafter in (lookup, oracle):
                drafter.assign(new(text, num_prompt_tokens, salt=salt, slot=slot))
        elif draw.random() < 0.6:
            tokens = [*common[start : start + draw.randint(1, 15)], *([STOP, 1] if draw.random() < 0.1 else [])]
            lookup.append(slot, tokens)
            oracle.append(slot, tokens)
        most = draw.choice([1, 4, 8])
        if draw.random() < 0.7:
            forced = common[start : start + draw.randint(0, 9)] if draw.random() < 0.3 else []
            drafts = lookup.propose(slot, most, forced)
            assert drafts == oracle.propose(slot, most, forced)
            num_drafts += len(drafts)
            num_behind += len(drafts) > len(forced) > 0
    assert num_drafts
    assert num_behind


def test_a_sequence_that_does_not_share_neither_gives_nor_takes() -> None:
    answer = list(range(100, 120))
    lookup = PromptLookup(1)
    lookup.assign(new([1, 2, 3], salt="mine"))
    lookup.append(0, answer)
    lookup.propose(0, 4, [])
    for salt in ("", "mine"):  # the first gives the answer, which the second may not see
        lookup.assign(new([7, 8, 9], salt=salt))
        lookup.append(0, answer[:10])
        assert lookup.propose(0, 4, []) == []
        lookup.append(0, answer[10:])
    lookup.assign(new([7, 8, 9]))
    lookup.append(0, answer[:10])
    assert lookup.propose(0, 4, []) == answer[10:13]


def test_drafts_are_as_many_as_were_right_before() -> None:
    lookup, draw = PromptLookup(1), random.Random(1)
    num_drafts = []
    for is_right in (True, False, True):  # what follows the run 1, 2, of which the prompt says 3, 4, ...
        for _ in range(40):
            lookup.assign(new([*range(1, 11), draw.randrange(200, 10_000), 1], salt="mine"))
            lookup.append(0, [2])
            num_drafts.append(len(lookup.propose(0, 8, [])))
            lookup.append(0, [*range(3, 11)][: num_drafts[-1] + 1] if is_right else [11])
    assert num_drafts[0] == 3
    assert num_drafts[39] == num_drafts[119] == 8
    assert num_drafts[79] == 0


def num_drafted(lookup: PromptLookup, salt: str, *, is_right: bool) -> int:
    """Drafts of a sequence whose prompt says that 3 to 10 follow 1, 2. It then says so or something else."""
    lookup.assign(new([*range(1, 11), 0, 1], salt=salt))
    lookup.append(0, [2])
    count = len(lookup.propose(0, 8, []))
    lookup.append(0, [*range(3, 11)][: count + 1] if is_right else [11])
    return count


def test_how_often_drafts_are_right_is_learnt_per_salt() -> None:
    lookup = PromptLookup(1)
    for _ in range(40):
        num_drafted(lookup, "mine", is_right=True)
        num_drafted(lookup, "", is_right=False)
    assert num_drafted(lookup, "mine", is_right=True) == 8
    assert num_drafted(lookup, "", is_right=False) == 0
    assert num_drafted(lookup, "yours", is_right=True) == 3, "as at the start"


def test_rates_of_many_salts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscine.extensions.speculation.lookup._MAX_SALTS", 2)
    lookup = PromptLookup(1)
    for salt in ("mine", "yours"):
        for _ in range(40):
            num_drafted(lookup, salt, is_right=False)
    assert [num_drafted(lookup, salt, is_right=False) for salt in ("other", "yours", "mine")] == [3, 0, 3]


def test_what_is_sampled_behind_a_stop_token_is_no_part_of_the_answer() -> None:
    lookup = PromptLookup(1)
    lookup.assign(new([7, 8, 9]))
    lookup.append(0, [1, 2, 3])
    lookup.propose(0, 4, [])
    lookup.append(0, [4, STOP, 5, 6])  # drafts behind the end
    lookup.propose(0, 4, [])
    lookup.append(0, [7])  # a step that was launched before
    lookup.assign(new([3, 4]))
    assert lookup.propose(0, 4, []) == [STOP]
    for after in ([4, STOP], [STOP, 5], [5, 6]):
        lookup.assign(new(after))
        assert lookup.propose(0, 4, []) == []


def test_the_pool_is_bounded_and_forgets_the_oldest_answers() -> None:
    lookup = PromptLookup(1, pool_tokens=100)
    for first in range(0, 10_000, 50):
        lookup.assign(new([3]))
        lookup.append(0, list(range(first, first + 50)))
        lookup.propose(0, 1, [])
    lookup.assign(new([0, 1, 2]))
    assert lookup.propose(0, 2, []) == []
    lookup.assign(new([9_900, 9_901, 9_902]))
    assert lookup.propose(0, 2, []) == [9_903, 9_904]


def test_texts_whose_hashes_are_equal_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscine.extensions.speculation.lookup._MASK", 0)  # all runs have one hash
    lookup = PromptLookup(1)
    lookup.assign(new([1, 2, 3, 4, 5, 6, 7]))
    assert lookup.propose(0, 3, []) == []
    lookup.append(0, [9, 5, 6, 7])
    assert lookup.propose(0, 3, []) == []  # the latest run with the hash is another
    lookup.append(0, [7, 7, 7, 7])
    assert lookup.propose(0, 3, []) == [7, 7, 7]


def test_each_length_is_twice_the_one_before() -> None:
    assert [run_lengths(2, 8), run_lengths(3, 11), run_lengths(5, 5)] == [(2, 4, 8), (3, 6), (5,)]
