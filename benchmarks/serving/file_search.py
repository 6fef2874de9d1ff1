"""File search: how long a query takes, and how fast chunks are added.

    python -m benchmarks.serving.file_search [--chunks 10000] [--dimensions 0]

The words of the chunks are as frequent as a language's (Zipf's law), and so are those of the queries. It prints JSON:
milliseconds of queries by kind, chunks per second, bytes of the database. `--dimensions` adds random vectors and
measures hybrid search.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from oscine.extensions.file_search.schemas.objects import CHUNK_TOKENS, OVERLAP_TOKENS, StaticChunks
from oscine.extensions.file_search.search import Question, search
from oscine.extensions.file_search.storage.chunks import MAX_CHUNKS
from oscine.extensions.file_search.storage.files import NewFile
from oscine.extensions.file_search.storage.tables import Storage
from oscine.extensions.file_search.vectors import packed

_WORDS_OF_CHUNK = 550  # 800 tokens of English
_CHUNKS_OF_FILE = 100
_BATCH = 16  # chunks in a transaction, as the server adds them
_ROUNDS = 100
_MODEL = "random"


def vocabulary(draw: random.Random) -> list[str]:
    """30,000 words, the most frequent first."""
    syllables = [a + b for a in "bcdfglmnprst" for b in "aeiou"]
    return ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(30_000)]


def fill(storage: Storage, count: int, text: Callable[[], str], dimensions: int) -> tuple[int, float]:
    """The number of a store with so many chunks, and the seconds that adding them took."""
    fields = {"name": "", "metadata": b"{}"}
    store, strategy, took_s = storage.stores.add("vs_1", "", fields, 1), StaticChunks(CHUNK_TOKENS, OVERLAP_TOKENS), 0.0
    vectors = np.random.default_rng(1)
    for first in range(0, count, _CHUNKS_OF_FILE):
        name = f"file-{first}"
        storage.files.add(store, [NewFile(name, f"{name}.md", {"year": 2000 + first % 25}, strategy)], count + 1)
        file = storage.chunks.waiting()
        assert file is not None
        for place in range(0, min(_CHUNKS_OF_FILE, count - first), _BATCH):
            texts = [text() for _ in range(min(_BATCH, _CHUNKS_OF_FILE - place, count - first - place))]
            of = packed(vectors.standard_normal((len(texts), dimensions), np.float32)) if dimensions else None
            began_s = time.perf_counter()
            storage.chunks.add(file, place, texts, None if of is None else (_MODEL, of))
            took_s += time.perf_counter() - began_s
        storage.chunks.finish(file)
    assert count < MAX_CHUNKS
    return store, took_s


def queries(words: list[str], draw: random.Random) -> Iterator[tuple[str, str]]:
    """Queries with the kinds that they are of."""
    weights = [*accumulate(1 / rank for rank in range(1, len(words) + 1))]
    for _ in range(_ROUNDS):
        yield "as in the texts", " ".join(draw.choices(words, cum_weights=weights, k=8))
        yield "rare words", " ".join(draw.choices(words[500:], k=6))
        yield "three common words", " ".join(draw.choices(words[20:120], k=3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=10_000)
    parser.add_argument("--dimensions", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(1)
    words = vocabulary(draw)
    weights = [*accumulate(1 / rank for rank in range(1, len(words) + 1))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "search.db"
        storage = Storage(path)
        text = lambda: " ".join(draw.choices(words, cum_weights=weights, k=_WORDS_OF_CHUNK))  # noqa: E731
        store, took_s = fill(storage, args.chunks, text, args.dimensions)
        vector = np.random.default_rng(2).standard_normal(args.dimensions, np.float32) if args.dimensions else None
        question = Question((), vector=vector, model=_MODEL)
        times: dict[str, list[float]] = {}
        for kind, query in queries(words, draw):
            began_s = time.perf_counter()
            search(storage, [store], replace(question, queries=[query]))
            times.setdefault(kind, []).append((time.perf_counter() - began_s) * 1e3)
        storage.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        size = path.stat().st_size
    every = sorted(one for of_kind in times.values() for one in of_kind)
    found = {
        "chunks": args.chunks,
        "dimensions": args.dimensions,
        "chunks_per_s": round(args.chunks / took_s),
        "database_bytes": size,
        "p50_ms": round(statistics.median(every), 2),
        "p99_ms": round(every[len(every) * 99 // 100], 2),
        "p50_ms_by_kind": {kind: round(statistics.median(of_kind), 2) for kind, of_kind in times.items()},
    }
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
