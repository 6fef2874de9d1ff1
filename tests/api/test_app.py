"""What comes before any endpoint: preflights of browsers, the path of a proxy, and clients that ask for a WebSocket."""

from pathlib import Path
from typing import Any

import pytest

from tests.api.scripted_server import ScriptedServer

ORIGIN = "https://app.example"
PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Private-Network": "true"}
UPGRADE = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "eA=="}


def preflight(server: ScriptedServer, origin: str) -> Any:
    return server.request("OPTIONS", "/v1/chat/completions", None, {**PREFLIGHT, "Origin": origin})


def test_a_page_of_a_named_origin_may_reach_a_private_network(model_folder: Path) -> None:
    with ScriptedServer(model_folder, cors_origins=(ORIGIN, "null")) as server:
        for origin in (ORIGIN, "null"):
            answer = preflight(server, origin)
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-private-network"] == "true"
            assert answer.headers["access-control-allow-origin"] == origin
        assert preflight(server, "https://evil.example").status_code == 400
    with ScriptedServer(model_folder, cors_origins=("*",)) as server:
        answer = preflight(server, ORIGIN)
        assert answer.status_code == 400
        assert "access-control-allow-private-network" not in answer.headers


@pytest.mark.needs("apis")
@pytest.mark.parametrize("root", ["/llm", "/llm/", "/a/b/"])
def test_the_path_of_a_proxy_may_end_in_a_slash(model_folder: Path, root: str) -> None:
    path = root.rstrip("/")
    with ScriptedServer(model_folder, root_path=root) as server:
        assert server.get(f"{path}/version").status_code == server.get("/version").status_code == 200
        assert server.get(f"{path}/").text == "Ollama is running"
        for query in ("", "?a=b%20c"):
            led = server.get(f"{path}{query}")
            assert (led.status_code, led.headers["location"]) == (307, f"{path}/{query}")
        assert server.get(f"{path}x/version").status_code == 404


def test_the_path_of_a_proxy_may_be_the_root(model_folder: Path) -> None:
    with ScriptedServer(model_folder, root_path="/") as server:
        assert server.get("/version").status_code == 200


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/realtime", "/api/chat", "/v2/nothing"])
def test_a_websocket_is_not_what_this_server_speaks(scripted: ScriptedServer, path: str) -> None:
    answer = scripted.get(path, UPGRADE)
    assert answer.status_code == 426
    assert answer.headers["upgrade"] == "HTTP/1.1"
    assert answer.headers["connection"] == "close"
    assert "error" in answer.json()


@pytest.mark.needs("apis")
def test_other_upgrades_and_other_requests_are_as_ever(scripted: ScriptedServer) -> None:
    for headers in ({}, {"Connection": "Upgrade", "Upgrade": "h2c"}):
        answer = scripted.get("/v1/responses", headers)
        assert (answer.status_code, answer.headers["upgrade"]) == (426, "websocket")
        assert scripted.get("/v1/messages", headers).status_code == 405
    assert scripted.get("/version", UPGRADE).status_code == 200
