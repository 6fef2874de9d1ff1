"""`oscine pull`, `list` and `rm`, with the hub's real client and a hub on this machine."""

import fcntl
import hashlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from oscine.checkpoint import download, hub
from oscine.checkpoint.hub import NANO_FOLDER
from oscine.extensions.formats.installed import installed
from oscine.settings.config import ModelOptions
from tests.cli import local_hub as local_hub_module
from tests.cli.local_hub import TOKEN, LocalHub, local_hub
from tests.cli.test_commands import run
from tests.extensions.formats.test_gguf import CONFIG
from tests.extensions.formats.test_ollama import add_model
from tests.model.gguf_files import write_llama_cpp, write_ollama
from tests.model.tiny import tensors
from tests.waiting import wait_until

NAME, WEIGHTS = "openai/gpt-oss-20b", "model.safetensors"
FILES = {path.name: path.read_bytes() for path in NANO_FOLDER.iterdir() if path.is_file()}


class Machine:
    """A home of its own, and a hub that has a model."""

    def __init__(self, folder: Path, server: LocalHub) -> None:
        self.hub, self.cache, self.ollama = server, folder / "hf/hub", folder / "ollama"
        self.packed = folder / "cache/oscine/packed"
        server.repositories[NAME] = FILES | {
            "original/model.safetensors": b"o" * (2 << 20),
            "metal/model.bin": b"m" * 5000,
        }
        self.environment = {
            "HF_ENDPOINT": server.url,
            "HF_HOME": str(folder / "hf"),
            "OLLAMA_MODELS": str(self.ollama),
            "XDG_CACHE_HOME": str(folder / "cache"),
        }

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return run(*arguments, **self.environment)

    def said(self, *arguments: str, status: int = 0) -> str:
        done = self.run(*arguments)
        assert done.returncode == status, done.stderr
        return done.stdout if status == 0 else done.stderr.splitlines()[-1]

    def start(self, *arguments: str, **streams: int) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "oscine", *arguments]
        return subprocess.Popen(command, env=os.environ | self.environment, text=True, **streams)  # type: ignore[call-overload, no-any-return]

    def snapshot(self) -> Path:
        (found,) = self.cache.glob("models--openai--gpt-oss-20b/snapshots/*")
        return found

    def partial(self, content: bytes) -> Path:
        """The path of an unfinished download of this file."""
        return self.cache / f"models--openai--gpt-oss-20b/blobs/{hashlib.sha256(content).hexdigest()}.incomplete"

    def listed(self) -> dict[str, list[str]]:
        return {line.split()[0]: line.split()[1:] for line in self.said("list").splitlines()[1:]}


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with local_hub() as server:
        yield Machine(tmp_path, server)


def test_a_model_is_pulled_listed_and_removed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.said("pull", "gpt-oss-20b") == f"gpt-oss-20b: 11.2 MB in {machine.snapshot()}\n"
    assert {path.name: path.read_bytes() for path in machine.snapshot().iterdir()} == FILES
    assert machine.listed()[NAME] == ["Hugging", "Face", "safetensors", "11.2", "MB"]

    machine.said("pull", "gpt-oss-20b")
    assert machine.hub.ranges(WEIGHTS) == [""]  # it was fetched once

    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(machine.cache))
    assert hub.find_model(ModelOptions(NAME)) == machine.snapshot()

    packed = machine.packed / f"{machine.snapshot().name}-0a1b"
    packed.mkdir(parents=True)
    (packed / "layer").write_bytes(bytes(3_000_000))
    said = f"removed {NAME}: 11.2 MB\nremoved {packed.name}: 3.0 MB\n"
    assert machine.said("rm", "gpt-oss-20b", "--yes") == said
    assert NAME not in machine.listed()
    assert machine.said("rm", NAME, "--yes", status=1).endswith("is not on this machine; `oscine list` shows what is")


