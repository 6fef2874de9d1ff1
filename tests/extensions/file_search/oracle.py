"""BM25, filters and files of other programs, written anew for the tests."""

import io
import math
import zipfile
from collections import Counter
from collections.abc import Sequence
from typing import Any

K1, B, LEAST = 1.2, 0.75, 1e-6
DOCX = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def bm25(query: Sequence[str], documents: Sequence[Sequence[str]]) -> list[float]:
    """The score of each document: Robertson's formula. A word in half of them or more counts next to nothing."""
    mean = sum(map(len, documents)) / len(documents)
    scores = [0.0] * len(documents)
    for word in dict.fromkeys(query):
        having = sum(word in document for document in documents)
        if not having:
            continue
        idf = max(math.log((len(documents) - having + 0.5) / (having + 0.5)), LEAST)
        for i, document in enumerate(documents):
            count = Counter(document)[word]
            scores[i] += idf * count * (K1 + 1) / (count + K1 * (1 - B + B * len(document) / mean))
    return scores


def passes(wanted: dict[str, Any], attributes: dict[str, Any]) -> bool:
    """Whether a file with these attributes satisfies a filter."""
    kind = wanted["type"]
    if kind in ("and", "or"):
        return (all if kind == "and" else any)(passes(inner, attributes) for inner in wanted["filters"])
    if kind in ("ne", "nin"):
        return not passes({**wanted, "type": "eq" if kind == "ne" else "in"}, attributes)
    if wanted["key"] not in attributes:
        return False
    has, given = attributes[wanted["key"]], wanted["value"]
    if kind == "in":
        return any(_kind(one) == _kind(has) and one == has for one in given)
    if _kind(has) != _kind(given):
        return False
    return bool({"eq": has == given, "gt": has > given, "gte": has >= given, "lt": has < given}.get(kind, has <= given))


def _kind(value: Any) -> str:
    return "bool" if isinstance(value, bool) else "text" if isinstance(value, str) else "number"


def docx(*paragraphs: str) -> bytes:
    body = "".join(f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>" for text in paragraphs)
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", f'<w:document xmlns:w="{DOCX}"><w:body>{body}</w:body></w:document>')
    return data.getvalue()


def windows(text: bytes, size: int, overlap: int) -> list[str]:
    """The chunks of a text whose tokens are its bytes."""
    starts = range(0, max(len(text) - overlap, 1), size - overlap)
    return [text[start : start + size].decode() for start in starts]
