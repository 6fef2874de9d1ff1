"""Hostile files of models: each is refused with one printable line that names it, in little time and memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oscine.extensions.formats.installed import installed
from oscine.extensions.formats.ollama import models_in
from oscine.system.model_files import is_file_name, read_file, read_json, shown
from tests.extensions.formats.hostile_files import ALL, BOMB, RED, Hostile
from tests.extensions.formats.test_ollama import add_model
from tests.waiting import DEADLINE_S

MAX_MEMORY = 1 << 30  # bytes, of which torch takes a third
MAX_LINE = 1000  # characters


@pytest.mark.long
def test_each_hostile_file_is_one_line_that_names_it_and_takes_little_memory(tmp_path: Path) -> None:
    """One process opens all, and must end: none of them waits."""
    command = [sys.executable, "-m", "tests.extensions.formats.hostile_files", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    *lines, peak = map(json.loads, done.stdout.splitlines())
    assert [said["name"] for said in lines] == [hostile.name for hostile in ALL]
    assert len(ALL) >= 40
    wrong = [said for said, hostile in zip(lines, ALL, strict=True) if not is_good(said, hostile)]
    assert wrong == []
    assert peak["peak_bytes"] < MAX_MEMORY


def is_good(said: dict[str, Any], hostile: Hostile) -> bool:
    message: str = said["message"]
    one_line = message.isprintable() and len(message) < MAX_LINE
    return said["error"] == "ValueError" and one_line and f"/{hostile.file}" in message


def snapshot(cache: Path, name: str) -> Path:
    folder = cache / f"models--{name}/snapshots/0"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "gpt_oss"}')
    return folder


def test_hostile_files_on_the_machine_do_not_end_the_list_of_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, cache = tmp_path / "ollama", tmp_path / "cache"
    monkeypatch.setenv("OLLAMA_MODELS", str(store))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    add_model(store, "registry.ollama.ai/library/gpt-oss/20b", b"GGUF")
    (store / "manifests/registry.ollama.ai/library/gpt-oss/20b").write_text(BOMB)
    (store / f"manifests/registry.ollama.ai/library/gpt-oss/{RED}").write_text("{}")
    assert [model.name for model in models_in(store)] == ["gpt-oss:20b"]
    snapshot(cache, "a--bomb").joinpath("config.json").write_text(BOMB)
    pipe = snapshot(cache, "a--pipe") / "config.json"
    pipe.unlink()
    os.mkfifo(pipe)
    os.mkfifo(pipe.with_name("model.gguf"))
    (snapshot(cache, "a--dangling").parent / "1").symlink_to("nothing")
    snapshot(cache, f"a--{RED}")
    snapshot(cache, "a--index").joinpath("model.safetensors.index.json").write_text(BOMB)
    names = {"a": "x" * 300, "b": "../../etc/passwd"}
    snapshot(cache, "a--names").joinpath("model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    found = [(model.name, model.whole) for model in installed(str(cache))]
    assert found == [("oscine-nano", True), ("a/dangling", False), ("a/index", False), ("a/names", False)]


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": 1, "a": 2}', "utf-8-sig")
    assert read_json(path) == {"a": 2}  # the last of equal keys
    for encoding in ("utf-16", "utf-32"):
        path.write_text("{}", encoding)
        with pytest.raises(ValueError, match=f"config.json: must be UTF-8, not {encoding.upper()}$"):
            read_json(path)


def test_a_file_may_have_as_many_bytes_as_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    (tmp_path / "b").symlink_to("a")
    assert read_file(tmp_path / "b", 100) == b"x" * 100
    with pytest.raises(ValueError, match="b: has 100 bytes, and at most 99 are read"):
        read_file(tmp_path / "b", 99)
    with pytest.raises(ValueError, match="c: cannot be read: No such file or directory"):
        read_file(tmp_path / "c")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"a": {"b": [1, 2, {"c": -Infinity}]}}', r"a\.b\.2\.c must be finite"),
        ('{"a": 1' + "0" * 309 + "}", "a must be finite"),
        ("{}" * 2, "not JSON: Extra data"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested more than 64 deep"),
    ],
)
def test_what_json_of_a_model_must_be(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=rf"a\.json: {said}"):
        read_json(tmp_path / "a.json")


def test_objects_may_be_nested_and_numbers_as_large_as_a_float(tmp_path: Path) -> None:
    text = '{"a":' * 64 + "1" + "0" * 308 + "}" * 64
    (tmp_path / "a.json").write_text(text)
    assert json.dumps(read_json(tmp_path / "a.json")).replace(" ", "") == text


def test_what_is_shown_is_printable_and_short() -> None:
    assert shown("naïve Größe") == "naïve Größe"
    assert shown("a\n\x1b[2J\ud800\u202e") == r"a\n\x1b[2J\ud800\u202e"
    assert shown("x" * 201) == "x" * 200 + "..."
    assert [is_file_name(name) for name in ("a.b", "a/b", "..", "", "a\0", 7, "é" * 128)] == [True, *[False] * 6]
