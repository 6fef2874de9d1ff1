"""Items of an input beside those that are stored: references, and ids that are there already."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.scripted_server import ScriptedServer
from tests.extensions.apis.items import Json, is_refused, new, said


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(model_folder) as server:
        t = server.tokenizer
        server.says(t.channel, "final", t.message, "ok", t.return_)
        yield server


def texts(server: ScriptedServer, conversation: str) -> list[str]:
    items = server.get(f"{conversation}/items?order=asc").json()["data"]
    return [item["content"][0]["text"] for item in items]


@pytest.mark.parametrize("wrong", [{"type": "item_reference"}, {"type": "item_reference", "id": {"a": 1}}])
def test_a_reference_without_an_id_is_refused(server: ScriptedServer, wrong: Json) -> None:
    is_refused(server.post("/v1/responses", {"input": [wrong]}), "input[0].id", "required|Expected `str`")
    is_refused(server.post("/v1/conversations", {"items": [wrong]}), "items[0].id", "required|Expected `str`")


def duplicate(answer: Any, param: str, item_id: str) -> None:
    is_refused(answer, param, f"^Duplicate item found with id {item_id}\\.")


def test_an_item_with_the_id_of_another_one_of_its_conversation_is_refused(server: ScriptedServer) -> None:
    """An answer that lists it would say that it is kept."""
    conversation = new(server, said("first", id="msg_1"))
    add = f"{conversation}/items"
    duplicate(server.post(add, {"items": [said("second"), said("other", id="msg_1")]}), "items[1].id", "msg_1")
    duplicate(server.post(add, {"items": [said(id="msg_2"), said(id="msg_2")]}), "items[1].id", "msg_2")
    duplicate(server.post("/v1/conversations", {"items": [said(id="a"), said(id="a")]}), "items[1].id", "a")
    given = {"conversation": conversation.rpartition("/")[2], "input": [said("third", id="msg_1")]}
    duplicate(server.post("/v1/responses", given), "input[0].id", "msg_1")
    assert texts(server, conversation) == ["first"]
    assert server.delete(f"{add}/msg_1").status_code == 200
    assert server.post(add, {"items": [said("anew", id="msg_1")]}).status_code == 200
    assert texts(server, conversation) == ["anew"]


def test_an_id_with_nul_is_found_again(server: ScriptedServer) -> None:
    conversation = new(server, said("first", id="a\0b"))
    duplicate(server.post(f"{conversation}/items", {"items": [said("second", id="a\0b")]}), "items[0].id", r"a\\x00b")
    assert server.post(f"{conversation}/items", {"items": [said("third", id="a")]}).status_code == 200
    assert texts(server, conversation) == ["first", "third"]


def test_without_a_conversation_items_may_share_an_id(server: ScriptedServer) -> None:
    """Some clients give all items one id, or a call and its result."""
    call = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"}
    result = {"type": "function_call_output", "id": "fc_1", "call_id": "c", "output": "done"}
    first = server.post("/v1/responses", {"input": [said("first", id="__fake_id__"), call, result]})
    assert first.status_code == 200, first.text
    again = {"input": [said("second", id="__fake_id__")], "previous_response_id": first.json()["id"]}
    assert server.post("/v1/responses", again).status_code == 200
    prompt = server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
    assert all(text in prompt for text in ("first", "done", "second"))


def test_an_item_with_content_is_taken_as_given_whatever_is_stored(server: ScriptedServer) -> None:
    first = server.post("/v1/responses", {"input": [said("stored", id="msg_s")]}).json()
    second = server.post("/v1/responses", {"input": [said("given", id="msg_s")]}).json()
    assert "given" in server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
    for response, text in ((first, "stored"), (second, "given")):
        (item,) = server.get(f"/v1/responses/{response['id']}/input_items").json()["data"]
        assert (item["id"], item["content"][0]["text"]) == ("msg_s", text)
    conversation = new(server, said("of its own", id="msg_s"))
    assert texts(server, conversation) == ["of its own"]


def test_a_conversation_takes_references_to_stored_items(server: ScriptedServer) -> None:
    first = server.post("/v1/responses", {"input": [said("asked", id="msg_r")]}).json()
    references = [{"type": "item_reference", "id": "msg_r"}, {"type": None, "id": first["output"][-1]["id"]}]
    assert texts(server, new(server, *references)) == ["asked", "ok"]
    is_refused(server.post("/v1/conversations", {"items": [{"id": "msg_none"}]}), "items[0].id", "no stored item")
