"""The library of C kernels: compiled at its first use, and missed with a reason."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oscine.environment import Environment


def test_a_relative_folder_for_caches_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the specification of XDG says: a file would be looked for in each working directory anew."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    assert Environment().cache_folder == tmp_path / ".cache/oscine"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert Environment().cache_folder == Path("/caches/oscine")


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler")
def test_the_library_is_compiled_once_and_missed_without_a_compiler(tmp_path: Path) -> None:
    script = "from oscine.ops.native.library import unavailable; print(unavailable())"

    def available(path: str) -> str:
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "PATH": path}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    assert "no C compiler" in available("")
    assert available(os.environ["PATH"]) == "None"
    (built,) = tmp_path.glob("*/*.so")
    written = built.stat().st_mtime_ns
    assert available(os.environ["PATH"]) == "None"
    assert built.stat().st_mtime_ns == written
