"""A real cluster on this machine, for tests that need one. Only one runs at a time."""

import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine_process.conftest import folder  # noqa: F401 - a fixture of these tests too

_DEADLINE_S = 240  # for a command, on a machine that has much else to do


@dataclass(frozen=True)
class CommandLine:
    """`oscine cluster`, with a state folder of its own."""

    folder: Path

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "oscine", "cluster", *arguments]
        environment = os.environ | {"XDG_STATE_HOME": str(self.folder)}
        return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=_DEADLINE_S)

    def up(self, text: str) -> "subprocess.CompletedProcess[str]":
        file = self.folder / "cluster.yaml"
        file.write_text(text)
        return self.run("up", str(file))

    def status(self) -> dict[str, Any]:
        done = self.run("status", "--json")
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def ray(self) -> dict[str, Any]:
        """What `up` noted of the Ray that it started."""
        return dict(json.loads((self.folder / "oscine" / "cluster.json").read_text()))

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.ray()["pid"]).children(recursive=True)


@pytest.fixture(scope="module")
def cluster_command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """Takes down whatever a test of the module brought up. While a module has it, another one waits."""
    with Path(tempfile.gettempdir(), f"oscine-cluster-tests-{os.getuid()}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        command = CommandLine(tmp_path_factory.mktemp("cluster"))
        yield command
        if (command.folder / "oscine" / "cluster.json").exists():
            command.run("down")
