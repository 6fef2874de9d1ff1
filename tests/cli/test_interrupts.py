"""Ctrl-C at a server: its messages, and how it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.raw_client import LONG_ANSWER, RawClient
from tests.server import ServerProcess
from tests.waiting import DEADLINE_S, wait_until


def test_a_line_says_what_is_awaited_and_how_to_end_at_once(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "log"
    options = ("--executor", "fake", "--fake-step-s", "0.005", "--log-level", "warning", "--drain-s", "600")
    with (
        path.open("wb") as log,
        ServerProcess(str(model_folder), *options, log=log) as server,
        RawClient(server) as running,
    ):
        running.post(LONG_ANSWER | {"stream": True})
        running.read_until(b'"content":"O"')
        os.kill(server.pid, signal.SIGINT)
        said = "it waits up to 600 s for 1 running requests; a second ctrl-C or SIGTERM ends them at once"
        wait_until(lambda: said in path.read_text(), "the line")
        os.kill(server.pid, signal.SIGINT)
        assert server.exit_code() == 0
    assert "Traceback" not in path.read_text()


def test_without_requests_there_is_nothing_to_wait_for(model_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "log"
    with path.open("wb") as log, ServerProcess(str(model_folder), "--executor", "fake", log=log) as server:
        os.kill(server.pid, signal.SIGINT)
        assert server.exit_code() == 0
    assert "it waits" not in path.read_text()


@pytest.mark.parametrize("times", [1, 2])
def test_a_start_can_be_interrupted(model_folder: Path, times: int) -> None:
    command = [sys.executable, "-m", "oscine", "serve", str(model_folder), "--executor", "fake", "--port", "0"]
    log = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--log-level", "debug"], **log) as server:  # type: ignore[call-overload]
        assert server.stderr is not None
        server.stderr.readline()  # it has begun
        for _ in range(times):
            server.send_signal(signal.SIGINT)
        _, said = server.communicate(timeout=DEADLINE_S)
    assert server.returncode in (0, 130)
    assert "Traceback" not in said
