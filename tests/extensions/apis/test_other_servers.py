"""The endpoints of NIM, KServe, Triton Inference Server, SageMaker and vLLM, as their clients use them."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from oscine.extensions.apis.conventions.profiles import PROFILES, find_profile, profile_of
from oscine.settings.config import NANO, CacheOptions, Config
from oscine.types import SamplingParams
from tests.api.scripted_server import ScriptedServer
from tests.fake_model import write_fake_model

NAME = "openai/gpt-oss-20b"  # with a slash, as in paths
GENERATE = f"/v2/models/{NAME}/generate"
OPEN = [
    *("/ping", "/v1/version", "/v1/metrics", "/v2/health/live", "/v2/health/ready", f"/v2/models/{NAME}/ready"),
]
CLOSED = [
    *("/v1/metadata", "/v1/manifest", "/v1/license", "/v2", f"/v2/models/{NAME}", f"/v2/models/{NAME}/config"),
    *("/load", "/server_info", "/tokenizer_info"),
]


@pytest.fixture
def server(model_folder: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(model_folder, served_model_names=(NAME,)) as server:
        yield server


def got(server: ScriptedServer, path: str, status: int = 200) -> Any:
    response = server.get(path)
    assert response.status_code == status, response.text
    return response.json()


# ---- Triton Inference Server ----


def generated(server: ScriptedServer, path: str = GENERATE, **body: Any) -> httpx.Response:
    return server.post(path, {"text_input": "Once upon", **body})


def sampling(server: ScriptedServer) -> SamplingParams:
    return server.engine.requests[-1].sampling


def test_a_text_is_continued(server: ScriptedServer) -> None:
    server.says(" a time", server.tokenizer.endoftext)
    for path in (GENERATE, f"/v2/models/{NAME}/versions/1/generate"):
        answer = generated(server, path, id="42").json()
        assert answer == {"id": "42", "model_name": NAME, "model_version": "1", "text_output": " a time"}
    assert server.engine.requests[-1].prompt_token_ids == server.tokenizer.encode("Once upon")
    assert sampling(server).max_tokens == 16
    whole = generated(server, parameters={"exclude_input_in_output": False}).json()
    assert whole["text_output"] == "Once upon a time"


def test_a_stream_has_the_pieces_as_events(server: ScriptedServer) -> None:
    server.says(" a time, long ago", server.tokenizer.endoftext, size=1)
    response = generated(server, f"{GENERATE}_stream", stream=True, exclude_input_in_output=False)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, end = response.text.split("\n\n")
    assert end == ""
    pieces = [json.loads(event.removeprefix("data: ")) for event in events]
    assert len(pieces) > 2
    assert {piece["model_name"] for piece in pieces} == {NAME}
    assert "".join(piece["text_output"] for piece in pieces) == "Once upon a time, long ago"


def test_parameters_stand_in_the_body_or_in_parameters(server: ScriptedServer) -> None:
    """What LiteLLM and the examples of both backends send."""
    given = {"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "repetition_penalty": 1.5}
    for body in (
        given | {"random_seed": 5, "stop_words": ["", "time"], "bad_words": "", "min_length": 2, "end_id": 2},
        {"parameters": given | {"seed": 5, "stop": ["time"], "bad_words": [""], "min_tokens": 2, "beam_width": 1}},
        {"max_tokens": 100, "parameters": given | {"seed": 5, "stop_words": "time", "min_tokens": 2}},
    ):
        server.says(" a time", server.tokenizer.endoftext)
        answer = generated(server, **body)
        assert answer.json()["text_output"] == " a ", answer.text
        found = sampling(server)
        assert (found.max_tokens, found.temperature, found.top_p, found.top_k) == (7, 0.5, 0.9, 3)
        assert (found.repetition_penalty, found.seed, found.min_tokens) == (1.5, 5, 2)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"text_input": ""}, 400, "text_input"),
        ({"parameters": {"temperature": 9}}, 400, "parameters.temperature"),
        ({"bad_words": ["x"]}, 400, "bad_words"),
        ({"parameters": {"beam_width": 4}}, 400, "'parameters.beam_width'"),
        ({"parameters": {"bad_words": ["x"]}}, 400, "'parameters.bad_words'"),
        ({"parameters": {"typical_p": 0.5}}, 400, "'parameters.typical_p'"),
        ({"lora_path": "x"}, 400, "'lora_path'"),
        ({"max_tokens": 1 << 20}, 400, "context"),
    ],
)
def test_an_error_is_a_text(server: ScriptedServer, body: dict[str, Any], status: int, message: str) -> None:
    response = generated(server, **body)
    assert response.status_code == status
    assert response.json().keys() == {"error"}
    assert message in response.json()["error"]


def test_a_body_need_not_be_declared_as_json(server: ScriptedServer) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert server.request("POST", GENERATE, {"text_input": "hi"}, form).status_code == 200
    foreign = server.request("POST", GENERATE, {"text_input": "hi"}, {**form, "Origin": "https://evil.example"})
    assert (foreign.status_code, foreign.json().keys()) == (403, {"error"})


def test_an_unknown_model_is_404(server: ScriptedServer) -> None:
    for path in ("/v2/models/other", "/v2/models/other/ready"):
        assert got(server, path, 404).keys() == {"error"}
    assert generated(server, "/v2/models/other/generate").status_code == 404


# ---- KServe ----


def test_the_server_and_its_models_are_described(server: ScriptedServer) -> None:
    assert got(server, "/v2")["extensions"] == ["generate"]
    model = got(server, f"/v2/models/{NAME}/versions/1")
    assert (model["name"], model["versions"]) == (NAME, ["1"])
    assert model["inputs"] == [{"name": "text_input", "datatype": "BYTES", "shape": [1]}]
    assert got(server, f"/v2/models/{NAME}/ready") == {"name": NAME, "ready": True}
    for path in (f"/v2/models/{NAME}/config", f"/v2/models/{NAME}/versions/1/config"):
        config = got(server, path)
        assert (config["name"], config["max_batch_size"]) == (NAME, 0)
        assert config["input"] == [{"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]}]
        assert config["model_transaction_policy"] == {"decoupled": True}
    assert "'other' does not exist" in got(server, "/v2/models/other/config", 404)["error"]
    for path in (f"/v2/models/{NAME}/stats", f"/v2/models/{NAME}/trace/setting", f"/v2/models/{NAME}/versions/2"):
        assert got(server, path, 404) == {"error": f"GET {path}: Not Found."}
    server.engine.state = "restarting"
    assert got(server, f"/v2/models/{NAME}/ready", 503) == {"name": NAME, "ready": False}
    assert server.get("/v2/health/live").status_code == 200
    for path in ("/v2/health/ready", "/ping"):
        assert server.get(path).status_code == 503


# ---- SageMaker ----


def test_the_body_of_an_invocation_says_what_it_is(server: ScriptedServer) -> None:
    t = server.tokenizer
    server.says(t.channel, "final", t.message, "4", t.return_)
    messages = [{"role": "user", "content": "2 + 2?"}]
    chat = server.post("/invocations", {"messages": messages, "max_tokens": 20}).json()
    assert (chat["object"], chat["choices"][0]["message"]["content"]) == ("chat.completion", "4")
    assert server.post("/invocations", {"prompt": "2 + 2 ="}).json()["object"] == "text_completion"
    assert server.post("/invocations", {"input": "2 + 2?"}).json()["object"] == "response"
    stream = server.post("/invocations", {"messages": messages, "stream": True})
    assert stream.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "input": "a"}])
def test_an_invocation_of_nothing_is_refused(server: ScriptedServer, body: dict[str, Any]) -> None:
    response = server.post("/invocations", body)
    assert response.status_code == 400
    assert "exactly one of messages, prompt, input" in response.json()["error"]["message"]


# ---- NIM ----


def test_the_deployment_is_described(server: ScriptedServer) -> None:
    license = got(server, "/v1/license")
    assert "Apache License" in license["content"]
    assert license["sha"] == hashlib.sha1(license["content"].encode()).hexdigest()
    metadata = got(server, "/v1/metadata")
    assert metadata["licenseInfo"] == license
    assert [model["shortName"] for model in metadata["modelInfo"]] == [NAME]
    assert got(server, "/v1/version")["release"] == metadata["version"]
    manifest = yaml.safe_load(got(server, "/v1/manifest")["manifest_file"])
    assert manifest["profiles"].keys() == {profile.id for profile in PROFILES}
    assert server.get("/v1/metrics").headers["content-type"] == server.get("/metrics").headers["content-type"]


def test_a_profile_is_found_by_its_id_and_leads_back_to_itself() -> None:
    assert len({profile.id for profile in PROFILES}) == len(PROFILES)
    for profile in PROFILES:
        values = {name: value for name, value in profile.options.items() if name != "profile"}
        assert find_profile(profile.id) == find_profile(f"{profile.model} {profile.name}") == profile
        assert profile_of(Config.of(values)) == profile
    assert profile_of(Config()) == find_profile(f"{NANO} oscine-mxfp4-tp1")
    assert profile_of(Config.of({"model": "openai/gpt-oss-20b"})) == PROFILES[0]
    assert profile_of(Config.of({"model": "gpt-oss-20b", "tensor-parallel-size": 3})) is None
    for wanted in ("oscine-mxfp4-tp1", "nothing"):
        with pytest.raises(ValueError, match="list-model-profiles"):
            find_profile(wanted)


# ---- vLLM ----


def test_load_options_and_tokenizer(server: ScriptedServer) -> None:
    assert got(server, "/load") == {"server_load": 0}
    assert got(server, "/server_info")["tools"] == []
    info = got(server, "/server_info")["models"][NAME]
    assert info["max-num-seqs"] == 64
    assert (info["no-prefix-caching"], info["no-async-scheduling"], info["enforce-eager"]) == (False, False, False)
    server.model.options = replace(server.model.options, cache=CacheOptions(prefix_caching=False))
    assert got(server, "/server_info")["models"][NAME]["no-prefix-caching"] is True
    assert "api-key" not in info
    tokenizer = got(server, "/tokenizer_info")
    assert tokenizer["eos_token"] == "<|return|>"
    assert tokenizer["vocab_size"] == server.tokenizer.vocab_size


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda path: path.write_text("{{ messages }}"), "{{ messages }}"),
        (lambda path: path.write_bytes(b"\xff"), None),
        (os.mkfifo, None),
        (Path.mkdir, None),
        (lambda path: None, None),
    ],
    ids=["text", "bytes", "pipe", "folder", "none"],
)
def test_a_chat_template_that_cannot_be_read_is_none(
    tmp_path: Path, make: Callable[[Path], object], shown: str | None
) -> None:
    folder = write_fake_model(tmp_path)
    make(folder / "chat_template.jinja")
    with ScriptedServer(folder, served_model_names=(NAME,)) as server:
        assert got(server, "/tokenizer_info")["chat_template"] == shown


# ---- keys ----


def test_only_health_version_and_metrics_are_open(model_folder: Path) -> None:
    with ScriptedServer(model_folder, served_model_names=(NAME,), api_keys=("secret",)) as server:
        key = {"Authorization": "Bearer secret"}
        for path in OPEN:
            assert server.get(path).status_code == 200, path
        for path in CLOSED:
            assert server.get(path).status_code == 401, path
            assert server.get(path, key).status_code == 200, path
        for path, body in ((GENERATE, {"text_input": "hi"}), ("/invocations", {"prompt": "hi"})):
            assert server.post(path, body).status_code == 401
            assert server.request("POST", path, body, key).status_code == 200
        assert server.get("/v2").json().keys() == {"error"}
