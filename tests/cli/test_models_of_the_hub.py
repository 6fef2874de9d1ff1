"""Models that are not on this machine yet: the requests to the hub, their order, and the error messages."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest

from oscine.chat.vocabulary import tokenizer_folder
from oscine.checkpoint import hub
from oscine.settings.config import EngineOptions, ModelOptions
from oscine.settings.option import OptionError
from tests.cli.test_commands import run
from tests.http_handler import Handler, serving

COMMIT = "0123456789012345678901234567890123456789"


class Hub(Handler):
    """A hub with some files that records the requests."""

    files: ClassVar[dict[str, str]] = {}
    asked: ClassVar[list[str]] = []

    def get(self) -> None:
        name = self.path.rpartition("/")[2]
        if "/resolve/" in self.path:
            Hub.asked.append(name)
        found = Hub.files.get(name)
        is_absent = found is None and name
        absent = {"X_Error_Code": "EntryNotFound"} if is_absent else {}
        self.answer(404 if is_absent else 200, found or "", X_Repo_Commit=COMMIT, ETag='"abc"', **absent)


@pytest.fixture
def url() -> Iterator[str]:
    Hub.files, Hub.asked = {}, []
    with serving(Hub) as url:
        yield url


def serve(name: str, url: str, home: Path) -> str:
    """The error message of the command."""
    done = run("serve", name, "--port", "0", HF_ENDPOINT=url, HF_HOME=str(home), HF_HUB_DISABLE_XET="1")
    assert done.returncode == 1
    _, line = done.stderr.splitlines()  # the first says where the server listens
    assert line.startswith("oscine: error: ")
    return line


def test_a_model_of_another_kind_costs_no_download(tmp_path: Path, url: str) -> None:
    Hub.files = {"config.json": '{"model_type": "llama"}'}
    assert "model_type" in serve("owner/name", url, tmp_path)
    assert set(Hub.asked) == {"config.json"}


def test_a_model_without_a_tokenizer_costs_no_download(tmp_path: Path, url: str, model_folder: Path) -> None:
    Hub.files = {"config.json": (model_folder / "config.json").read_text()}
    assert "model 'owner/name' has no tokenizer.json" in serve("owner/name", url, tmp_path)
    assert set(Hub.asked) == {"config.json", "tokenizer.json"}


def test_a_hub_that_cannot_be_reached_is_one_line_and_no_second_try(tmp_path: Path) -> None:
    said = serve("gpt-oss-20b", "http://127.0.0.1:1", tmp_path)
    assert "model 'gpt-oss-20b' is not in the local cache, and the hub cannot be reached: http://127.0.0.1:1: " in said
    assert "Retrying" not in said


def test_short_names_are_those_of_the_published_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[str] = []
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda repo_id, **what: asked.append(repo_id))
    monkeypatch.setattr(hub, "folder_config", lambda path: None)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda repo_id, **what: tmp_path)
    for name in ("gpt-oss-20b", "gpt-oss-120b"):
        assert hub.find_model(ModelOptions(name)) == tmp_path
    assert asked == ["openai/gpt-oss-20b"] * 2 + ["openai/gpt-oss-120b"] * 2


def test_a_folder_without_a_tokenizer_is_refused_before_its_weights_are_looked_at(
    tmp_path: Path, model_folder: Path
) -> None:
    (tmp_path / "config.json").write_text((model_folder / "config.json").read_text())
    done = run("serve", str(tmp_path), "--port", "0")
    assert (done.returncode, done.stdout) == (1, "")
    _, line = done.stderr.splitlines()  # the first says where the server listens
    assert f"{tmp_path / 'tokenizer.json'}: missing; --tokenizer names a folder that has one" in line


@pytest.mark.parametrize("name", ["no/such/thing", "gpt-oss-20"])
def test_what_cannot_be_on_the_hub_is_not_looked_for(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name!r} is neither a folder, .* gpt-oss-20b, gpt-oss-120b"):
        hub.find_model(ModelOptions(name))


@pytest.mark.parametrize("name", ["./nope", "../nope", "/no/pe", "~/nope", "/no/pe.gguf"])
def test_a_path_without_a_folder_is_said_to_be_one(name: str) -> None:
    for check in (hub.find_model, hub.check_local, hub.check_model):
        with pytest.raises(ValueError, match=f"^model {name!r}: there is no such folder or GGUF file"):
            check(ModelOptions(name))


def test_a_folder_that_holds_no_model_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for check in (hub.check_local, hub.check_model):
        with pytest.raises(ValueError, match=f"^{tmp_path} is not the folder of a model: it has no config.json$"):
            check(ModelOptions("."))


def test_a_tokenizer_of_its_own(tmp_path: Path, model_folder: Path) -> None:
    options = ModelOptions(str(tmp_path), tokenizer=str(model_folder))
    (tmp_path / "config.json").write_text((model_folder / "config.json").read_text())
    assert hub.check_model(options) == model_folder
    with pytest.raises(ValueError, match="is neither a folder"):
        hub.find_tokenizer(ModelOptions(tokenizer="nowhere"))


@pytest.mark.parametrize("given", [{}, {"random_weights": "20b"}])
def test_the_embedded_model_has_no_revision(given: dict[str, str]) -> None:
    with pytest.raises(OptionError, match=r"^--revision is for a model on the Hugging Face hub, which MODEL names$"):
        ModelOptions(revision="main", **given)


@pytest.mark.parametrize("find", [hub.find_model, hub.check_model, hub.check_local, hub.pull])
def test_a_model_on_this_machine_has_no_revision(model_folder: Path, find: Callable[[ModelOptions], object]) -> None:
    options = ModelOptions(str(model_folder), revision="main", tokenizer=str(model_folder))
    with pytest.raises(OptionError, match=r"^--revision is for a model on the Hugging Face hub, not '/.*'$"):
        find(options)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tensor_parallel_size": 3}, "--tensor-parallel-size 3: 3 ranks cannot divide a num_attention_heads of 8"),
        ({"random_weights": "20b", "tensor_parallel_size": 6}, "6 ranks cannot divide a num_attention_heads of 64"),
        ({"random_weights": "120b", "tensor_parallel_size": 128}, "128 ranks cannot divide a num_attention_heads of"),
    ],
)
def test_an_impossible_number_of_ranks_is_refused_without_an_engine(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        tokenizer_folder(EngineOptions(ModelOptions(**options)))


@pytest.mark.parametrize("has_config", [True, False], ids=["safetensors", "GGUF"])
def test_ranks_are_checked_with_the_configuration_alone(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, has_config: bool
) -> None:
    """That of a GGUF file is in the large file, so it waits for the download."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--owner--name" / "snapshots" / COMMIT
    for folder in (snapshot, snapshot.parents[1] / "refs"):
        folder.mkdir(parents=True)
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT)
    if has_config:
        (snapshot / "config.json").write_text((model_folder / "config.json").read_text())
    with pytest.raises(ValueError, match="3 ranks cannot divide") if has_config else nullcontext():
        hub.check_ranks(ModelOptions("owner/name", tensor_parallel_size=3))
    hub.check_ranks(ModelOptions("owner/name", tensor_parallel_size=2))
