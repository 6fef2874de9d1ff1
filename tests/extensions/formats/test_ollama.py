"""Models in a store of Ollama's, found by the name that Ollama shows."""

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oscine.checkpoint import hub
from oscine.checkpoint.opened import open_model
from oscine.extensions.formats import ollama
from oscine.settings.config import ModelOptions
from tests.extensions.formats.test_gguf import CONFIG
from tests.model.gguf_files import write_ollama
from tests.model.tiny import tensors

MODEL_LAYER = "application/vnd.ollama.image.model"


def add_model(store: Path, name: str, weights: bytes) -> Path:
    """Writes a model as `ollama pull` does. Returns the file of the weights."""
    digest = hashlib.sha256(weights).hexdigest()
    blob, manifest = store / "blobs" / f"sha256-{digest}", store / "manifests" / name
    for path in (blob, manifest):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(weights)
    layers = [
        {"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:00", "size": 1},
        {"mediaType": MODEL_LAYER, "digest": f"sha256:{digest}", "size": len(weights)},
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "config": {}, "layers": layers}))
    return blob


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "models"
    write_ollama(tmp_path / "weights", CONFIG, tensors(CONFIG))
    add_model(folder, "registry.ollama.ai/library/gpt-oss/20b", (tmp_path / "weights").read_bytes())
    add_model(folder, "registry.ollama.ai/library/llama3/latest", b"GGUF, but another")
    monkeypatch.setenv("OLLAMA_MODELS", str(folder))
    return folder


def test_names_are_those_that_ollama_shows(store: Path) -> None:
    add_model(store, "hf.co/ggml-org/gpt-oss-20b-GGUF/latest", b"a")
    add_model(store, "registry.ollama.ai/someone/gpt-oss/tuned", b"b")
    assert [model.name for model in ollama.models_in(store)] == [
        "hf.co/ggml-org/gpt-oss-20b-GGUF:latest",
        "gpt-oss:20b",
        "llama3:latest",
        "someone/gpt-oss:tuned",
    ]


def test_a_name_or_the_folder_of_the_store_opens_the_model(store: Path, tmp_path: Path) -> None:
    for given in ("gpt-oss:20b", str(store)):
        assert hub.find_model(ModelOptions(given)).parent == store / "blobs"
        (tmp_path / "tokenizer.json").write_text("{}")
        assert open_model(ModelOptions(given, tokenizer=str(tmp_path))).config == CONFIG


def test_missing_models_and_stores(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError,
        match=r"'gpt-oss:120b' is not in Ollama's store on this machine, which has gpt-oss:20b, llama3:latest",
    ):
        hub.find_model(ModelOptions("gpt-oss:120b"))
    add_model(store, "registry.ollama.ai/library/gpt-oss/latest", b"another")
    with pytest.raises(ValueError, match=r"is a store of Ollama's with gpt-oss:20b, gpt-oss:latest, llama3:latest; na"):
        hub.find_model(ModelOptions(str(store)))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="which has no model"):
        hub.find_model(ModelOptions("gpt-oss:20b"))


def test_other_files_among_the_manifests_are_no_models(store: Path) -> None:
    for stray in ("notes.txt", "registry.ollama.ai/notes.txt"):
        (store / "manifests" / stray).write_text("{}")
    assert [model.name for model in ollama.installed()] == ["gpt-oss:20b", "llama3:latest"]


def test_a_store_that_this_user_may_not_read(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ollama's service has a user of its own, and its folder is closed to others."""

    def closed(function: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any, *args: Any, **kwargs: Any) -> Any:
            if str(path).startswith(str(store)):
                raise PermissionError(13, "Permission denied", str(path))
            return function(path, *args, **kwargs)

        return look

    monkeypatch.setattr(os, "stat", closed(os.stat))
    monkeypatch.setattr(os, "listdir", closed(os.listdir))
    assert ollama.installed() == []
    with pytest.raises(ValueError, match=f"which has no model; this user may not read {store}$"):
        ollama.find("gpt-oss:20b")


def test_another_model_of_the_store_is_refused_by_its_architecture(store: Path) -> None:
    with pytest.raises(ValueError, match=r"sha256-.*: truncated or malformed"):
        open_model(ModelOptions("llama3:latest"))


def test_a_blob_that_is_gone_and_a_manifest_that_is_broken(store: Path) -> None:
    hub.find_model(ModelOptions("gpt-oss:20b")).unlink()
    with pytest.raises(ValueError, match=r"sha256-\w+: cannot be read: No such file"):
        open_model(ModelOptions("gpt-oss:20b"))
    manifest = store / "manifests/registry.ollama.ai/library/gpt-oss/20b"
    manifest.write_text("{")
    with pytest.raises(ValueError, match="20b: not JSON: "):
        hub.find_model(ModelOptions("gpt-oss:20b"))
    manifest.write_text('{"layers": 1}')
    with pytest.raises(ValueError, match="20b: not a manifest of Ollama's"):
        hub.find_model(ModelOptions("gpt-oss:20b"))
    manifest.write_text(json.dumps({"layers": [{"mediaType": MODEL_LAYER, "digest": "sha256:../../etc/passwd"}]}))
    with pytest.raises(ValueError, match="20b: names no file with weights"):
        hub.find_model(ModelOptions("gpt-oss:20b"))
