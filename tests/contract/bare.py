"""The nucleus's own tests, where there is no extension.

    python -m tests.contract.bare [ARGUMENTS OF PYTEST ...]

In a copy of the project without the folders of all extensions and of their tests. A test that needs an extension is
skipped (tests/conftest.py). Conformance and documents are about extensions too; their tests are not among these.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.test_repository import ROOT

ROOMS = ("api", "chat", "cli", "engine", "engine_process", "executor", "llm", "model", "ops", "system", "web")
_LEFT_OUT = shutil.ignore_patterns(".*", "runs", "node_modules", "*.egg-info")


def left_out(folder: str, names: list[str]) -> set[str]:
    path, found = Path(folder), _LEFT_OUT(folder, names)
    if path == ROOT / "oscine" / "extensions":
        return {*names} - {"__init__.py"}
    return {*found, "extensions", "contract"} if path == ROOT / "tests" else {*found}


def main(arguments: Sequence[str]) -> int:
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name, "oscine")
        shutil.copytree(ROOT, copy, ignore=left_out)
        tests = [str(path) for path in map((copy / "tests").joinpath, ROOMS)] + sorted(
            map(str, copy.glob("tests/*.py"))
        )
        command = [sys.executable, "-m", "pytest", "-n", "auto", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(
            [*command, *map(str, tests)], cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}
        ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
