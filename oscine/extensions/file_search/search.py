"""The search of vector stores: BM25, and with embeddings the fusion of two rankings."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import TYPE_CHECKING, NamedTuple

from oscine.extensions.file_search.schemas.filters import Filter
from oscine.extensions.file_search.schemas.objects import Weights
from oscine.extensions.file_search.storage.index import Found
from oscine.extensions.file_search.storage.tables import Storage
from oscine.extensions.file_search.storage.words import phrases

if TYPE_CHECKING:
    from oscine.extensions.file_search.vectors import Vector

_K1 = 1.2  # of FTS5's BM25
_LEAST_IDF = 1e-6  # the same, for a word in half of all chunks or more
_RANK = 60  # of reciprocal rank fusion
_CANDIDATES = 100  # of each ranking that is fused

Ranked = list[tuple[int, float]]  # numbers of chunks and their scores, the best first


@dataclass(frozen=True)
class Question:
    queries: Sequence[str]
    wanted: Filter | None = None
    limit: int = 10
    threshold: float = 0.0  # least score
    weights: Weights | None = None
    vector: "Vector | None" = None  # of the queries; None: words alone decide
    model: str = ""  # that made it


class Hit(NamedTuple):
    found: Found
    score: float  # 0 to 1


def search(storage: Storage, stores: Sequence[int], question: Question) -> list[Hit]:
    """The best chunks of all stores, by their numbers in the tables."""
    hits = [hit for store in stores for hit in _search(storage, store, question) if hit.score >= question.threshold]
    return sorted(hits, key=lambda hit: -hit.score)[: question.limit]


def _search(storage: Storage, store: int, question: Question) -> list[Hit]:
    with storage.db.transaction(writes=False):
        ranked = _ranked(storage, store, question)[: question.limit]
        found = storage.index.found([number for number, _ in ranked])
    return [Hit(found[number], score) for number, score in ranked]


def _ranked(storage: Storage, store: int, question: Question) -> Ranked:
    if question.vector is None:
        return _by_words(storage, store, question, question.limit)
    from oscine.extensions.file_search.vectors import nearest  # numpy is needed only with embeddings

    weights = question.weights or Weights()
    words = _by_words(storage, store, question, _CANDIDATES)
    stored = storage.index.vectors(store, question.model, question.wanted)
    near = nearest(stored, question.vector, _CANDIDATES)
    return fused([number for number, _ in words], near, weights)


def _by_words(storage: Storage, store: int, question: Question, limit: int) -> Ranked:
    """Scores are shares of the BM25 that no chunk can exceed.

    Words in half of all chunks or more say next to nothing, and cost most of the time: without them a query that has
    others ranks the same.
    """
    total = storage.index.num_chunks(store)
    counts = {phrase: storage.index.num_chunks(store, phrase) for phrase in phrases(question.queries)}
    weights = {phrase: _idf(count, total) for phrase, count in counts.items() if count}
    telling = {phrase: idf for phrase, idf in weights.items() if idf > _LEAST_IDF} or weights
    if not telling:
        return []
    most = sum(telling.values()) * (_K1 + 1)
    found = storage.index.by_words(store, [*telling], question.wanted, limit)
    return [(number, min(score / most, 1.0)) for number, score in found]


def _idf(count: int, total: int) -> float:
    """As FTS5 has it."""
    return max(log((total - count + 0.5) / (count + 0.5)), _LEAST_IDF)


def fused(words: Sequence[int], near: Sequence[int], weights: Weights) -> Ranked:
    """Reciprocal rank fusion. A score of 1 is the first place in both rankings."""
    both = ((words, weights.text_weight), (near, weights.embedding_weight))
    scores: dict[int, float] = {}
    for numbers, weight in both:
        for place, number in enumerate(numbers, 1):
            if weight:
                scores[number] = scores.get(number, 0.0) + weight * (_RANK + 1) / (_RANK + place)
    most = weights.text_weight + weights.embedding_weight
    ranked = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    return [(number, score / most) for number, score in ranked]
