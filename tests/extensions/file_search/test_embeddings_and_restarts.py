"""Hybrid search beside a real server for embeddings, and servers that end while they read files."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from openai import OpenAI

from oscine.extensions.file_search.schemas.objects import StaticChunks, Weights
from oscine.extensions.file_search.search import fused
from oscine.extensions.file_search.storage.files import NewFile
from oscine.extensions.file_search.storage.tables import Storage
from oscine.extensions.file_search.vectors import nearest, packed
from tests.http_handler import Handler, serving
from tests.server import ServerProcess
from tests.waiting import wait_until

MEANINGS = (("car", "automobile", "vehicle"), ("doctor", "physician", "medic"), ("fast", "quick", "rapid"))


class EmbeddingServer(Handler):
    """A text is the number of its words of each meaning. A text with `hold` waits until it may go on."""

    may_go_on = threading.Event()
    held = threading.Event()
    status = 200
    keys: set[str | None] = set()

    def post(self, body: bytes) -> None:
        given = json.loads(body)
        type(self).keys.add(self.headers["Authorization"])
        if any("hold" in text for text in given["input"]):
            self.held.set()
            self.may_go_on.wait(60)
        vectors = [[float(sum(text.count(word) for word in words)) for words in MEANINGS] for text in given["input"]]
        data = [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)]
        try:
            self.answer(self.status, json.dumps({"object": "list", "data": data[::-1], "model": given["model"]}))
        except OSError:
            assert self.held.is_set(), "only a server that was killed does not read its answer"


@pytest.fixture(scope="module")
def embeddings() -> Iterator[str]:
    with serving(EmbeddingServer) as url:
        yield f"{url}/v1"


@pytest.fixture
def start(tmp_path: Path, model_folder: Path, embeddings: str) -> Callable[..., ServerProcess]:
    """Makes servers that share a folder of files."""

    def made(*options: str) -> ServerProcess:
        return ServerProcess(
            str(model_folder),
            *("--executor", "fake", "--log-level", "error", "--files-dir", str(tmp_path / "files")),
            *("--embeddings-url", embeddings, "--embeddings-model", "counts", *options),
            environment={"OSCINE_EMBEDDINGS_KEY": "secret"},
        )

    return made


def client_of(server: ServerProcess) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def store_of(client: OpenAI, **files: str) -> str:
    ids = [client.files.create(file=(name, text.encode()), purpose="assistants").id for name, text in files.items()]
    return client.vector_stores.create(file_ids=ids, chunking_strategy=SMALL).id


def wait_for(client: OpenAI, store: str) -> Any:
    wait_until(lambda: client.vector_stores.retrieve(store).status == "completed", "the files of the store")
    return client.vector_stores.retrieve(store)


def names(client: OpenAI, store: str, query: str, **weights: float) -> list[str]:
    ranking: Any = {"hybrid_search": weights} if weights else openai.omit
    return [hit.filename for hit in client.vector_stores.search(store, query=query, ranking_options=ranking)]


SMALL: Any = {"type": "static", "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 0}}


def test_a_server_that_is_killed_while_it_reads_is_continued(start: Callable[..., ServerProcess]) -> None:
    """Some chunks of the first file are stored, and further ones held, when the first server dies."""
    text = "".join(f"Page {i:3} is about cars and {'hold ' if i == 60 else 'more '}text.\n" for i in range(80))
    with start() as server, client_of(server) as client:
        store = store_of(client, long=text, automobile="An automobile is a vehicle.", doctor="See a physician.")
        wait_until(EmbeddingServer.held.is_set, "the chunk that is held")
        counts = client.vector_stores.retrieve(store).file_counts
        assert (counts.in_progress, counts.completed, counts.total) == (3, 0, 3)
        assert names(client, store, "page") == [], "a file is found when all of it is read"
        os.kill(server.pid, signal.SIGKILL)
        server.exit_code()
    EmbeddingServer.may_go_on.set()
    with start() as server, client_of(server) as client:
        assert wait_for(client, store).file_counts.completed == 3
        (long,) = (f for f in client.vector_stores.files.list(store) if client.files.retrieve(f.id).filename == "long")
        chunks = [content.text or "" for content in client.vector_stores.files.content(long.id, vector_store_id=store)]
        assert "".join(chunks) == text
        assert EmbeddingServer.keys == {"Bearer secret"}
        assert names(client, store, "a quick car")[0] == "long"
        assert names(client, store, "medic")[0] == "doctor"
        assert names(client, store, "medic", embedding_weight=0, text_weight=1) == []
        assert names(client, store, "physician", embedding_weight=0, text_weight=1) == ["doctor"]
        assert names(client, store, "vehicle", embedding_weight=1, text_weight=0)[0] in ("automobile", "long")
        EmbeddingServer.status = 500
        with pytest.raises(openai.InternalServerError) as caught:
            names(client, store, "car")
        assert (caught.value.status_code, caught.value.code) == (503, "embeddings_unavailable")
        EmbeddingServer.status = 200


# ---- parts ----


def test_stored_vectors_rank_as_floats_do() -> None:
    draw = np.random.default_rng(5)
    vectors = draw.standard_normal((300, 48), np.float32)
    vectors[7] = 0
    query = draw.standard_normal(48, np.float32)
    stored = [(1000 * part, packed(vectors[first : first + 100])) for part, first in enumerate((0, 100, 200))]
    lengths = np.maximum(np.linalg.norm(vectors, axis=1), 1e-30)
    cosines = vectors @ query / lengths / np.linalg.norm(query)
    found = nearest([*stored, (9000, b"123")], query, 300)
    ranked = [cosines[number // 1000 * 100 + number % 1000] for number in found]
    assert len(set(found)) == 300
    assert all(before > after - 0.02 for before, after in pairwise(ranked))
    assert nearest([], query, 5) == []


def test_fusion_is_the_sum_of_reciprocal_ranks() -> None:
    ranked = dict(fused([1, 2, 3], [3, 4], Weights(embedding_weight=2.0, text_weight=1.0)))
    assert ranked[3] == pytest.approx((61 / 63 + 2 * 61 / 61) / 3)
    assert ranked[1] == pytest.approx(61 / 61 / 3)
    assert [*ranked] == [3, 4, 1, 2]
    assert dict(fused([1], [1], Weights())) == {1: 1.0}
    assert fused([1], [2], Weights(embedding_weight=0.0)) == [(1, 1.0)]


def test_a_store_expires_and_its_files_go(tmp_path: Path) -> None:
    now = 1_000_000.0
    storage = Storage(tmp_path / "db", lambda: now)
    number = storage.stores.add("vs_1", "me", {"name": "", "metadata": b"{}", "expires_days": 2}, 1)
    files(storage, number, "file-1")
    file = storage.chunks.waiting()
    assert file is not None
    storage.chunks.add(file, 0, ["a text", "another text"], None)
    storage.chunks.finish(file)
    now += 2 * 86_400 - 1
    assert not store(storage).is_expired
    storage.stores.touch(number)
    now += 2 * 86_400 - 1
    assert not store(storage).is_expired
    now += 2
    assert store(storage).is_expired
    assert store(storage).shown.status == "expired"
    storage.stores.mark_expired()
    while storage.chunks.sweep():
        pass
    assert store(storage).shown.file_counts.total == 0
    assert storage.index.num_chunks(number) == 0
    assert storage.db.rows("SELECT count(*) FROM chunks") == [(0,)]
    storage.stores.mark(number)
    storage.chunks.sweep()
    assert storage.db.rows("SELECT count(*) FROM stores") == [(0,)]
    storage.db.close()


def test_what_a_sweep_left_is_swept_later(tmp_path: Path) -> None:
    """A server may end between two steps of a deletion."""
    storage = Storage(tmp_path / "db")
    number = storage.stores.add("vs_1", "me", {"name": "", "metadata": b"{}"}, 1)
    files(storage, number, "file-1", "file-2")
    for texts in ([f"first {i}" for i in range(200)], ["second"]):
        file = storage.chunks.waiting()
        assert file is not None
        storage.chunks.add(file, 0, texts, ("m", b"\1" * len(texts)))
        storage.chunks.finish(file)
    assert storage.files.mark("file-1", owner="me")
    assert not storage.files.mark("file-2", owner="other")
    assert storage.chunks.sweep()
    storage.db.close()
    storage = Storage(tmp_path / "db")
    while storage.chunks.sweep():
        pass
    assert storage.index.num_chunks(number) == 1
    assert storage.index.num_chunks(number, "first") == 0
    assert storage.index.num_chunks(number, "second") == 1
    assert len(storage.db.rows("SELECT 1 FROM chunks")) == len(storage.db.rows("SELECT 1 FROM vectors")) == 1
    storage.db.close()


def files(storage: Storage, number: int, *ids: str) -> None:
    storage.files.add(number, [NewFile(name, name, {}, StaticChunks(100, 0)) for name in ids], 1000)


def store(storage: Storage) -> Any:
    found = storage.stores.find("vs_1", "me")
    assert found is not None
    return found
