"""The effect of options of `oscine serve` on a server."""

import json
import urllib.error
from pathlib import Path

import pytest

from oscine.api.apis import make_service
from oscine.api.serving.sampling import _seed
from oscine.checkpoint.hub import NANO_FOLDER
from oscine.settings.config import Config, ServerOptions
from tests.cli.test_commands import run
from tests.server import ServerProcess


def test_any_name_and_a_path_of_a_proxy(model_folder: Path) -> None:
    options = ("--executor", "fake", "--served-model-name", "*", "--root-path", "/llm", "--log-level", "warning")
    with ServerProcess(str(model_folder), *options) as server:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
        for name in ("gpt-4o", "claude-sonnet", model_folder.name):
            assert server.post("/v1/chat/completions", body | {"model": name})["model"] == name
        assert server.post("/llm/v1/chat/completions", body)["model"] == model_folder.name
        listed = json.loads(server.get("/llm/v1/models"))["data"]
        assert [model["id"] for model in listed] == [model_folder.name]
        with pytest.raises(urllib.error.HTTPError, match="404"):
            server.get("/llmx/v1/models")


@pytest.mark.needs("apis")
@pytest.mark.parametrize("given", [("--random-weights", str(NANO_FOLDER / "config.json")), ("--load-format", "dummy")])
def test_random_weights_answer_on_a_cpu(given: tuple[str, ...]) -> None:
    with ServerProcess(*given, "--device", "cpu", "--served-model-name", "random") as server:
        body = {"model": "random", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "temperature": 0}
        answer = server.post("/v1/chat/completions", body)
        assert answer["usage"]["completion_tokens"] == 4
        assert answer["choices"][0]["finish_reason"] == "length"
        assert server.post("/v1/chat/completions", body)["choices"] == answer["choices"]


def test_a_seed_makes_the_seeds_of_requests() -> None:
    def seeds(seed: int | None) -> list[int]:
        make_service(Config(server=ServerOptions(seed=seed)))
        return [_seed(None) for _ in range(3)]

    assert seeds(7) == seeds(7) != seeds(8)
    assert seeds(None) != seeds(None)


def test_a_model_that_is_not_there_ends_the_start_before_the_server_listens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    for name, why in (
        ("gpt-os-20b", "; did you mean gpt-oss-20b?"),
        (str(tmp_path), f"{tmp_path}/config.json: not JSON"),
    ):
        done = run("serve", name, "--port", "0")
        assert done.returncode == 1
        assert why in done.stderr
        assert done.stderr.startswith("oscine: error: ")
