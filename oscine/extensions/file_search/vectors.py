"""Embeddings: of texts, by another server, and their ranking by cosine.

A stored vector is int8: its largest component is 127 or -127. That moves a cosine by about a thousandth.
"""

import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from http.client import HTTPException

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

_TIMEOUT_S = 60.0
_MAX_ANSWER = 64 << 20  # bytes

Vector = NDArray[np.float32]


class EmbeddingsError(Exception):
    """The server for embeddings gave none. One line."""


class _Embedding(Struct):
    embedding: list[float]
    index: int


class _Answer(Struct):
    data: list[_Embedding]


class Embeddings:
    """Of an OpenAI-compatible server."""

    def __init__(self, url: str, model: str, key: str | None) -> None:
        self.model = model
        self._url = f"{url.rstrip('/')}/embeddings"
        self._headers = {"Content-Type": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def of(self, texts: Sequence[str]) -> Vector:
        """A row per text. It waits for the server. Raises EmbeddingsError."""
        body = msgspec.json.encode({"model": self.model, "input": texts, "encoding_format": "float"})
        request = urllib.request.Request(self._url, body, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
                answer = msgspec.json.decode(response.read(_MAX_ANSWER), type=_Answer)
            rows = [one.embedding for one in sorted(answer.data, key=lambda one: one.index)]
            found = np.array(rows, np.float32)
        except (OSError, HTTPException, ValueError) as error:
            raise EmbeddingsError(f"The server for embeddings fails: {error}") from None
        if found.ndim != 2 or len(found) != len(texts) or not np.isfinite(found).all():
            raise EmbeddingsError("The server for embeddings answers with other than a vector per text.")
        return found


def packed(vectors: Vector) -> bytes:
    """As they are stored."""
    largest = np.abs(vectors).max(axis=1, keepdims=True)
    scaled = vectors / np.where(largest > 0, largest, 1) * 127
    return bytes(np.rint(scaled).astype(np.int8).tobytes())


def nearest(stored: Iterable[tuple[int, bytes]], query: Vector, limit: int) -> list[int]:
    """The numbers of the chunks whose vectors have the largest cosines. `stored`: of consecutive chunks, the first."""
    numbers: list[NDArray[np.int64]] = []
    cosines: list[Vector] = []
    for first, body in stored:
        if len(body) % len(query):
            continue  # of a model whose vectors had another length
        rows = np.frombuffer(body, np.int8).reshape(-1, len(query)).astype(np.float32)
        lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows))
        cosines.append(rows @ query / np.maximum(lengths, 1))
        numbers.append(np.arange(first, first + len(rows)))
    if not cosines:
        return []
    best = np.argsort(-np.concatenate(cosines), kind="stable")[:limit]
    return [int(number) for number in np.concatenate(numbers)[best]]
