"""Salts of the prefix cache: a request finds only the prefixes that requests with the same salt left."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.scripted_server import ScriptedServer
from tests.server import ServerProcess

TEXT = "The prompt of somebody else, which is long enough to fill a page of the cache with its tokens. " * 2
QUESTION = [{"role": "user", "content": TEXT}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": QUESTION, "max_tokens": 4},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 4},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 4, "store": False},
    "/v1/messages": {"model": "fake", "messages": QUESTION, "max_tokens": 4},
}


@pytest.fixture(scope="module")
def server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text("- {name: a, key: one}\n- {name: b, key: two}\n")
    names = ("--served-model-name", "fake", "--log-level", "warning")
    with ServerProcess(
        str(model_folder), *names, "--executor", "fake", "--api-keys-file", str(keys), "--cache-salt-by-key"
    ) as server:
        yield server


def cached(server: ServerProcess, path: str, key: str, text: str, salt: str | None = None) -> int:
    """The cached prompt tokens, by the usage of the answer."""
    question = [{"role": "user", "content": text}]
    asked = {"messages": question, "prompt": text, "input": text}
    body = {name: asked.get(name, value) for name, value in BODIES[path].items()} | {"cache_salt": salt}
    answer = httpx.post(server.url + path, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    if path == "/v1/messages":
        return int(usage["cache_read_input_tokens"])
    return int((usage.get("prompt_tokens_details") or usage.get("input_tokens_details"))["cached_tokens"])


@pytest.mark.parametrize("path", BODIES)
def test_no_key_and_no_salt_learns_what_another_has_asked(server: ServerProcess, path: str) -> None:
    """The text for each path differs from its first page on."""
    text = f"{path} {TEXT}"
    cached(server, path, "one", text)
    known = cached(server, path, "one", text)
    assert known > 64
    other = cached(server, path, "two", text)
    assert other < known
    assert cached(server, path, "two", text) == known
    assert cached(server, path, "one", text, "mine") < known
    assert cached(server, path, "one", text, "mine") == known
    assert cached(server, path, "one", text, "yours") < known
    assert cached(server, path, "two", text, "mine") < known


@pytest.mark.parametrize("path", BODIES)
def test_a_salt_has_characters_and_not_too_many(scripted: ScriptedServer, path: str) -> None:
    body = BODIES[path] | ({"model": scripted.service.names[0]} if "model" in BODIES[path] else {})
    for salt in ("", "x" * 1025):
        refused = scripted.post(path, body | {"cache_salt": salt})
        assert refused.status_code == 400
        assert "cache_salt" in refused.json()["error"]["message"]
    assert scripted.post(path, body | {"cache_salt": "mine"}).status_code == 200
    assert [request.cache_salt for request in scripted.engine.requests] == ["mine"]
