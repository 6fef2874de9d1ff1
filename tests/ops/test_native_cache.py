"""Compiled libraries are found whole, compiled again if they are damaged, and kept where they may be loaded."""

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from oscine.ops.native.cache import NoLibrary, cached
from oscine.system.owned_folder import OwnedFolder

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


class Compiler:
    """Counts how often it compiles a small library."""

    def __init__(self, library: bytes) -> None:
        self.times, self._library = 0, library

    def __call__(self, folder: Path) -> bytes:
        (folder / "cc123456.o").write_bytes(b"a file of the compiler")
        self.times += 1
        return self._library


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("library") / "small.so"
    source = b"int oscine_answer(void) { return 42; }"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)], input=source, check=True)
    return path.read_bytes()


@pytest.fixture
def compiler(library: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    for name in ("xdg", "home", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return Compiler(library)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


def test_a_library_is_compiled_once_and_nothing_else_is_left(compiler: Compiler, tmp_path: Path) -> None:
    for _ in range(2):
        assert cached("a0", compiler).oscine_answer() == 42
    assert compiler.times == 1
    [path] = files(tmp_path)
    assert path.parent == tmp_path / "xdg" / "oscine"
    cached("b0", compiler)
    assert compiler.times == 2


@pytest.mark.parametrize(
    "damage",
    [lambda whole: whole[:100], lambda whole: bytes(len(whole)), lambda whole: b"", lambda whole: whole + b"x"],
    ids=["cut", "zeroed", "empty", "longer"],
)
def test_a_damaged_library_is_named_and_compiled_again(
    compiler: Compiler, tmp_path: Path, damage: Callable[[bytes], bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    """It is not loaded: that would end this process."""
    cached("a0", compiler)
    [path] = files(tmp_path)
    damaged = damage(path.read_bytes())
    path.unlink()  # this process has the old file in its memory
    path.write_bytes(damaged)
    assert cached("a0", compiler).oscine_answer() == 42
    assert compiler.times == 2
    assert capfd.readouterr().err == f"{path} is damaged, so the library is compiled again\n"
    assert files(tmp_path) == [path]
    cached("a0", compiler)
    assert compiler.times == 2


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/dev/zero", path)])
def test_what_is_no_file_is_left_alone(compiler: Compiler, tmp_path: Path, make: Callable[[Path], None]) -> None:
    (tmp_path / "xdg" / "oscine").mkdir()
    odd = tmp_path / "xdg" / "oscine" / "native-a0-0000000000000000.so"
    make(odd)
    for _ in range(2):
        cached("a0", compiler)
    assert compiler.times == 1
    assert os.path.lexists(odd)


def test_where_nothing_may_be_executed_the_next_folder_is_used_and_keeps_the_library(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def load(path: str) -> str:
        if not path.startswith(str(tmp_path / "temporary")):
            raise OSError(f"{path}: failed to map segment from shared object")
        loaded.append(path)
        return path

    monkeypatch.setattr(ctypes, "CDLL", load)
    for _ in range(3):
        cached("a0", compiler)
    assert compiler.times == 1
    assert [*map(str, files(tmp_path))] == loaded[:1]
    assert len(set(loaded)) == 1


def test_folders_that_others_may_change_are_passed_over(compiler: Compiler, tmp_path: Path) -> None:
    (tmp_path / "xdg" / "oscine").mkdir()
    (tmp_path / "xdg" / "oscine").chmod(0o777)
    (tmp_path / "home" / ".cache").write_text("a file")
    (tmp_path / "temporary" / f"oscine-{os.geteuid()}").symlink_to(tmp_path / "xdg")
    for _ in range(2):
        cached("a0", compiler)
    assert compiler.times == 1
    [path] = files(tmp_path / "temporary")
    assert path.parent.name.startswith(f"oscine-{os.geteuid()}-")


def test_a_full_disk_is_passed_over(compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def free(folder: int) -> SimpleNamespace:
        return SimpleNamespace(
            free=0 if os.path.realpath(f"/dev/fd/{folder}").startswith(str(tmp_path / "xdg")) else 1e9
        )

    monkeypatch.setattr(shutil, "disk_usage", free)
    for _ in range(2):
        cached("a0", compiler)
    assert compiler.times == 1
    assert len(files(tmp_path / "home")) == 1


def test_a_cache_behind_a_link_is_used(compiler: Compiler, tmp_path: Path) -> None:
    (tmp_path / "private").mkdir(mode=0o755)
    (tmp_path / "xdg" / "oscine").symlink_to(tmp_path / "private")
    cached("a0", compiler)
    assert len(files(tmp_path / "private")) == 1


def test_without_any_folder_the_reason_names_them_all(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(path: str) -> None:
        raise OSError("failed to map segment")

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(NoLibrary) as caught:
        cached("a0", compiler)
    places = (tmp_path / "xdg/oscine", tmp_path / "home/.cache/oscine", tmp_path / f"temporary/oscine-{os.geteuid()}")
    assert all(f"{place}: failed to map segment" in str(caught.value) for place in places)
    assert "XDG_CACHE_HOME" in str(caught.value)
    assert files(tmp_path) == []


def test_what_an_interrupted_compilation_left_is_removed(compiler: Compiler, tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def killed(folder: Path) -> bytes:
        (folder / "native.so").touch()
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OwnedFolder, "remove", OwnedFolder.close)
        with pytest.raises(Killed):
            cached("a0", killed)
    assert len(files(tmp_path)) == 2
    part = tmp_path / "xdg" / "oscine" / "native-b0-00.so.01234567.part"
    part.touch()
    cached("a0", compiler)
    assert [path.suffix for path in files(tmp_path)] == [".so"]
