"""The search of one store: by words, by vectors, among the files that satisfy a filter."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from oscine.extensions.file_search.schemas.filters import Comparison, Filter, Scalar
from oscine.extensions.file_search.schemas.objects import Attributes
from oscine.extensions.file_search.storage.database import PLACE_BITS, Database


class Found(NamedTuple):
    file_id: str
    filename: str
    attributes: Attributes
    text: str


class Index:
    """Within a transaction, the methods see one state of the database."""

    def __init__(self, db: Database) -> None:
        self._db = db

    def num_chunks(self, store: int, phrase: str | None = None) -> int:
        """In a store, as its scores count them: all, or those with a phrase."""
        if phrase is None:
            ((count,),) = self._db.rows(f"SELECT count(*) FROM words_{store}_docsize")
        else:
            ((count,),) = self._db.rows(f"SELECT count(*) FROM words_{store} WHERE text MATCH ?", (_quoted(phrase),))
        return int(count)

    def by_words(
        self, store: int, phrases: Sequence[str], wanted: Filter | None, limit: int
    ) -> list[tuple[int, float]]:
        """The chunks with the highest BM25, and these scores. Chunks of the same score come in their order."""
        among, values = _files_among(store, wanted)
        select = f"""
            SELECT rowid, -rank FROM words_{store}
            WHERE text MATCH ? AND rowid >> {PLACE_BITS} IN ({among}) ORDER BY rank, rowid LIMIT ?
        """
        return self._db.rows(select, (" OR ".join(map(_quoted, phrases)), *values, limit))

    def vectors(self, store: int, model: str, wanted: Filter | None) -> Iterator[tuple[int, bytes]]:
        """Of all chunks: the number of a chunk, and the vectors from it on."""
        among, values = _files_among(store, wanted)
        select = f"""
            SELECT v.first, v.body FROM ({among}) AS f JOIN vectors v
                ON v.first >= f.number << {PLACE_BITS} AND v.first < (f.number + 1) << {PLACE_BITS}
            WHERE v.model = ?
        """
        return iter(self._db.execute(select, (*values, model)))

    def found(self, numbers: Sequence[int]) -> dict[int, Found]:
        """Chunks by their numbers."""
        select = f"""
            SELECT c.number, f.id, f.filename, f.attributes, c.text
            FROM chunks c JOIN files f ON f.number = c.number >> {PLACE_BITS}
            WHERE c.number IN ({", ".join("?" * len(numbers))})
        """
        rows = self._db.rows(select, numbers)
        return {
            number: Found(file_id, name, msgspec.json.decode(given), text)
            for number, file_id, name, given, text in rows
        }


def _quoted(phrase: str) -> str:
    return '"' + phrase.replace('"', '""') + '"'


def _files_among(store: int, wanted: Filter | None) -> tuple[str, list[Any]]:
    """The query of the files that are searched, and its values."""
    values: list[Any] = [store]
    query = "SELECT number FROM files WHERE store = ? AND status = 'completed' AND NOT gone"
    return (query if wanted is None else f"{query} AND {_condition(wanted, values)}"), values


def _condition(wanted: Filter, values: list[Any]) -> str:
    """In SQL; adds its values."""
    if not isinstance(wanted, Comparison):
        if not wanted.filters:
            return "1" if wanted.type == "and" else "0"
        return f"({f' {wanted.type.upper()} '.join(_condition(one, values) for one in wanted.filters)})"
    values.append(wanted.key)
    given = wanted.value if isinstance(wanted.value, list) else [wanted.value]
    sign = {"gt": ">", "gte": ">=", "lt": "<", "lte": "<="}.get(wanted.type, "=")
    tests = " OR ".join(_test(value, sign, values) for value in given) or "0"
    negated = "NOT " if wanted.type in ("ne", "nin") else ""
    return f"{negated}EXISTS (SELECT 1 FROM json_each(files.attributes) WHERE key = ? AND ({tests}))"


def _test(value: Scalar, sign: str, values: list[Any]) -> str:
    if isinstance(value, bool):
        return f"type = '{str(value).lower()}'"
    kinds = "('text')" if isinstance(value, str) else "('integer', 'real')"
    values.append(_number(value) if isinstance(value, int) else value)
    return f"(type IN {kinds} AND atom {sign} ?)"


def _number(value: int) -> int | float:
    """As SQLite reads it from JSON: a float from 64 bits on, which may be infinite."""
    if abs(value) < 1 << 63:
        return value
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
