"""Ids that clients choose or send: long ones, and ones with slashes."""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from oscine.api.common.ids import MAX_ID
from tests.api.scripted_server import ScriptedServer
from tests.extensions.apis.items import Json, is_refused, new, said

LONG = "x" * (MAX_ID + 1)
ODD = ["a/b+c==/", "/", "a b?c#d%2Fe", "..", "ü\u0000/items/x", "a\nb", "msg_1\n"]


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with ScriptedServer(model_folder, files_dir=str(tmp_path_factory.mktemp("files"))) as server:
        t = server.tokenizer
        server.says(t.channel, "final", t.message, "ok", t.return_)
        yield server


def test_an_id_in_a_path_that_is_too_long_is_refused(server: ScriptedServer) -> None:
    num_refused = 0
    for path, methods in server.get("/openapi.json").json()["paths"].items():
        names = [name for name in re.findall(r"{(\w+)}", path) if name.endswith("id")]
        for method, name in ((method, name) for method in methods for name in names):
            url = path.format(**dict.fromkeys(names, "x") | {name: LONG})
            is_refused(server.request(method.upper(), url, {}, {}), name, f"at most {MAX_ID}")
            longest = path.format(**dict.fromkeys(names, "x" * MAX_ID))
            assert "length" not in server.request(method.upper(), longest, {}, {}).text
            num_refused += 1
    assert num_refused >= 20


REFUSED: list[tuple[str, Json, str]] = [
    ("/v1/responses", {"input": [said(id=LONG)]}, "input[0].id"),
    ("/v1/responses", {"input": [said(), {"type": "item_reference", "id": 70_000 * "x"}]}, "input[1].id"),
    ("/v1/responses", {"input": [{"id": LONG}]}, "input[0].id"),
    ("/v1/responses", {"input": "hi", "previous_response_id": LONG}, "previous_response_id"),
    ("/v1/responses", {"input": "hi", "conversation": LONG}, "conversation"),
    ("/v1/responses", {"input": "hi", "conversation": {"id": LONG}}, "conversation.id"),
    ("/v1/responses/input_tokens", {"input": [said(id=LONG)]}, "input[0].id"),
    ("/v1/responses/compact", {"model": "m", "input": "hi", "previous_response_id": LONG}, "previous_response_id"),
    ("/v1/conversations", {"items": [said(id=70_000 * "x")]}, "items[0].id"),
    (
        "/v1/batches",
        {"input_file_id": LONG, "endpoint": "/v1/responses", "completion_window": "24h"},
        "input_file_id",
    ),
    ("/v1/vector_stores", {"file_ids": [LONG]}, "file_ids[0]"),
]


@pytest.mark.parametrize(("path", "body", "param"), REFUSED)
def test_an_id_in_a_body_that_is_too_long_is_refused(server: ScriptedServer, path: str, body: Json, param: str) -> None:
    is_refused(server.post(path, body), param, f"its length must be at most {MAX_ID}")


@pytest.mark.parametrize("item_id", [*ODD, "y" * MAX_ID])
def test_an_item_is_found_by_its_id_whatever_characters_it_has(server: ScriptedServer, item_id: str) -> None:
    conversation = new(server, said("first"), said("odd", id=item_id), said("last"))
    encoded = quote(item_id, safe="").replace(".", "%2E")
    url = f"{conversation}/items/{encoded}"
    assert server.get(url).json()["id"] == item_id
    assert server.delete(url).status_code == 200
    assert server.get(url).status_code == 404
    behind = server.get(f"{conversation}/items?order=asc&after={encoded}").json()["data"]
    assert [item["content"][0]["text"] for item in behind] == ["last"]
