"""A real server in processes of its own, for tests that end it, crash its engine, or read what it wrote."""

import json
import os
import signal
import urllib.request
from typing import Any

import psutil

from benchmarks.serving.server import Server
from tests.waiting import DEADLINE_S, PATIENCE, wait_until


class ServerProcess(Server):
    """Context manager."""

    patience = PATIENCE

    @property
    def engine(self) -> psutil.Process:
        return psutil.Process(self.engine_pid)

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.pid).children(recursive=True)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            return dict(json.load(response))

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)

    def exit_code(self) -> int:
        return self._process.wait(timeout=DEADLINE_S)

    def wait_idle(self) -> None:
        """Until no request runs or waits and no page is held."""
        names = ("num_requests_running", "num_requests_waiting", "full_pages_used", "sliding_pages_used")
        wait_until(lambda: not any(self.metric(f"oscine:{name}") for name in names), "an idle server")

    def wait_running(self, count: int) -> None:
        wait_until(lambda: self.metric("oscine:num_requests_running") == count, f"{count} running requests")
