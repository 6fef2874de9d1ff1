"""The tool `file_search` in responses: its items and events, citations, keys and errors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.scripted_server import ScriptedServer
from tests.extensions.apis.response_stream import check_response, check_stream, parse
from tests.extensions.apis.test_response_tools import answer, call, plays
from tests.waiting import wait_until

FILES = {
    "wrens.md": "A wren is a small brown bird that sings.",
    "boats.md": "A boat floats on water.",
    "trains.md": "Trains run on rails.",
    "odd】\nname.md": "Owls hunt at night.",
}
INCLUDE = ["file_search_call.results"]
ASK = json.dumps({"queries": ["small bird", "boat"]})


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(model_folder, files_dir=":temporary:") as server:
        yield server


@pytest.fixture(scope="module")
def store(server: ScriptedServer) -> str:
    """The id of a store with all files."""
    files = [{"file_id": upload(server, name, text), "attributes": {"name": name}} for name, text in FILES.items()]
    made: str = server.post("/v1/vector_stores", {"name": "test"}).json()["id"]
    assert server.post(f"/v1/vector_stores/{made}/file_batches", {"files": files}).status_code == 200
    wait_until(lambda: server.get(f"/v1/vector_stores/{made}").json()["status"] == "completed", "the files")
    return made


def upload(server: ScriptedServer, name: str, text: str) -> str:
    escaped = name.replace("\n", "%0A")
    body = (
        f'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
        f'--b\r\nContent-Disposition: form-data; name="file"; filename="{escaped}"\r\n\r\n{text}\r\n--b--\r\n'
    )
    form = {"Content-Type": "multipart/form-data; boundary=b"}
    return str(server.run(server._request("POST", "/v1/files", body.encode(), form)).json()["id"])


def tool(store: str, **more: Any) -> dict[str, Any]:
    return {"type": "file_search", "vector_store_ids": [store], **more}


def stream(server: ScriptedServer, **parameters: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    events = parse(server.post("/v1/responses", {"input": "hi", "stream": True, **parameters}).text)
    response = check_stream(events)
    assert response is not None
    return response, events


def searched(server: ScriptedServer, arguments: str, **parameters: Any) -> dict[str, Any]:
    """The item of a call with these arguments."""
    plays(server, call(server, "file_search.search", arguments, "commentary"), answer(server, "Ok."))
    response, _ = stream(server, include=INCLUDE, **parameters)
    (item,) = (item for item in response["output"] if item["type"] == "file_search_call")
    return dict(item)


def test_a_search_is_an_item_with_events_and_results(server: ScriptedServer, store: str) -> None:
    plays(server, call(server, "file_search.search", ASK, "commentary"), answer(server, "Both."))
    response, events = stream(server, tools=[tool(store)], include=INCLUDE)
    item = response["output"][1]
    assert (item["type"], item["status"], item["queries"]) == ("file_search_call", "completed", ["small bird", "boat"])
    assert [result["filename"] for result in item["results"]] == ["wrens.md", "boats.md"]
    first = item["results"][0]
    assert first["text"] == FILES["wrens.md"]
    assert first["attributes"] == {"name": "wrens.md"}
    assert 0 < first["score"] <= 1
    kinds = [event["type"] for event in events if "file_search" in event["type"]]
    assert kinds == [f"response.file_search_call.{step}" for step in ("in_progress", "searching", "completed")]
    assert response["tools"] == [tool(store)]
    plays(server, call(server, "file_search.search", ASK, "commentary"), answer(server, "Both."))
    plain, _ = stream(server, tools=[tool(store)])
    assert plain["output"][1]["results"] is None


def test_the_model_is_told_of_the_tool_and_reads_marked_results(server: ScriptedServer, store: str) -> None:
    plays(server, call(server, "file_search.search", ASK, "commentary"), answer(server, "Both."))
    stream(server, tools=[tool(store)])
    first, second = server.engine.requests[-2:]
    prompt = server.tokenizer.decode(first.prompt_token_ids)
    assert "namespace file_search {" in prompt
    assert "type search = (_: {\nqueries: string[],\n}) => any;" in prompt
    behind = server.tokenizer.decode(second.prompt_token_ids[len(first.prompt_token_ids) :])
    said = f"【0:0†wrens.md】\n{FILES['wrens.md']}\n\n【0:1†boats.md】\n{FILES['boats.md']}"
    assert f"<|start|>file_search.search to=assistant<|channel|>commentary<|message|>{said}<|end|>" in behind


@pytest.mark.parametrize("size", [1, 20])
def test_citations_are_annotations_with_their_place(server: ScriptedServer, store: str, size: int) -> None:
    text = "Wrens【0:0†wrens.md】, boats【0:1】; not【0:2†x】【3:0†x】【0†L1】."
    plays(server, call(server, "file_search.search", ASK, "commentary"), answer(server, text), size=size)
    response, events = stream(server, tools=[tool(store)])
    ids = {file["filename"]: file["id"] for file in server.get("/v1/files").json()["data"]}
    part = response["output"][-1]["content"][0]
    assert part["text"] == text
    expected = [
        {"type": "file_citation", "index": text.index(mark), "file_id": ids[name], "filename": name}
        for mark, name in (("【0:0", "wrens.md"), ("【0:1", "boats.md"))
    ]
    assert part["annotations"] == expected
    sent = [event["annotation"] for event in events if event["type"] == "response.output_text.annotation.added"]
    assert sent == expected


def test_a_later_turn_cites_what_an_earlier_one_found(server: ScriptedServer, store: str) -> None:
    plays(server, call(server, "file_search.search", ASK, "commentary"), answer(server, "Yes."))
    first, _ = stream(server, tools=[tool(store)])
    again = call(server, "file_search.search", '{"queries": ["rails"]}', "commentary")
    plays(server, again, answer(server, "【0:1†boats.md】【1:0†trains.md】"))
    second, _ = stream(server, tools=[tool(store)], previous_response_id=first["id"])
    cited = [one["filename"] for one in second["output"][-1]["content"][0]["annotations"]]
    assert cited == ["boats.md", "trains.md"]


def test_items_that_a_client_sends_back_are_read(server: ScriptedServer, store: str) -> None:
    plays(server, call(server, "file_search.search", ASK, "commentary"), answer(server, "Both."))
    response, _ = stream(server, tools=[tool(store)], include=INCLUDE, store=False)
    plays(server, answer(server, "Again."))
    history = [{"role": "user", "content": "hi"}, *response["output"], {"role": "user", "content": "and?"}]
    body = {"input": history, "tools": [tool(store)]}
    check_response(server.post("/v1/responses", body).json())
    assert FILES["wrens.md"] in server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)


def test_options_of_the_tool(server: ScriptedServer, store: str) -> None:
    words = '{"queries": ["bird boat water rails"]}'
    assert len(searched(server, words, tools=[tool(store, max_num_results=1)])["results"]) == 1
    wanted = {"type": "eq", "key": "name", "value": "trains.md"}
    (only,) = searched(server, words, tools=[tool(store, filters=wanted)])["results"]
    assert only["filename"] == "trains.md"
    assert not searched(server, words, tools=[tool(store, ranking_options={"score_threshold": 1})])["results"]
    forced = searched(server, words, tools=[tool(store)], tool_choice={"type": "file_search"})
    assert len(forced["results"]) == 3


def test_a_file_name_cannot_break_a_mark(server: ScriptedServer, store: str) -> None:
    search = call(server, "file_search.search", '{"queries": ["owls"]}', "commentary")
    plays(server, search, answer(server, "【0:0†oddname.md】"))
    response, _ = stream(server, tools=[tool(store)])
    assert len(response["output"][-1]["content"][0]["annotations"]) == 1
    prompt = server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
    assert "†odd" in prompt
    assert "】\nOwls hunt" in prompt


@pytest.mark.parametrize("arguments", ["no json", "{}", '{"queries": []}', '{"queries": [""]}', "[" * 99])
def test_a_malformed_call_fails_alone(server: ScriptedServer, store: str, arguments: str) -> None:
    item = searched(server, arguments, tools=[tool(store)])
    assert (item["status"], item["queries"], item["results"]) == ("failed", [], None)


@pytest.mark.parametrize(
    ("given", "status", "param"),
    [
        ({"vector_store_ids": []}, 400, "tools.vector_store_ids"),
        ({"vector_store_ids": ["vs_none"]}, 404, "vector_store_id"),
        ({"max_num_results": 51}, 400, "tools.max_num_results"),
        ({"filters": {"type": "and", "filters": [{"type": "eq"}]}}, 400, "tools.filters.filters[0].key"),
        ({"ranking_options": {"score_threshold": 2}}, 400, "tools.ranking_options.score_threshold"),
    ],
)
def test_wrong_tools_are_named(
    server: ScriptedServer, store: str, given: dict[str, Any], status: int, param: str
) -> None:
    refused = server.post("/v1/responses", {"input": "hi", "tools": [{**tool(store), **given}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)


def test_without_files_the_tool_is_refused_alone(model_folder: Path) -> None:
    with ScriptedServer(model_folder) as server:
        refused = server.post("/v1/responses", {"input": "hi", "tools": [tool("vs_1")]})
        assert refused.status_code in (400, 501), refused.text
        assert "files" in refused.json()["error"]["message"]
