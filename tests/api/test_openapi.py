"""/openapi.json tells the truth: its paths are the routes, its examples are served, its schemas fit the answers."""

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from starlette.applications import Starlette
from starlette.routing import Route

from oscine.api.apis import make_service
from oscine.api.app import create_app, websockets_of
from oscine.api.common.errors import Error
from oscine.api.openai import answers
from oscine.api.openapi import Operation, describe, plain_path
from oscine.api.routes import endpoints
from oscine.settings.config import Config, ServerOptions
from tests.api.scripted_server import ScriptedServer
from tests.server import ServerProcess


@pytest.fixture(scope="module")
def table(model_folder: Path) -> list[Operation]:
    return endpoints(make_service(Config()))


@pytest.fixture(scope="module")
def document(nano_server: ServerProcess) -> dict[str, Any]:
    return dict(json.loads(nano_server.get("/openapi.json")))


def routes_of(app: Any) -> list[Route]:
    while not isinstance(app, Starlette):
        app = app.app
    return [route for route in app.routes if isinstance(route, Route)]


def test_every_route_of_the_api_is_described_and_every_path_is_a_route(document: dict[str, Any]) -> None:
    app = create_app(make_service(Config()))
    routes = {
        (route.path_format, method)
        for route in routes_of(app)
        for method in (route.methods or set()) - {"HEAD"}
        if route.path != "/" and not route.path.startswith("/playground/")  # a page, not the API
    }
    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert described == routes - {(path, "GET") for path in websockets_of(make_service(Config()))}  # 426 otherwise


def test_the_document_follows_the_rules_of_openapi(document: dict[str, Any]) -> None:
    ids = [operation["operationId"] for methods in document["paths"].values() for operation in methods.values()]
    assert len(ids) == len(set(ids))
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(document)
    for reference in {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}:
        assert reference in document["components"]["schemas"]


def valid(document: dict[str, Any], kind: str, value: Any) -> None:
    reference = {"$ref": f"#/components/schemas/{kind}"}
    schema = {"components": document["components"], **reference}
    jsonschema.Draft202012Validator(schema).validate(value)


@pytest.mark.needs("apis")
def test_every_example_is_served_with_an_answer_as_described(
    nano_server: ServerProcess, document: dict[str, Any]
) -> None:
    bodies = 0
    form = {"files": {"file": b"{}"}, "data": {"purpose": "batch"}}
    uploaded = httpx.post(f"{nano_server.url}/v1/files", **form).json()
    valid(document, "FileObject", uploaded)
    files = {"file_ids": [uploaded["id"]]}
    store = httpx.post(f"{nano_server.url}/v1/vector_stores", json=files).json()
    batch = httpx.post(f"{nano_server.url}/v1/vector_stores/{store['id']}/file_batches", json=files).json()
    conversation = httpx.post(f"{nano_server.url}/v1/conversations", json={}).json()["id"]
    made = {"name": nano_server.model(), "id": store["id"], "file_id": uploaded["id"], "batch_id": batch["id"]}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if "application/json" not in operation.get("requestBody", {}).get("content", ()):
                continue
            if path.endswith("lora_adapter"):  # of a server that was started for them
                continue
            bodies += 1
            content = operation["requestBody"]["content"]["application/json"]
            valid(document, content["schema"]["$ref"].rpartition("/")[2], content["example"])
            example = content["example"]
            if "model" in example:
                example = {**example, "model": nano_server.model()}
            example |= {name: uploaded["id"] for name in ("input_file_id", "file_id") if name in example}
            example |= files if "file_ids" in example else {}
            of_path = {"id": conversation} if path.startswith("/v1/conversations") else {}
            url = nano_server.url + path.format(**made | of_path)
            response = httpx.request(method, url, json=example, timeout=60)
            assert response.status_code == 200, f"{path}: {response.text}"
            answer = operation["responses"]["200"]["content"].get("application/json")
            if answer:  # others are events, or several kinds of answers
                valid(document, answer["schema"]["$ref"].rpartition("/")[2], response.json())
    assert bodies >= 4


