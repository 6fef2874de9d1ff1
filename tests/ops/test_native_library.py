"""The library of C kernels: compiled at its first use, and missed with a reason."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from oscine.ops.native.ahead import compile_ahead
from oscine.ops.native.levels import compiled_ahead, features, levels
from oscine.ops.native.library import find_compiler
from oscine.system.environment import Environment


def test_a_relative_folder_for_caches_does_not_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the specification of XDG says: a file would be looked for in each working directory anew."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    assert Environment().cache_folder == tmp_path / ".cache/oscine"
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert Environment().cache_folder == Path("/caches/oscine")


needs_compiler = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler")


@needs_compiler
def test_the_library_is_compiled_once_and_missed_without_a_compiler(tmp_path: Path) -> None:
    """Compiled without optimizations, for less time; all other tests of C kernels run the library with them."""
    compiler = tmp_path / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\nexec {find_compiler()} "$@" -O0\n')
    compiler.chmod(0o755)
    script = """
        import os, sys
        from pathlib import Path
        from oscine.ops.native.library import unavailable
        for path in ("", os.environ["PATH"], os.environ["PATH"]):
            if os.fork() == 0:  # a process each time, which has not looked for the library before
                os.environ["PATH"] = path
                print(unavailable())
                print([file.stat().st_mtime_ns for file in Path(sys.argv[1]).glob("*/*.so")], flush=True)
                os._exit(0)
            os.wait()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        env=os.environ
        | dict.fromkeys(("XDG_CACHE_HOME", "HOME", "TMPDIR"), str(tmp_path))
        | {"PATH": f"{compiler.parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
    )
    missed, nothing, *both_times = done.stdout.splitlines()
    assert "no C compiler" in missed
    assert nothing == "[]"
    assert both_times == ["None", both_times[1]] * 2
    assert len(json.loads(both_times[1])) == 1


def test_of_the_libraries_compiled_ahead_the_best_that_the_processor_has_is_taken(tmp_path: Path) -> None:
    for level in levels():
        (tmp_path / level.file).touch()
    for level in levels():
        assert compiled_ahead(level.needs, tmp_path) == tmp_path / level.file
        assert compiled_ahead(level.needs - {min(level.needs)}, tmp_path) is None
    assert (
        compiled_ahead(frozenset().union(*(level.needs for level in levels())), tmp_path) == tmp_path / levels()[0].file
    )
    assert compiled_ahead((), tmp_path) is None


@pytest.mark.slow
@needs_compiler
@pytest.mark.skipif(not any(level.needs <= features() for level in levels()), reason="no level fits this processor")
def test_without_a_compiler_the_library_compiled_ahead_generates_the_same_tokens(tmp_path: Path) -> None:
    """In a copy of the package, as the files lie in it."""
    package = Path(__file__).parents[2] / "oscine"
    shutil.copytree(package, tmp_path / "oscine", ignore=shutil.ignore_patterns("__pycache__", "built"))
    best = next(level for level in levels() if level.needs <= features())
    compile_ahead(best, tmp_path / "oscine" / "ops" / "native" / "built")

    def answer(path: str, folder: Path) -> str:
        environment = os.environ | {"PATH": path, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(folder)}
        code = "from oscine.ops.native.library import unavailable; assert unavailable() is None\n"
        code += (
            "from oscine.cli import main; raise SystemExit(main(['chat', '--temperature', '0', 'What is 27 + 58?']))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return done.stdout

    assert "85" in answer("", tmp_path)
    assert answer("", tmp_path) == answer(os.environ["PATH"], package.parent)
