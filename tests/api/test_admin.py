"""What needs the right `admin`: which keys and which clients have it, and how the others are refused."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import Response

from oscine.api.apis import make_service
from oscine.api.app import create_app
from oscine.api.common.errors import Error
from oscine.api.http.body import json_response
from oscine.api.interface import Api
from oscine.api.openapi import POST, Operation
from oscine.api.serving.service import Service
from oscine.settings.config import Config, ServerOptions

NOBODY: dict[str, str] = {}
CLIENT, ADMIN, STRANGER = ({"Authorization": f"Bearer {key}"} for key in ("client", "root", "stranger"))
ELSEWHERE = "203.0.113.9"


class Changes(Api):
    """An API with one operation that changes what is served."""

    calls = 0

    @property
    def operations(self) -> list[Operation]:
        return [POST("/change", self.change, "Change the models", admin=True)]

    async def change(self, request: Request) -> Response:
        self.calls += 1
        return json_response({"done": True})


class Server:
    def __init__(self, **options: Any) -> None:
        self.service: Service = make_service(Config(server=ServerOptions(**options)))
        self.changes = self.service.apis["changes"] = Changes(self.service)
        self._app = create_app(self.service)

    def post(self, headers: dict[str, str], client: str = "127.0.0.1", path: str = "/change") -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self._app, raise_app_exceptions=False, client=(client, 50000))
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                return await http.post(path, headers=headers)

        return asyncio.run(ask())

    def statuses(self, *headers: dict[str, str], client: str = "127.0.0.1") -> list[int]:
        return [self.post(one, client).status_code for one in headers]


def code_of(response: httpx.Response) -> str | None:
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error.keys() == {*Error.__annotations__["error"].__struct_fields__}
    assert "\n" not in error["message"]
    code: str | None = error["code"]
    return code


@pytest.mark.parametrize("client", ["127.0.0.1", "::1", ELSEWHERE])
def test_keys_of_the_command_line(client: str) -> None:
    server = Server(api_keys=("client",), admin_keys=("root",))
    assert server.statuses(NOBODY, STRANGER, CLIENT, ADMIN, client=client) == [401, 401, 403, 200]
    assert server.changes.calls == 1
    refused = server.post(CLIENT, client)
    assert code_of(refused) == "admin_required"
    assert "'api-key-1'" in refused.text
    assert "--admin-key" in refused.text
    assert "client" not in refused.text.replace("clients", "")
    assert refused.headers.get("www-authenticate") is None
    assert code_of(server.post(NOBODY, client)) == "invalid_api_key"


def test_keys_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("- {name: team, key: client}\n- {name: boss, key: root, rights: [admin], requests_per_minute: 2}\n")
    server = Server(api_keys_file=str(path))
    assert server.statuses(NOBODY, STRANGER, CLIENT, ADMIN) == [401, 401, 403, 200]
    assert server.post(ADMIN).status_code == 200
    assert code_of(server.post(ADMIN)) == "rate_limit_exceeded"  # a request as any other
    path.write_text("- {name: team, key: client, rights: [admin]}\n")
    server.service.keys.reload()
    assert server.statuses(CLIENT, ADMIN) == [200, 401]


def test_api_keys_alone_give_the_right_to_none() -> None:
    server = Server(api_keys=("client",))
    assert server.statuses(NOBODY, STRANGER, CLIENT) == [401, 401, 403]


def test_an_administrators_key_alone_leaves_the_rest_open() -> None:
    server = Server(admin_keys=("root",))
    assert server.statuses(NOBODY, STRANGER, ADMIN) == [401, 401, 200]
    assert server.statuses(NOBODY, ADMIN, client=ELSEWHERE) == [401, 200]
    assert server.post(NOBODY, path="/v1/chat/completions").status_code == 415  # no key is asked for


def test_an_administrators_key_is_a_key() -> None:
    server = Server(api_keys=("client",), admin_keys=("root",))
    chat = "/v1/chat/completions"
    assert [server.post(one, path=chat).status_code for one in (NOBODY, STRANGER, CLIENT, ADMIN)] == [
        401,
        401,
        415,
        415,
    ]


@pytest.mark.parametrize("client", ["127.0.0.1", "127.9.9.9", "::1"])
def test_without_keys_this_machine_may(client: str) -> None:
    assert Server().statuses(NOBODY, STRANGER, client=client) == [200, 200]


@pytest.mark.parametrize("client", [ELSEWHERE, "10.0.0.1", "2001:db8::1"])
def test_without_keys_others_may_not(client: str) -> None:
    server = Server(host="0.0.0.0")
    refused = server.post(NOBODY, client)
    assert (refused.status_code, code_of(refused)) == (403, "admin_required")
    assert "--admin-key" in refused.text
    assert server.changes.calls == 0


@pytest.mark.parametrize("name", ["X-Forwarded-For", "Forwarded", "X-Real-IP", "Via"])
def test_without_keys_a_proxy_on_this_machine_brings_others(name: str) -> None:
    assert Server().post({name: "127.0.0.1"}).status_code == 403


def test_without_keys_a_web_page_may_not() -> None:
    server = Server()
    assert code_of(server.post({"Origin": "http://evil.example"})) == "origin_not_allowed"
    assert code_of(server.post({"Host": "evil.example"})) == "host_not_allowed"
    assert server.changes.calls == 0
    assert server.post({"Origin": "http://localhost"}).status_code == 200


@pytest.mark.parametrize(
    ("options", "statuses", "is_secured"),
    [
        ({}, {"403"}, False),
        ({"admin_keys": ("root",)}, {"401", "403", "429"}, True),
        ({"api_keys": ("client",)}, {"401", "403", "429"}, True),
    ],
)
def test_the_description_says_what_needs_the_key(options: dict[str, Any], statuses: set[str], is_secured: bool) -> None:
    server = Server(**options)

    async def document() -> Any:
        transport = httpx.ASGITransport(create_app(server.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            return (await http.get("/openapi.json")).json()

    described = asyncio.run(document())
    change = described["paths"]["/change"]["post"]
    assert change["responses"].keys() - {"200"} == statuses
    assert ("security" in change) == is_secured == ("securitySchemes" in described["components"])
    assert ("security" in described["paths"]["/v1/models"]["get"]) == ("api_keys" in options)