def test_no_answer_has_a_field_that_is_not_described(nano_server: ServerProcess, document: dict[str, Any]) -> None:
    talk = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "logprobs": True, "top_logprobs": 1}
    requests: list[tuple[str, str, Any, type]] = [
        ("POST", "/v1/chat/completions", talk, answers.ChatCompletion),
        ("POST", "/v1/completions", {"prompt": "a", "logprobs": 2, "echo": True}, answers.Completion),
        ("POST", "/tokenize", {"prompt": "abc", "return_token_strs": True}, answers.Tokens),
        ("POST", "/detokenize", {"tokens": [65]}, answers.Text),
        ("GET", "/v1/models", None, answers.ModelList),
        ("GET", f"/v1/models/{nano_server.model()}", None, answers.ModelCard),
        ("GET", "/health", None, answers.HealthReport),
        ("GET", "/v1/health/live", None, answers.Status),
        ("GET", "/version", None, answers.Version),
        ("GET", "/v1/models/none", None, Error),
    ]
    for method, path, body, kind in requests:
        found = httpx.request(method, nano_server.url + path, json=body, timeout=60).json()
        valid(document, kind.__name__, found)
        unknown = fields_beyond(document["components"]["schemas"], kind.__name__, found)
        assert not unknown, f"{path}: {unknown}"


def fields_beyond(schemas: dict[str, Any], kind: str, value: Any) -> set[str]:
    """Fields of an answer that its schema does not name, through objects and lists of objects."""
    properties = schemas[kind]["properties"]
    unknown = set(value) - set(properties)
    for name, inner in value.items():
        text = json.dumps(properties.get(name, {}))
        if "#/components/schemas/" not in text:
            continue
        inner_kind = text.split("#/components/schemas/")[1].split('"')[0]
        for item in inner if isinstance(inner, list) else [inner]:
            if isinstance(item, dict):
                unknown |= fields_beyond(schemas, inner_kind, item)
    return unknown


STEP = 0.001
EXAMPLE = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "logprobs": True}


@pytest.mark.parametrize("limit", ["minimum", "maximum"])
def test_the_described_bounds_are_those_that_hold(
    fake_server: ServerProcess, document: dict[str, Any], limit: str
) -> None:
    properties = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    choices = ((name, choice) for name, field in properties.items() for choice in field.get("anyOf", ()))
    bounded = {name: choice for name, choice in choices if limit in choice}
    assert bounded
    for name, field in bounded.items():
        step = 1 if field["type"] == "integer" else STEP
        outward = step if limit == "maximum" else -step
        edge = field[limit]
        for value, statuses in (
            (edge, (200, 503)),
            (edge + outward, (400,)),
        ):  # 503: 128 choices may be too many at once
            body = {**EXAMPLE, name: value}
            response = httpx.post(f"{fake_server.url}/v1/chat/completions", json=body, timeout=60)
            assert response.status_code in statuses, f"{name}={value}: {response.text}"


@pytest.mark.long
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_what_is_said_to_be_refused_is(scripted: ScriptedServer, path: str) -> None:
    document = scripted.get("/openapi.json").json()
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    properties = document["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]["properties"]
    refused = [name for name, field in properties.items() if field.get("enum") == [None, False, []]]
    assert len(refused) >= 8
    for name in refused:
        for value in ("x", 1, {"a": "b"}, [1]):
            error = scripted.post(path, content["example"] | {name: value}).json()["error"]
            assert (error["param"] or "").startswith(name), error
    for nothing in (None, False, []):
        assert scripted.post(path, content["example"] | dict.fromkeys(refused, nothing)).status_code == 200


def test_keys_are_described_where_they_are_asked_for(table: list[Operation]) -> None:
    document = describe(table, keys=True)
    for operation in table:
        described = document["paths"][plain_path(operation)][operation.method.lower()]
        assert ("security" in described) == ("401" in described["responses"]) == (not operation.open)
    assert "security" not in json.dumps(describe(table, keys=False)["paths"])


def test_the_page_asks_nobody_else(nano_server: ServerProcess) -> None:
    response = httpx.get(f"{nano_server.url}/docs")
    assert response.headers["content-type"].startswith("text/html")
    assert "connect-src 'self'" in response.headers["content-security-policy"]
    assert "http://" not in response.text
    assert "https://" not in response.text
    assert "//" not in response.text.replace("</", "")


def test_a_server_with_keys_shows_its_description_without_one(model_folder: Path) -> None:
    service = make_service(Config(server=ServerOptions(api_keys=("sesame",))))
    (route,) = (route for route in routes_of(create_app(service)) if route.path == "/openapi.json")
    assert type(route.app).__name__ != "KeyCheck"
