"""The merges of gpt-oss's vocabulary are those by which BPE makes each token."""

from itertools import pairwise
from random import Random

import pytest

from oscine.model.o200k import _merges_of, _ranked_tokens


def parts_of(token: bytes, rank_of: dict[bytes, int]) -> list[bytes]:
    """As defined: BPE merges by lowest rank, the leftmost of equal ones first."""
    parts, rank = [token[i : i + 1] for i in range(len(token))], rank_of.get(token, len(rank_of))
    while (ranks := [rank_of.get(left + right, rank) for left, right in pairwise(parts)]) and min(ranks) < rank:
        at = ranks.index(min(ranks))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def check(tokens: list[bytes]) -> None:
    rank_of = {token: rank for rank, token in enumerate(tokens)}
    merges = _merges_of(tokens)
    assert list(merges) == [token for token in tokens if len(token) > 1]
    assert [token for token, parts in merges.items() if [*parts] != parts_of(token, rank_of)] == []


def test_merges_of_the_real_vocabulary_are_those_of_bpe() -> None:
    pytest.importorskip("openai_harmony", reason="it has the vocabulary")
    check(_ranked_tokens()[:40_000])


def test_merges_of_repeated_letters_are_those_of_bpe() -> None:
    """Equal merges overlap there, and the left one comes first."""
    rank_of, draw = {b"a": 0, b"b": 1}, Random(0)
    while len(rank_of) < 500:
        token = bytes(draw.choices(b"ab", k=draw.randint(2, 12)))
        if token not in rank_of and len(parts_of(token, rank_of)) == 2:
            rank_of[token] = len(rank_of)
    check([*rank_of])
