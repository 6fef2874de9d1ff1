"""Words of texts as the index has them.

SQLite's tokenizer cuts at what is neither a letter nor a digit. Scripts that are written without spaces would then be
one word per sentence: here each of their characters is a word, and a query asks for pairs of neighbours.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import pairwise

_MAX_PHRASES = 64  # of a query
# Thai to Myanmar, Khmer, kana, Chinese characters, Hangul
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
_CHARACTER = re.compile(f"[{_UNSPACED}]")
_RUN = re.compile(f"[{_UNSPACED}]+|[^{_UNSPACED}]+")


def spaced(text: str) -> str:
    """The text as it is indexed."""
    return text if text.isascii() else _CHARACTER.sub(r" \g<0> ", text)


def phrases(queries: Iterable[str]) -> list[str]:
    """Each word of the queries once, as a phrase of the index: one word, or neighbours that must stand together."""
    found: dict[str, str] = {}
    for query in queries:
        for word in _words(query):
            for phrase in _phrases(word):
                found.setdefault(phrase.lower(), phrase)
                if len(found) == _MAX_PHRASES:
                    return [*found.values()]
    return [*found.values()]


def _words(text: str) -> list[str]:
    parts = (c if c.isalnum() or unicodedata.category(c)[0] == "M" else " " for c in text)
    return "".join(parts).split()


def _phrases(word: str) -> Iterator[str]:
    for run in _RUN.findall(word):
        if not _CHARACTER.match(run) or len(run) == 1:
            yield run
        else:
            yield from (f"{first} {second}" for first, second in pairwise(run))
