"""A folder of documents as the browser's backend: ranked by BM25 over an index in memory.

Reads only files below the folder. Their URLs are file:/// and the path below it. A file that is added or changed later
can be opened, but is found only after a restart.
"""

import asyncio
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from oscine.extensions.tools.browser import Hit
from oscine.extensions.tools.browser_page import Document, document_of

_KINDS = {
    **dict.fromkeys((".html", ".htm"), "html"),
    **dict.fromkeys((".md", ".markdown"), "markdown"),
    **dict.fromkeys((".txt", ".rst"), "text"),
}
_LARGEST = 4 << 20  # bytes; larger files are skipped
_SNIPPET = 240  # characters
_WORD = re.compile(r"\w+")
_SATURATION, _BY_LENGTH = 1.2, 0.75  # k1 and b of BM25


class Folder:
    """Raises ValueError if there is no such folder."""

    def __init__(self, path: str) -> None:
        self._root = Path(path).resolve()
        if not self._root.is_dir():
            raise ValueError(f"--browser-folder {path}: there is no such folder")
        self._urls: list[str] = []
        self._lengths: list[int] = []  # words
        self._postings: dict[str, list[tuple[int, int]]] = defaultdict(list)  # word -> document, times
        for file in sorted(self._root.rglob("*")):
            if (document := self._read(file)) is not None:
                self._add(document)

    async def search(self, query: str, topn: int) -> Sequence[Hit]:
        return await asyncio.to_thread(lambda: [*self._hits(query, topn)])

    async def open(self, url: str) -> Document:
        parts = urlsplit(url)
        path = self._root / unquote(parts.path).lstrip("/")
        document = await asyncio.to_thread(self._read, path) if parts.scheme == "file" and not parts.netloc else None
        if document is None:
            raise LookupError(f"there is no page {url}")
        return document

    def _read(self, file: Path) -> Document | None:
        """None for a path that is not a document of this folder. Links that lead out of it are not."""
        kind = _KINDS.get(file.suffix.lower())
        try:
            path = file.resolve()
            if kind is None or not path.is_relative_to(self._root) or not path.is_file():
                return None
            if path.stat().st_size > _LARGEST:
                return None
            text = path.read_text(errors="replace")
        except (OSError, ValueError):
            return None
        url = f"file:///{quote(str(path.relative_to(self._root)))}"
        return document_of(url, text, kind, path.name)

    def _add(self, document: Document) -> None:
        words = _words(f"{document.title}\n{document.text}")
        number = len(self._urls)
        self._urls.append(document.url)
        self._lengths.append(len(words))
        for word, times in Counter(words).items():
            self._postings[word].append((number, times))

    def _rank(self, words: set[str]) -> list[int]:
        """Documents by BM25, best first: the sum over words of idf * times * (k1 + 1) / (times + k1 * norm)."""
        mean = sum(self._lengths) / max(len(self._lengths), 1)
        scores: defaultdict[int, float] = defaultdict(float)
        for word in sorted(words & self._postings.keys()):
            found = self._postings[word]
            rarity = math.log(1 + (len(self._urls) - len(found) + 0.5) / (len(found) + 0.5))
            for number, times in found:
                norm = 1 - _BY_LENGTH + _BY_LENGTH * self._lengths[number] / mean
                scores[number] += rarity * times * (_SATURATION + 1) / (times + _SATURATION * norm)
        return sorted(scores, key=lambda number: (-scores[number], number))

    def _hits(self, query: str, topn: int) -> Iterator[Hit]:
        words = {*_words(query)}
        for number in self._rank(words)[:topn]:
            document = self._read(self._root / unquote(urlsplit(self._urls[number]).path).lstrip("/"))
            if document is not None:
                yield Hit(document.url, document.title, _snippet(document.text, words))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _snippet(text: str, words: set[str]) -> str:
    """The line with the most of the words, cut to length."""
    best = max(text.splitlines(), key=lambda line: len(words.intersection(_words(line))), default="").strip()
    if len(best) <= _SNIPPET:
        return best
    first = next((match.start() for match in _WORD.finditer(best) if match[0].lower() in words), 0)
    start = max(0, min(first - _SNIPPET // 3, len(best) - _SNIPPET))
    return f"{'…' if start else ''}{best[start : start + _SNIPPET].strip()}…"
