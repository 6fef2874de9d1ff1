"""A model is found by the name that Ollama would give it, in every API."""

from pathlib import Path

import pytest

from oscine.api.serving.names import meant_by, ollama_name
from tests.api.scripted_server import ScriptedServer


@pytest.mark.parametrize(
    ("name", "spelled"),
    [
        ("openai/gpt-oss-20b", "gpt-oss:20b"),
        ("gpt-oss-120b", "gpt-oss:120b"),
        ("unsloth/gpt-oss-20b-BF16", "gpt-oss:20b-BF16"),
        ("openai/gpt-oss-safeguard-20b", "gpt-oss-safeguard:20b"),
        ("gpt-oss:20b", "gpt-oss:20b"),
        ("oscine-nano", "oscine-nano:latest"),
        ("team/model", "team/model:latest"),
        ("host:5000/team/model", "host:5000/team/model:latest"),
        ("", ":latest"),
    ],
)
def test_a_name_in_ollamas_spelling(name: str, spelled: str) -> None:
    assert ollama_name(name) == spelled
    assert ollama_name(spelled) == spelled


@pytest.mark.parametrize(
    ("asked", "served", "found"),
    [
        ("gpt-oss:20b", ["openai/gpt-oss-120b", "openai/gpt-oss-20b"], "openai/gpt-oss-20b"),
        ("GPT-OSS:20B", ["gpt-oss-20b"], "gpt-oss-20b"),
        ("gpt-oss", ["openai/gpt-oss-20b"], "openai/gpt-oss-20b"),
        ("gpt-oss:latest", ["openai/gpt-oss-120b", "openai/gpt-oss-20b"], "openai/gpt-oss-120b"),
        ("gpt-oss:latest", ["openai/gpt-oss-20b", "gpt-oss"], "gpt-oss"),
        ("openai/gpt-oss-20b", ["gpt-oss:20b"], "gpt-oss:20b"),
        ("oscine-nano:latest", ["oscine-nano"], "oscine-nano"),
        ("oscine-nano", ["oscine-nano:latest"], "oscine-nano:latest"),
        ("gpt-oss:120b", ["openai/gpt-oss-20b"], None),
        ("oscine-nano:1b", ["oscine-nano"], None),
        ("gpt-oss", ["oscine-nano"], None),
        ("", ["oscine-nano"], None),
        ("other", [], None),
    ],
)
def test_the_served_name_for_a_requested_name(asked: str, served: list[str], found: str | None) -> None:
    assert meant_by(asked, served) == found


@pytest.mark.needs("apis")
def test_names_of_ollamas_list_work_in_every_api(model_folder: Path) -> None:
    with ScriptedServer(model_folder, served_model_names=("openai/gpt-oss-20b", "mine")) as server:
        listed = [model["name"] for model in server.get("/api/tags").json()["models"]]
        assert listed == ["gpt-oss:20b", "mine:latest"]
        message = [{"role": "user", "content": "hi"}]
        for name in (*listed, "gpt-oss"):
            assert server.chat(model=name)["model"] == name
            assert server.post("/v1/responses", {"model": name, "input": "hi"}).status_code == 200
            anthropic = {"model": name, "messages": message, "max_tokens": 5}
            assert server.post("/v1/messages", anthropic).status_code == 200
            assert server.post("/api/chat", {"model": name, "messages": message}).status_code == 200
        missing = server.post("/v1/chat/completions", {"model": "gpt-oss:120b", "messages": message})
        assert missing.status_code == 404


@pytest.mark.needs("apis")
def test_an_exact_name_comes_before_a_spelling(model_folder: Path) -> None:
    with ScriptedServer(model_folder, served_model_names=("mine", "mine:latest")) as server:
        assert [model["name"] for model in server.get("/api/tags").json()["models"]] == ["mine:latest"]
        assert server.chat(model="mine")["model"] == "mine"