def test_an_interrupted_download_is_resumed(machine: Machine) -> None:
    machine.hub.stalls_after = 5 << 20
    partial = machine.partial(FILES[WEIGHTS])
    pulling = machine.start("pull", NAME, stderr=subprocess.DEVNULL)
    wait_until(lambda: partial.exists() and partial.stat().st_size >= 5 << 20, "five megabytes")
    pulling.send_signal(signal.SIGINT)
    machine.hub.end_stalls()
    assert pulling.wait(60) == 130
    assert machine.listed()[NAME][-1] == "it"  # incomplete: `oscine pull` resumes it

    machine.said("pull", NAME)
    assert machine.hub.ranges(WEIGHTS) == ["", f"bytes={5 << 20}-"]
    assert (machine.snapshot() / WEIGHTS).read_bytes() == (NANO_FOLDER / WEIGHTS).read_bytes()
    assert not list(machine.cache.rglob("*.incomplete"))


def test_broken_connections_are_retried(machine: Machine) -> None:
    machine.hub.breaks_after = 4 << 20
    machine.said("pull", NAME)
    assert machine.hub.ranges(WEIGHTS) == ["", f"bytes={4 << 20}-", f"bytes={8 << 20}-"]
    assert (machine.snapshot() / WEIGHTS).read_bytes() == (NANO_FOLDER / WEIGHTS).read_bytes()


def test_a_server_without_ranges_sends_all_again(machine: Machine) -> None:
    partial = machine.partial(FILES[WEIGHTS])
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"half")
    machine.hub.knows_ranges = False
    machine.said("pull", NAME)
    assert machine.hub.ranges(WEIGHTS) == ["bytes=4-"]
    assert (machine.snapshot() / WEIGHTS).read_bytes() == (NANO_FOLDER / WEIGHTS).read_bytes()


