"""A real `oscine serve` process on any free port, and the CPU time of each of its processes."""

import json
import os
import select
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn

import psutil


def engines_below(process: psutil.Process) -> list[psutil.Process]:
    """The engine processes below this one. A process that an engine has just forked has its command line at first."""
    parents: dict[psutil.Process, int] = {}
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if "oscine.engine.process.server" in " ".join(child.cmdline()):
                parents[child] = child.ppid()
    engines = {child.pid for child in parents}
    return [child for child, parent in parents.items() if parent not in engines]


class Server:
    """Context manager: starts the server, waits until it is ready, ends it with SIGTERM.

    `host`, `port` and `url` (the base address) are set on entry. Raises RuntimeError if the server ends before it is
    ready; its own output says why.
    """

    patience = 1.0  # times the time that it has to become ready

    def __init__(
        self,
        *options: str,
        ready_timeout_s: float = 120.0,
        environment: Mapping[str, str] | None = None,
        log: BinaryIO | None = None,
    ) -> None:
        """`environment` is added to this process's own; `log` is a file that takes the server's stderr."""
        self._ready_timeout_s = ready_timeout_s
        self._environment = os.environ | (environment or {})
        own = (environment or {}).get("TMPDIR")
        self.folder = Path(own) if own is not None else None  # for temporary files, if it has one of its own
        self._log = log
        self.certificate = options[options.index("--ssl-certfile") + 1] if "--ssl-certfile" in options else None
        self._tls = None if self.certificate is None else ssl.create_default_context(cafile=self.certificate)
        self._command = [sys.executable, "-m", "oscine", "serve", "--port", "0", *options]

    def __enter__(self) -> "Server":
        deadline = time.monotonic() + self._ready_timeout_s * self.patience
        if not (line := self._start()):
            self._give_up()
        self.host, self.port = "127.0.0.1", int(line)
        self.url = f"{'http' if self._tls is None else 'https'}://{self.host}:{self.port}"
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._give_up()
            time.sleep(0.05)
        return self

    def _start(self) -> bytes:
        """Starts the process. Returns the line with its port, from a pipe; empty if the process ends or is too slow."""
        told, tell = os.pipe()
        command = [*self._command, "--port-file", f"/dev/fd/{tell}"]
        self._process = subprocess.Popen(command, env=self._environment, stderr=self._log, pass_fds=(tell,))
        os.close(tell)
        with open(told, "rb") as pipe:
            waiting = select.poll()
            waiting.register(pipe, select.POLLIN)
            return pipe.readline() if waiting.poll(self._ready_timeout_s * 1000) else b""

    def _give_up(self) -> NoReturn:
        self._process.kill()
        self._process.wait()
        raise RuntimeError(f"server did not become ready: {' '.join(self._command)}")

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._process.terminate()
        self._process.wait(timeout=60)

    @property
    def pid(self) -> int:
        """Of the API process."""
        return self._process.pid

    @property
    def engine_pid(self) -> int:
        (engine,) = self._engines()
        return engine.pid

    def _engines(self) -> list[psutil.Process]:
        return engines_below(psutil.Process(self.pid))

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + "/v1/health/ready", timeout=5, context=self._tls) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=30, context=self._tls) as response:
            return str(response.read().decode())

    def model(self) -> str:
        return str(json.loads(self.get("/v1/models"))["data"][0]["id"])

    def metric(self, name: str) -> float:
        """The sum of all samples of a Prometheus metric; KeyError when there is none."""
        values = [
            float(line.rsplit(" ", 1)[1])
            for line in self.get("/metrics").splitlines()
            if line.startswith((name + " ", name + "{"))
        ]
        if not values:
            raise KeyError(name)
        return sum(values)

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time so far of the API process and of the engine process."""

        def seconds(process: psutil.Process) -> float:
            times = process.cpu_times()
            return float(times.user + times.system)

        return {"api": seconds(psutil.Process(self.pid)), "engine": sum(seconds(p) for p in self._engines())}
