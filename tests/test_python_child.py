"""Oscine's own processes load no modules from the current folder."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from oscine.system.python_child import bound_command, child_environment, module_command
from tests.server import ServerProcess
from tests.waiting import wait_until

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
    [
        "oscine.engine.process.server",
        "oscine.system.grammar_sandbox.process",
        "oscine.ops.compile_worker",
        "oscine.ops.platforms.trial",
        pytest.param("oscine.extensions.cluster.ray.local", marks=pytest.mark.needs("cluster")),
    ],
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
    code = "from oscine.system.python_child import *; print(child_environment()['PYTHONPATH'])"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, env={}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(ROOT)


def test_no_other_way_to_start_a_module() -> None:
    paths = [path for path in (ROOT / "oscine").rglob("*.py") if '"-m"' in path.read_text()]
    assert [path.name for path in paths] == ["python_child.py"]


IMPORTS_FOR_EVER = "import os, time\nos.write(1, b'imports\\n')\nwhile True: time.sleep(60)\n"
# Starts ranks, and waits. It stands for rank 0, which a supervisor or a user ends in the middle of its start.
RANK_ZERO = """
import sys
from oscine.extensions.parallel import processes
processes.RANK = "imports_for_ever"
ranks = processes.RankProcesses(3)
print(*(rank.pid for rank in ranks._ranks), flush=True)
sys.stdin.read()
"""


@pytest.mark.needs("parallel")
def test_ranks_end_with_their_parent_while_they_import(tmp_path: Path) -> None:
    tmp_path.joinpath("imports_for_ever.py").write_text(IMPORTS_FOR_EVER)
    pipe, path = subprocess.PIPE, os.pathsep.join([str(tmp_path), str(ROOT)])
    with subprocess.Popen(
        [sys.executable, "-c", RANK_ZERO], env=os.environ | {"PYTHONPATH": path}, stdin=pipe, stdout=pipe, stderr=pipe
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        ranks = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert [parent.stderr.readline() for _ in ranks] == [b"imports\n"] * 2
        assert all({signal.SIGINT, signal.SIGTERM} <= ignored_signals(rank) for rank in ranks), "left to the parent"
        assert all(map(is_alive, ranks))
        parent.kill()
    wait_until(lambda: not any(map(is_alive, ranks)), "no ranks")


def ignored_signals(process: psutil.Process) -> set[int]:
    status = Path(f"/proc/{process.pid}/status").read_text()
    mask = int(status.partition("SigIgn:")[2].split()[0], 16)
    return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}


def is_alive(process: psutil.Process) -> bool:
    """A zombie has ended; its new parent need not have asked."""
    try:
        return str(process.status()) != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_bound_process_whose_parent_is_gone_imports_nothing(tmp_path: Path) -> None:
    tmp_path.joinpath("imports_for_ever.py").write_text(IMPORTS_FOR_EVER)
    *command, _, module = bound_command("imports_for_ever")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run([*command, "1", module], env=environment, capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"")


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