@pytest.mark.parametrize("by_the_other", [3 << 20, None])
def test_a_download_that_another_process_works_at(
    by_the_other: int | None, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for the lock, and goes on where the other one ended. None: what came was damaged, and removed."""
    content = (NANO_FOLDER / WEIGHTS).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    url = f"{machine.hub.url}/{NAME}/resolve/main/{WEIGHTS}"
    blob = download.Blob(WEIGHTS, url, len(content), digest, tmp_path / digest)

    def wait(file: BinaryIO, _: int) -> None:
        monkeypatch.undo()
        if by_the_other is None:
            blob.partial.unlink()
        else:
            blob.partial.write_bytes(content[:by_the_other])

    monkeypatch.setattr(download.fcntl, "flock", wait)
    download.fetch_blobs([blob])
    assert blob.path.read_bytes() == content
    assert machine.hub.ranges(WEIGHTS) == ["" if by_the_other is None else f"bytes={by_the_other}-"]


def test_a_wait_for_another_process_can_be_interrupted(machine: Machine) -> None:
    partial = machine.partial(FILES[WEIGHTS])
    partial.parent.mkdir(parents=True)
    with partial.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        pulling = machine.start("pull", NAME, stderr=subprocess.DEVNULL)
        wait_until(lambda: partial in opened_by(pulling.pid), "the file to be opened")
        pulling.send_signal(signal.SIGINT)
        assert pulling.wait(60) == 130
    assert not machine.hub.ranges(WEIGHTS)


def test_an_interrupt_while_downloads_begin_stops_them(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(ThreadPoolExecutor):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            super().submit(*args, **kwargs)
            raise KeyboardInterrupt

    monkeypatch.setattr(download, "ThreadPoolExecutor", Interrupted)
    content = FILES[WEIGHTS]
    digest = hashlib.sha256(content).hexdigest()
    blob = download.Blob(WEIGHTS, f"{machine.hub.url}/{NAME}", len(content), digest, tmp_path / digest)
    with blob.partial.open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(KeyboardInterrupt):
            download.fetch_blobs([blob])


def opened_by(pid: int) -> set[Path]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it is closed again
            found.add(link.readlink())
    return found


@pytest.mark.parametrize("named", ["../../../elsewhere", "/tmp/elsewhere", "0" * 63])
def test_weights_are_named_by_nothing_but_a_hash(named: str, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = local_hub_module._entry

    def hostile(name: str, content: bytes, tree: bool) -> dict[str, Any]:
        found = entry(name, content, tree)
        if "lfs" in found:
            found["lfs"]["sha256"] = named
        return found

    monkeypatch.setattr(local_hub_module, "_entry", hostile)
    assert machine.said("pull", NAME, status=1).endswith(f"{WEIGHTS}: {named!r} is no SHA-256")
    assert not machine.hub.ranges(WEIGHTS)


def test_damaged_files_are_removed(machine: Machine) -> None:
    machine.hub.damages = True
    assert machine.said("pull", NAME, status=1) == (
        f"oscine: error: {WEIGHTS} arrived damaged and was removed; fetch it again"
    )
    assert not list(machine.cache.rglob("*.incomplete"))


def test_models_that_cannot_be_downloaded(machine: Machine) -> None:
    assert "model 'nobody/nothing' is not on the hub" in machine.said("pull", "nobody/nothing", status=1)
    assert "; did you mean openai/gpt-oss-20b?" in machine.said("pull", "openai/gpt-os-20b", status=1)
    machine.hub.gated.add(NAME)
    assert f"model '{NAME}' is gated" in machine.said("pull", NAME, status=1)
    machine.environment["HF_TOKEN"] = TOKEN
    machine.said("pull", NAME)
    machine.environment["HF_ENDPOINT"] = "http://127.0.0.1:1"
    unreachable = machine.said("pull", NAME, status=1)
    assert "the hub cannot be reached: http://127.0.0.1:1" in unreachable
    assert "did you mean" not in unreachable
    for name, meant in (
        ("openai/gpt-os-20b", NAME),
        ("openai/gpt-oss120b", "openai/gpt-oss-120b"),
        ("gptoss-20b", "gpt-oss-20b"),
    ):
        assert machine.said("pull", name, status=1).endswith(f"; did you mean {meant}?")
    assert "'oscine-nano' is on this machine already" in machine.said("pull", "oscine-nano", status=1)


def test_a_full_disk_is_reported_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 2_000_000_000))  # type: ignore[attr-defined]
    blob = download.Blob(WEIGHTS, "http://127.0.0.1:1", 13_000_000_000, "ab", tmp_path / "blobs/ab")
    with pytest.raises(ValueError, match=r"13\.0 GB are missing, and .*blobs has room for 2\.0 GB; --download-dir"):
        download.fetch_blobs([blob])


def test_models_of_other_programs_are_listed_and_not_removed(machine: Machine, tmp_path: Path) -> None:
    write_ollama(tmp_path / "weights", CONFIG, tensors(CONFIG))
    add_model(machine.ollama, "registry.ollama.ai/library/gpt-oss/20b", (tmp_path / "weights").read_bytes())
    add_model(machine.ollama, "registry.ollama.ai/library/llama3/latest", b"GGUF, but another")
    (machine.cache / "models--some--llama/snapshots/1").mkdir(parents=True)
    machine.packed.mkdir(parents=True)
    (machine.packed / "gpt-oss-20b-avx2").write_bytes(bytes(3_000_000))
    listed = machine.listed()
    assert listed.keys() == {"oscine-nano", "gpt-oss:20b", "gpt-oss-20b-avx2"}
    assert listed["gpt-oss:20b"][:2] == ["Ollama", "GGUF"]
    assert listed["oscine-nano"][2:] == ["11.0", "MB"], "as at /api/tags and in the README"
    assert "`ollama rm gpt-oss:20b` removes it" in machine.said("rm", "gpt-oss:20b", "--yes", status=1)
    assert "oscine-nano is a part of Oscine" in machine.said("rm", "oscine-nano", "--yes", status=1)
    assert machine.said("rm", "gpt-oss-20b-avx2", "--yes") == "removed gpt-oss-20b-avx2: 3.0 MB\n"


def test_a_snapshot_that_leads_nowhere_is_left_out(machine: Machine) -> None:
    snapshots = machine.cache / "models--someone--tuned/snapshots"
    snapshots.mkdir(parents=True)
    (snapshots / "0").symlink_to("nowhere")
    assert list(machine.listed()) == ["oscine-nano"]


@pytest.mark.parametrize("index", [[], {"weight_map": ["a"]}, {"weight_map": {"a": []}}, {"weight_map": {}}], ids=str)
def test_a_broken_index_is_an_incomplete_model(index: object, machine: Machine) -> None:
    snapshot = machine.cache / "models--someone--tuned/snapshots/0"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "gpt_oss"}')
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (model,) = (model for model in installed(str(machine.cache)) if model.name == "someone/tuned")
    assert not model.whole


@pytest.mark.parametrize(("answer", "removed"), [("y\n", True), ("\n", False)])
def test_rm_asks_before_it_removes(machine: Machine, answer: str, removed: bool) -> None:
    machine.packed.mkdir(parents=True)
    path = machine.packed / "weights"
    path.write_bytes(b"12")
    assert "--yes is needed" in machine.said("rm", "weights", status=2)
    ours, theirs = pty.openpty()
    removing = machine.start("rm", "weights", stdin=theirs, stdout=subprocess.DEVNULL)
    os.write(ours, answer.encode())
    assert removing.wait(60) == 0
    assert path.exists() is not removed
    for end in (ours, theirs):
        os.close(end)


GGUF_NAME = "ggml-org/gpt-oss-20b-GGUF"


def test_a_repository_with_gguf_files(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama_cpp(tmp_path / "w.gguf", CONFIG, tensors(CONFIG), max_tensors=30)
    parts = {f"gpt-oss-mxfp4-{path.name[2:]}": path.read_bytes() for path in sorted(tmp_path.glob("w-*.gguf"))}
    assert len(parts) == 3
    others = {"gpt-oss-Q4_K_M.gguf": b"GGUF", "BF16/gpt-oss.gguf": b"GGUF", "README.md": b"#"}
    machine.hub.repositories[GGUF_NAME] = parts | others
    machine.said("pull", GGUF_NAME)
    (snapshot,) = machine.cache.glob("models--ggml-org--gpt-oss-20b-GGUF/snapshots/*")
    assert {path.name: path.read_bytes() for path in snapshot.iterdir()} == parts
    assert machine.listed()[GGUF_NAME][:3] == ["Hugging", "Face", "GGUF"]

    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(machine.cache))
    assert hub.find_model(ModelOptions(GGUF_NAME)) == snapshot / min(parts)
    machine.said("rm", GGUF_NAME, "--yes")


def test_a_repository_with_several_models_in_gguf(machine: Machine) -> None:
    machine.hub.repositories[GGUF_NAME] = {"a-Q4_0.gguf": b"GGUF", "b-Q8_0.gguf": b"GGUF"}
    known = "owner/name/FILE, of a-Q4_0.gguf, b-Q8_0.gguf"
    assert machine.said("pull", GGUF_NAME, status=1).endswith(f"does not say which GGUF file: {known}")
    assert machine.said("pull", f"{GGUF_NAME}/c.gguf", status=1).endswith(known)
    machine.said("pull", f"{GGUF_NAME}/b-Q8_0.gguf")
    assert machine.hub.ranges("b-Q8_0.gguf") == [""]
    assert machine.hub.ranges("a-Q4_0.gguf") == []


def test_folders_that_cannot_be_looked_at_have_no_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is too long stands for a folder that this user may not enter, as root may enter all."""
    closed = str(tmp_path / ("x" * 300))
    for name in ("XDG_CACHE_HOME", "OLLAMA_MODELS"):
        monkeypatch.setenv(name, closed)
    assert [model.place for model in installed(closed) if model.place != "Ollama"] == ["Oscine"]
