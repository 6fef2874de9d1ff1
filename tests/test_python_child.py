"""Oscine's own processes load no modules from the current folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oscine.python_child import child_environment, module_command
from tests.server import ServerProcess

ROOT = Path(__file__).parent.parent
HOSTILE = ("zmq", "msgspec", "numpy", "torch", "triton", "llguidance", "ray", "psutil", "fcntl", "oscine")


@pytest.fixture
def hostile_folder(tmp_path: Path) -> Path:
    for name in HOSTILE:
        tmp_path.joinpath(f"{name}.py").write_text("open(__file__ + '.was-run', 'w').close()\nraise SystemExit(99)\n")
    return tmp_path


def was_run(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("*.was-run")]


@pytest.mark.parametrize(
    "module",
    ["oscine.engine.process.server", "oscine.judges.process", "oscine.ops.compile_worker", "oscine.cluster.ray.local"],
)
def test_a_child_loads_nothing_from_the_current_folder(hostile_folder: Path, module: str) -> None:
    done = subprocess.run(
        module_command(module), cwd=hostile_folder, env=child_environment(), input=b"", capture_output=True
    )
    assert done.returncode != 99
    assert not was_run(hostile_folder)
    assert b"No module named" not in done.stderr


def test_a_checkout_that_is_not_installed_is_found(tmp_path: Path) -> None:
    """-S hides all installed packages."""
    code = "from oscine.python_child import *; print(child_environment()['PYTHONPATH'])"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, env={}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(ROOT)


def test_no_other_way_to_start_a_module() -> None:
    paths = [path for path in (ROOT / "oscine").rglob("*.py") if '"-m"' in path.read_text()]
    assert [path.name for path in paths] == ["python_child.py"]


class Elsewhere(ServerProcess):
    """Runs an installed command in a folder of the user."""

    def __init__(self, folder: Path, *options: str) -> None:
        super().__init__(*options, environment={"PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))})
        python, *arguments = self._command
        self._command = ["sh", "-c", 'cd "$0" && exec "$@"', str(folder), python, "-P", *arguments]


def test_a_server_loads_nothing_from_the_current_folder(hostile_folder: Path, model_folder: Path) -> None:
    with Elsewhere(hostile_folder, str(model_folder), "--executor", "fake", "--log-level", "error") as server:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "guided_regex": "a+"}
        assert server.post("/v1/chat/completions", body)["choices"]
    assert not was_run(hostile_folder)
