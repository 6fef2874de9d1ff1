"""/v1/vector_stores with the openai client, in front of a real server whose tokens are bytes."""

import itertools
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.extensions.file_search import oracle
from tests.server import ServerProcess
from tests.waiting import wait_until

OPTIONS = ("--max-vector-stores", "60", "--max-vector-store-file-bytes", "300000", "--max-vector-store-chunks", "1500")
SMALL: Any = {"type": "static", "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 50}}


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[ServerProcess]:
    keys = ("--api-key", "one", "--api-key", "other")
    with ServerProcess(str(model_folder), "--executor", "fake", "--log-level", "warning", *keys, *OPTIONS) as server:
        yield server


def client_of(server: ServerProcess, key: str) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with client_of(server, "one") as client:
        yield client


def upload(client: OpenAI, name: str, data: bytes | str) -> str:
    content = data.encode() if isinstance(data, str) else data
    return client.files.create(file=(name, content), purpose="assistants").id


def settled(client: OpenAI, store: str) -> Any:
    """The store once all of its files have been read."""
    wait_until(lambda: client.vector_stores.retrieve(store).status != "in_progress", "the files of the store")
    return client.vector_stores.retrieve(store)


def store_of(client: OpenAI, files: dict[str, bytes | str], attributes: dict[str, Any] | None = None) -> str:
    """A store with files, and with their attributes by name."""
    store = client.vector_stores.create(name="test").id
    given = [
        {"file_id": upload(client, name, data), "attributes": (attributes or {}).get(name)}
        for name, data in files.items()
    ]
    client.vector_stores.file_batches.create(store, files=given)  # type: ignore[arg-type]
    settled(client, store)
    return store


def names(client: OpenAI, store: str, query: Any, **more: Any) -> list[str]:
    return [hit.filename for hit in client.vector_stores.search(store, query=query, **more).data]


# ---- stores ----


def test_a_store_from_its_beginning_to_its_end(client: OpenAI) -> None:
    made = client.vector_stores.create(
        name="Handbook",
        description="What we do",
        metadata={"team": "a"},
        expires_after={"anchor": "last_active_at", "days": 3},
    )
    assert (made.name, made.metadata, made.status, made.usage_bytes) == ("Handbook", {"team": "a"}, "completed", 0)
    assert made.expires_at == (made.last_active_at or 0) + 3 * 86400
    assert made.file_counts.total == 0
    changed = client.vector_stores.update(made.id, name="New", metadata={"team": "b"})
    assert (changed.name, changed.metadata, changed.expires_after) == ("New", {"team": "b"}, made.expires_after)
    forever = client.vector_stores.update(made.id, expires_after=None)
    assert (forever.name, forever.expires_after, forever.expires_at) == ("New", None, None)
    assert client.vector_stores.retrieve(made.id) == forever
    deleted = client.vector_stores.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.retrieve(made.id)


def test_pages_of_stores_are_in_order_and_have_each_once(server: ServerProcess) -> None:
    with client_of(server, "other") as client:
        made = [client.vector_stores.create(name=str(i)).id for i in range(5)]
        assert [store.id for store in client.vector_stores.list(limit=2)] == made[::-1]
        assert [store.id for store in client.vector_stores.list(limit=2, order="asc")] == made
        before = client.vector_stores.list(limit=2, order="asc", before=made[3])
        assert [store.id for store in before.data] == made[1:3]
        assert before.has_more
        listed = []
        for store in client.vector_stores.list(limit=2):  # which asks for the page behind one that is deleted
            client.vector_stores.delete(store.id)
            listed.append(store.id)
        assert listed == made[::-1]
        assert not client.vector_stores.list(after=made[0]).data
        with pytest.raises(openai.BadRequestError, match="'before': there is no object 'vs_0' in this list"):
            client.vector_stores.list(before="vs_0")


def test_another_key_finds_nothing(server: ServerProcess, client: OpenAI) -> None:
    store = store_of(client, {"a.txt": "secret"})
    (file,) = client.vector_stores.files.list(store).data
    batch = client.vector_stores.file_batches.create(store, file_ids=[file.id])
    settled(client, store)
    with client_of(server, "other") as other:
        stores, own = other.vector_stores, other.vector_stores.create().id
        for ask in (
            lambda: stores.retrieve(store),
            lambda: stores.update(store, name="x"),
            lambda: stores.delete(store),
            lambda: stores.search(store, query="secret"),
            lambda: stores.files.list(store),
            lambda: stores.files.create(store, file_id=file.id),
            lambda: stores.files.create(own, file_id=file.id),
            lambda: stores.files.retrieve(file.id, vector_store_id=store),
            lambda: stores.files.update(file.id, vector_store_id=store, attributes={"a": 1}),
            lambda: stores.files.content(file.id, vector_store_id=store),
            lambda: stores.files.delete(file.id, vector_store_id=store),
            lambda: stores.file_batches.create(store, file_ids=[file.id]),
            lambda: stores.file_batches.retrieve(batch.id, vector_store_id=store),
            lambda: stores.file_batches.retrieve(batch.id, vector_store_id=own),
            lambda: stores.file_batches.cancel(batch.id, vector_store_id=store),
            lambda: stores.file_batches.list_files(batch.id, vector_store_id=store),
            lambda: other.responses.create(
                input="hi", tools=[{"type": "file_search", "vector_store_ids": [store]}], max_output_tokens=16
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                ask()
        assert [listed.id for listed in stores.list()] == [own]
        stores.delete(own)
    assert names(client, store, "secret") == ["a.txt"]


# ---- files ----


def test_a_file_is_cut_into_windows_of_tokens(client: OpenAI) -> None:
    text = "".join(f"Line {i}: {'é' * (i % 7)} naïve 日本 😀.\n" for i in range(60)).encode()
    store = client.vector_stores.create().id
    file = client.vector_stores.files.create(
        store, file_id=upload(client, "a.md", text), attributes={"year": 2024}, chunking_strategy=SMALL
    )
    assert file.attributes == {"year": 2024}
    assert file.chunking_strategy is not None
    assert file.chunking_strategy.to_dict() == SMALL
    assert settled(client, store).file_counts.completed == 1
    done = client.vector_stores.files.retrieve(file.id, vector_store_id=store)
    chunks = [content.text or "" for content in client.vector_stores.files.content(file.id, vector_store_id=store)]
    assert done.usage_bytes == sum(len(chunk.encode()) for chunk in chunks)
    assert done.last_error is None
    whole = text.decode()
    for chunk, after in itertools.pairwise(chunks):
        assert 97 <= len(chunk.encode()) <= 103, "a character is never cut"
        assert chunk in whole
        assert any(chunk.endswith(after[:size]) for size in range(25, 54)), "neighbours share half of a chunk"
    assert whole.startswith(chunks[0])
    assert whole.endswith(chunks[-1])


def test_chunks_of_ascii_are_those_of_plain_python(client: OpenAI) -> None:
    text = bytes(random.Random(3).choices(b"abc def.\n", k=40_321))  # longer than what is encoded at once
    store = client.vector_stores.create(
        file_ids=[upload(client, "a.py", text)],
        chunking_strategy={"type": "static", "static": {"max_chunk_size_tokens": 700, "chunk_overlap_tokens": 123}},
    ).id
    settled(client, store)
    (file,) = client.vector_stores.files.list(store).data
    chunks = [content.text for content in client.vector_stores.files.content(file.id, vector_store_id=store)]
    assert chunks == oracle.windows(text, 700, 123)


def test_files_are_listed_by_status_and_page(client: OpenAI) -> None:
    files: dict[str, bytes | str] = {f"{i}.txt": f"text {i}" for i in range(5)} | {"bad.txt": b"\xff\xfe\xfa" * 9}
    store = store_of(client, files)
    counts = client.vector_stores.retrieve(store).file_counts
    assert (counts.completed, counts.failed, counts.total) == (5, 1, 6)
    listed = [file.id for file in client.vector_stores.files.list(store, limit=4, order="asc")]
    assert len(set(listed)) == 6
    assert [file.id for file in client.vector_stores.files.list(store, limit=4)] == listed[::-1]
    failed = client.vector_stores.files.list(store, filter="failed").data
    assert [file.id for file in failed] == listed[-1:]
    after = client.vector_stores.files.list(store, filter="completed", order="asc", after=listed[2])
    assert [file.id for file in after] == listed[3:5]
    client.vector_stores.files.delete(listed[3], vector_store_id=store)
    assert [file.id for file in client.vector_stores.files.list(store, order="asc", after=listed[3])] == listed[4:]
    before = client.vector_stores.files.list(store, order="asc", before=listed[3])
    assert [file.id for file in before.data] == listed[:3]
    one = client.vector_stores.files.update(listed[0], vector_store_id=store, attributes={"kind": "memo", "done": True})
    assert one.attributes == {"kind": "memo", "done": True}
    assert names(client, store, "text", filters={"type": "eq", "key": "done", "value": True}) == ["0.txt"]


DOCUMENT = oracle.docx("Quarterly zebra report", "Second &amp; last")
FORMATS: dict[str, tuple[bytes, str]] = {  # a file, and what is found in it or why it fails
    "a.txt": (b"plain zebra", "plain zebra"),
    "b.md": (b"# Zebra\n\ntext", "# Zebra\n\ntext"),
    "c.json": (b'{"animal": "zebra"}', '{"animal": "zebra"}'),
    "d.csv": (b"animal,legs\nzebra,4\n", "animal,legs\nzebra,4\n"),
    "e.html": (
        b"<html><head><title>Zoo</title><style>zebra{}</style></head><body><p>A <b>ze</b>bra &amp; co</p><script>x()"
        b"</script><li>two</body>",
        "Zoo\nA zebra & co\ntwo\n",
    ),
    "f.weird": ("zebra é 日本".encode("utf-16"), "zebra é 日本"),
    "g.txt": (b"\xef\xbb\xbfzebra with a mark", "zebra with a mark"),
    "h.docx": (DOCUMENT, "Quarterly zebra report\nSecond & last\n"),
    "i.txt": (b"", "invalid_file: The file has no text."),
    "j.txt": (b" \n\t ", "invalid_file: The file has no text."),
    "k.txt": (b"zebra \xff\xff", "invalid_file: The file is no text in UTF-8."),
    "l.bin": (b"zebra\0\0\1", "unsupported_file: The file is not text, nor a format that is read."),
    "m.docx": (DOCUMENT[:200], "invalid_file: The file is no DOCX document: File is not a zip file."),
    "n.html": (b"<div" * 3000, ""),
    "o.xlsx": (b"PK", "unsupported_file: Files of this format are not read; convert it to text, DOCX or PDF."),
    "p.txt": (b"zebra" * 9000, "zebra"),
    "q.html": (b"<!-- zebra " * 2000, ""),
}


def test_formats_are_read_or_say_why_not(client: OpenAI) -> None:
    store = store_of(client, {name: data for name, (data, _) in FORMATS.items()})
    found = {}
    for file in client.vector_stores.files.list(store, limit=100):
        name = client.files.retrieve(file.id).filename
        if file.last_error is not None:
            assert file.status == "failed"
            found[name] = f"{file.last_error.code}: {file.last_error.message}"
        else:
            contents = client.vector_stores.files.content(file.id, vector_store_id=store)
            found[name] = next(iter(contents)).text or ""
    found["p.txt"] = found["p.txt"][:5]
    for name in ("n.html", "q.html"):  # releases of Python differ in what they make of them
        found[name] = ""
    assert found == {name: shown for name, (_, shown) in FORMATS.items()}


def test_a_pdf_is_read_or_its_error_names_the_extra(client: OpenAI) -> None:
    store = store_of(client, {"a.pdf": b"%PDF-1.4 broken"})
    (file,) = client.vector_stores.files.list(store).data
    assert file.status == "failed"
    assert file.last_error is not None
    try:
        import pypdf  # noqa: F401
    except ImportError:
        assert file.last_error.code == "unsupported_file"
        assert "pip install 'oscine[pdf]'" in file.last_error.message
    else:
        assert file.last_error.code == "invalid_file"


def pdf(*pages: str) -> bytes:
    """A document with one line of text per page."""
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(len(pages)))
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
    objects = ["<< /Type /Catalog /Pages 2 0 R >>", f"<< /Type /Pages /Kids [{kids}] /Count {len(pages)} >>", font]
    for i, text in enumerate(pages):
        drawn = f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET"
        page = f"/MediaBox [0 0 595 842] /Resources << /Font << /F1 3 0 R >> >> /Contents {5 + 2 * i} 0 R"
        objects.append(f"<< /Type /Page /Parent 2 0 R {page} >>")
        objects.append(f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream")
    data, offsets = b"%PDF-1.4\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(f"{len(data):010} 00000 n \n")
        data += f"{number} 0 obj\n{content}\nendobj\n".encode()
    table = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{''.join(offsets)}"
    end = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R >>\nstartxref\n{len(data)}\n%%EOF\n"
    return data + f"{table}{end}".encode()


def test_the_pages_of_a_pdf_are_searched(client: OpenAI) -> None:
    pytest.importorskip("pypdf")
    store = store_of(client, {"zoo.pdf": pdf("A zebra has stripes.", "A lion has a mane."), "a.txt": b"no animals"})
    (hit,) = client.vector_stores.search(store, query="mane").data
    assert hit.filename == "zoo.pdf"
    assert hit.content[0].text == "A zebra has stripes.\nA lion has a mane.\n"


def test_a_file_that_is_removed_or_deleted_is_not_found(client: OpenAI) -> None:
    store = store_of(client, {"a.txt": "apple pie", "b.txt": "apple tree", "c.txt": "apple"})
    a, b, c = (file.id for file in client.vector_stores.files.list(store, order="asc"))
    assert client.vector_stores.files.delete(a, vector_store_id=store).deleted
    assert client.files.retrieve(a).filename == "a.txt", "the uploaded file stays"
    client.files.delete(b)
    assert names(client, store, "apple") == ["c.txt"]
    assert [file.id for file in client.vector_stores.files.list(store)] == [c]
    assert client.vector_stores.retrieve(store).file_counts.total == 1
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.files.delete(a, vector_store_id=store)
    client.vector_stores.files.create(store, file_id=a, chunking_strategy=SMALL)
    client.vector_stores.files.create(store, file_id=a)
    settled(client, store)
    assert sorted(names(client, store, "apple")) == ["a.txt", "c.txt"], "a file is in a store once"


def test_a_batch_counts_its_own_files(client: OpenAI) -> None:
    store = store_of(client, {"other.txt": "other"})
    ids = [upload(client, f"{i}.txt", f"batch {i}" if i else b"\0") for i in range(3)]
    batch = client.vector_stores.file_batches.create_and_poll(
        store, file_ids=ids, attributes={"in": "batch"}, poll_interval_ms=20
    )
    counts = batch.file_counts
    assert (batch.status, counts.completed, counts.failed, counts.total) == ("completed", 2, 1, 3)
    listed = client.vector_stores.file_batches.list_files(batch.id, vector_store_id=store, order="asc")
    assert [file.id for file in listed] == ids
    assert {json.dumps(file.attributes) for file in listed} == {'{"in": "batch"}'}
    cancelled = client.vector_stores.file_batches.cancel(batch.id, vector_store_id=store)
    assert cancelled.status == "completed", "it has ended"


# ---- search ----

ATTRIBUTES: dict[str, Any] = {
    "a": {"year": 2020, "lang": "en", "draft": False},
    "b": {"year": 2021, "lang": "de", "draft": True},
    "c": {"year": 2022.5, "lang": "en"},
    "d": {"lang": "fr", "year": "2021"},
    "e": {},
    "f": {'odd "key".$[0]': "x' OR 1=1 --", "year": 2021},
}


def compare(kind: str, key: str, value: Any) -> dict[str, Any]:
    return {"type": kind, "key": key, "value": value}


FILTERS: list[dict[str, Any]] = [
    *(compare(kind, "year", 2021) for kind in ("eq", "ne", "gt", "gte", "lt", "lte")),
    *(compare(kind, "year", "2021") for kind in ("eq", "ne", "gte")),
    *(compare(kind, "lang", ["en", "fr"]) for kind in ("in", "nin")),
    *(compare(kind, "draft", value) for kind in ("eq", "ne") for value in (True, False)),
    compare("eq", "year", 10**30),
    compare("lt", "year", 10**400),
    compare("lt", "year", -(10**400)),
    compare("in", "year", []),
    compare("eq", 'odd "key".$[0]', "x' OR 1=1 --"),
    compare("eq", "draft", 1),
    {"type": "and", "filters": [compare("gte", "year", 2020), compare("eq", "lang", "en")]},
    {"type": "or", "filters": [compare("eq", "draft", True), compare("eq", "lang", "fr")]},
    {"type": "and", "filters": [compare("ne", "lang", "de"), {"type": "or", "filters": [compare("gt", "year", 2022)]}]},
    {"type": "and", "filters": []},
    {"type": "or", "filters": []},
]


def test_filters_are_those_of_plain_python(client: OpenAI) -> None:
    store = store_of(client, dict.fromkeys(ATTRIBUTES, "word"), ATTRIBUTES)
    for wanted in FILTERS:
        expected = [name for name, given in ATTRIBUTES.items() if oracle.passes(wanted, given)]
        assert sorted(names(client, store, "word", filters=wanted)) == expected, wanted


def test_the_ranking_and_scores_are_those_of_bm25(client: OpenAI) -> None:
    draw = random.Random(7)
    words = [a + b + c for a in "bdfg" for b in "ou" for c in ("ka", "mo", "tu")]  # which no stemmer changes
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    documents = [draw.choices(words, weights, k=draw.randint(4, 60)) for _ in range(40)]
    store = store_of(client, {f"{i}": " ".join(document) for i, document in enumerate(documents)})
    compared = 0
    rare = [word for word in words if 2 * sum(word in document for document in documents) < len(documents)]
    assert len(rare) < len(words)
    for _ in range(12):
        query = draw.sample(rare, 3)
        scores = oracle.bm25(query, documents)
        hits = client.vector_stores.search(store, query=" ".join(query), max_num_results=50).data
        found = {hit.filename: hit.score for hit in hits}
        expected = sorted((i for i, score in enumerate(scores) if score > 1e-4), key=lambda i: -scores[i])
        assert [*found] == [str(i) for i in expected]
        assert names(client, store, [*query, words[0]], max_num_results=50) == [*found], "a common word says nothing"
        ratios = [found[str(i)] / scores[i] for i in expected]
        assert max(ratios) == pytest.approx(min(ratios), rel=1e-6)
        assert all(0 < score <= 1 for score in found.values())
        compared += len(found)
    assert compared > 100


def test_another_store_does_not_change_scores(client: OpenAI) -> None:
    def made() -> str:
        return store_of(client, {"a": "rare and common", "b": "common", "c": "something else", "d": "more"})

    def scores(store: str) -> list[float]:
        return [hit.score for hit in client.vector_stores.search(store, query="rare common").data]

    first = made()
    before = scores(first)
    second = store_of(client, {str(i): "rare" for i in range(9)})
    assert scores(first) == before == scores(made())
    client.vector_stores.delete(second)


def test_options_of_a_search(client: OpenAI) -> None:
    store = store_of(client, {"a": "red fox jumps", "b": "red dog", "c": "blue whale", "d": "green tree", "e": "sky"})
    page = client.vector_stores.search(store, query=["red fox", "whale"], max_num_results=3, rewrite_query=True)
    assert [hit.filename for hit in page.data] == ["a", "c", "b"]
    assert page.data[0].content[0].text == "red fox jumps"
    assert len(names(client, store, "red", max_num_results=1)) == 1
    best = page.data[0].score
    kept = names(client, store, ["red fox", "whale"], ranking_options={"score_threshold": best, "ranker": "auto"})
    assert kept == ["a"]
    assert names(client, store, "foxes") == ["a"], "English words are found in their other forms"


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("東京の天気", ["ja"]),
        ("天気予報", ["ja"]),
        ("서울은", ["ko"]),
        ("กรุงเทพ", ["th"]),
        ("resume CAFE", ["fr"]),
        ("STRASSE Straße", ["de"]),
        ("привет", ["ru"]),
        ("🙂", []),
        ("\ud7ff\u200b ,.!", []),
        ('NEAR("a" b*) OR text:x AND -y ^', ["odd"]),
        ('"', []),
        ("'; DROP TABLE stores; --", ["odd"]),
        ("x" * 8192, []),
    ],
)
def test_queries_in_any_script_and_syntax(client: OpenAI, unicode_store: str, query: str, expected: list[str]) -> None:
    assert names(client, unicode_store, query) == expected


@pytest.fixture(scope="module")
def unicode_store(client: OpenAI) -> str:
    return store_of(
        client,
        {
            "ja": "明日の東京の天気は晴れです。",
            "ko": "서울은 한국의 수도이다",
            "th": "กรุงเทพมหานครเป็นเมืองหลวง",
            "fr": "Un résumé au café",
            "de": "Die Straße ist lang",
            "ru": "Привет, мир",
            "odd": "near b drop; tables y",
            "empty": "🙂🙂",
        },
    )


def test_deletes_while_searches_run(client: OpenAI) -> None:
    store = store_of(client, {f"{i}.txt": f"common word number{i} " * 40 for i in range(30)})
    ids = [file.id for file in client.vector_stores.files.list(store, limit=100)]
    wrong: list[BaseException] = []
    over = threading.Event()

    def ask() -> None:
        try:
            while not over.is_set():
                hits = client.vector_stores.search(store, query="number3 number7 word", max_num_results=50).data
                assert all(hit.content[0].text for hit in hits)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for file_id in ids[:-1]:
        client.vector_stores.files.delete(file_id, vector_store_id=store)
    over.set()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(names(client, store, "common", max_num_results=50)) == len(
        client.vector_stores.search(store, query="word", max_num_results=50).data
    )
    assert client.vector_stores.retrieve(store).file_counts.total == 1


# ---- limits, and requests that are wrong ----


def test_limits_are_413(client: OpenAI) -> None:
    def status(ask: Any) -> tuple[int, str]:
        with pytest.raises(openai.APIStatusError) as caught:
            ask()
        return caught.value.status_code, str(caught.value.code)

    store = client.vector_stores.create().id
    large = upload(client, "large.txt", b"x" * 300_001)
    add = client.vector_stores.files.create
    assert status(lambda: add(store, file_id=large)) == (413, "file_too_large")
    most = upload(client, "most.txt", b"word " * 20_000)
    add(store, file_id=most, chunking_strategy=SMALL)
    settled(client, store)
    (file,) = client.vector_stores.files.list(store).data
    assert (file.status, file.usage_bytes) == ("failed", 0)
    assert file.last_error is not None
    assert file.last_error.message == "There is no more room: the files of a key may have 1500 chunks."
    assert names(client, store, "word") == []
    there = len([*client.vector_stores.list(limit=100)])
    made = [client.vector_stores.create().id for _ in range(60 - there)]
    assert status(client.vector_stores.create) == (413, "storage_limit_exceeded")
    for name in made:
        client.vector_stores.delete(name)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"expires_after": {"anchor": "created_at", "days": 1}}, "expires_after.anchor"),
        ("", {"expires_after": {"anchor": "last_active_at", "days": 0}}, "expires_after.days"),
        ("", {"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ("", {"file_ids": ["file-none"]}, "file_ids[0]"),
        ("/{}/files", {"file_id": "file-none"}, "file_id"),
        ("/{}/files", {}, "file_id"),
        ("/{}/files", {"file_id": "{file}", "attributes": {"a": "x" * 513}}, "attributes"),
        ("/{}/files", {"file_id": "{file}", "attributes": {"a": [1]}}, "attributes[...]"),
        ("/{}/files", {"file_id": "{file}", "chunking_strategy": {"type": "static"}}, "chunking_strategy.static"),
        (
            "/{}/files",
            {
                "file_id": "{file}",
                "chunking_strategy": {
                    "type": "static",
                    "static": {"max_chunk_size_tokens": 99, "chunk_overlap_tokens": 0},
                },
            },
            "chunking_strategy.static.max_chunk_size_tokens",
        ),
        (
            "/{}/files",
            {
                "file_id": "{file}",
                "chunking_strategy": {
                    "type": "static",
                    "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 51},
                },
            },
            "chunking_strategy.static.chunk_overlap_tokens",
        ),
        ("/{}/file_batches", {}, "file_ids"),
        ("/{}/file_batches", {"files": [{"file_id": "file-none"}]}, "files[0]"),
        ("/{}/search", {"query": ""}, "query"),
        ("/{}/search", {"query": "x", "max_num_results": 51}, "max_num_results"),
        ("/{}/search", {"query": "x", "filters": {"type": "is", "key": "a", "value": 1}}, "filters.type"),
        ("/{}/search", {"query": "x", "filters": {"type": "eq", "key": "a", "value": [1]}}, "filters.value"),
        ("/{}/search", {"query": "x", "filters": {"type": "in", "key": "a", "value": 1}}, "filters.value"),
        ("/{}/search", {"query": "x", "filters": {"type": "gt", "key": "a", "value": True}}, "filters.type"),
        ("/{}/search", {"query": "x", "filters": {"type": "or", "filters": [{}]}}, "filters.filters[0].key"),
        (
            "/{}/search",
            {"query": "x", "ranking_options": {"hybrid_search": {"embedding_weight": 1, "text_weight": 1}}},
            "ranking_options.hybrid_search.embedding_weight",
        ),
    ],
)
def test_wrong_requests_are_named(client: OpenAI, unicode_store: str, path: str, body: Any, param: str) -> None:
    file_id = client.vector_stores.files.list(unicode_store, limit=1).data[0].id
    filled = json.loads(json.dumps(body).replace("{file}", file_id))
    with pytest.raises(openai.APIStatusError) as caught:
        client.post(f"/vector_stores{path.format(unicode_store)}", body=filled, cast_to=object)
    assert caught.value.status_code in (400, 404)
    assert caught.value.param == param


def test_a_filter_is_not_nested_without_end(client: OpenAI, unicode_store: str) -> None:
    wanted: Any = compare("eq", "a", 1)
    for _ in range(9):
        wanted = {"type": "and", "filters": [wanted]}
    with pytest.raises(openai.BadRequestError, match="conditions"):
        names(client, unicode_store, "x", filters=wanted)
