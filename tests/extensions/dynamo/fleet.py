"""Dynamo's own frontend and Oscine's workers as real processes of one machine, which find each other in a folder.

No etcd and no NATS. Everything ends with the fleet; the output of a process that fails to start is printed.
"""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import openai
import psutil

from oscine.model.o200k import NUM_RANKS
from tests.children import children
from tests.kept_port import kept_port
from tests.waiting import wait_until

MODEL = "oscine-nano"
READY_S = 120.0
END_S = 30.0
_KV_CACHE_BYTES = 64 << 20
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "DYN_DISCOVERY_BACKEND": "file",
    "DYN_TCP_RPC_HOST": "127.0.0.1",
    "DYN_SYSTEM_HOST": "127.0.0.1",
    "DYN_SYSTEM_PORT": "0",  # any; ports above 32767 cannot be named
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0.5",
    "HF_HUB_OFFLINE": "1",
}
_STATUS_PORT = re.compile(r"system status server bound to: \S+:(\d+)")


def write_vocabulary(folder: Path) -> None:
    """The vocabulary that the frontend's parser of harmony would download, as a file of base64 and ranks."""
    import openai_harmony

    encoding = openai_harmony.load_harmony_encoding("HarmonyGptOss")._inner
    tokens = (base64.b64encode(bytes(encoding.decode_bytes([rank]))) for rank in range(NUM_RANKS))
    lines = (b"%s %d\n" % (token, rank) for rank, token in enumerate(tokens))
    (folder / "o200k_base.tiktoken").write_bytes(b"".join(lines))


class Process:
    """One command, with its output in a file."""

    def __init__(self, name: str, command: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self.pid = self._process.pid

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def family(self) -> list[psutil.Process]:
        own = psutil.Process(self.pid)
        return [own, *own.children(recursive=True)]

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        return self._process.wait(timeout=END_S)

    def end(self) -> None:
        """Asks first."""
        if self.exit_code is None:
            self.signal(signal.SIGTERM)
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self._process.kill()
                raise


class DynamoWorker(Process):
    def __init__(self, name: str, role: str, options: Sequence[str], environment: dict[str, str], folder: Path) -> None:
        command = [sys.executable, "-m", "oscine", "dynamo-worker", "--role", role, "--peer-host", "127.0.0.1"]
        sizes = ["--kv-cache-bytes", str(_KV_CACHE_BYTES)]
        super().__init__(name, [*command, *sizes, *options], environment, folder)

    @property
    def is_ready(self) -> bool:
        try:
            return bool(json.loads(self._get("/health"))["endpoints"]["generate"] == "ready")
        except (OSError, KeyError):
            return False

    def metric(self, name: str) -> int:
        """One of the engine's own numbers."""
        (line,) = (line for line in self._get("/metrics").splitlines() if line.startswith(f"oscine:{name}{{"))
        return int(float(line.rsplit(" ", 1)[1]))

    def engine(self) -> psutil.Process:
        (engine,) = children("oscine.engine.process.server", psutil.Process(self.pid))
        return engine

    def _get(self, path: str) -> str:
        bound = _STATUS_PORT.search(self.log.read_text())
        if bound is None:
            raise OSError("not there yet")
        with urllib.request.urlopen(f"http://127.0.0.1:{bound[1]}{path}", timeout=10) as response:
            return str(response.read().decode())


class Fleet:
    """Context manager: a frontend with KV routing, and one worker of each role named."""

    def __init__(
        self, folder: Path, vocabulary: Path, *roles: str, frontend: Sequence[str] = (), worker: Sequence[str] = ()
    ) -> None:
        """`frontend` and `worker` are options of theirs."""
        self._folder, self._roles, self._frontend_options, self._worker_options = folder, roles, frontend, worker
        store, home = folder / "discovery", folder / "home"
        store.mkdir(parents=True)
        home.mkdir()
        self._environment = os.environ | _ENVIRONMENT
        self._environment |= {"DYN_FILE_KV": str(store), "HOME": str(home), "TIKTOKEN_ENCODINGS_BASE": str(vocabulary)}
        self._exit = ExitStack()
        self.workers: list[DynamoWorker] = []

    def __enter__(self) -> "Fleet":
        with ExitStack() as stack:
            self._port = stack.enter_context(kept_port())  # the frontend does not tell which port it got
            url = f"http://127.0.0.1:{self._port}/v1"
            self.client = stack.enter_context(openai.OpenAI(base_url=url, api_key="none", max_retries=0))
            command = [sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1"]
            command += ["--http-port", str(self._port), "--router-mode", "kv", *self._frontend_options]
            self.frontend = Process("frontend", command, self._environment, self._folder)
            stack.callback(self.frontend.end)
            for number, role in enumerate(self._roles):
                worker = DynamoWorker(f"{role}-{number}", role, self._worker_options, self._environment, self._folder)
                stack.callback(worker.end)
                self.workers.append(worker)
            self._wait_ready()
            self._exit = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        family = [process for one in self._processes() for process in one.family()]
        self._exit.close()
        assert not psutil.wait_procs(family, END_S)[1]

    def _processes(self) -> list[Process]:
        return [one for one in (self.frontend, *self.workers) if one.exit_code is None]

    def _wait_ready(self) -> None:
        wait_until(self._is_ready, "a frontend that knows all workers", READY_S)
        dead = [one for one in (self.frontend, *self.workers) if one.exit_code is not None]
        assert not dead, dead[0].log.read_text()

    def _is_ready(self) -> bool:
        """Also when one has ended: nothing more will come then."""
        if any(one.exit_code is not None for one in (self.frontend, *self.workers)):
            return True
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=10) as response:
                known = [one for one in json.load(response)["instances"] if one["endpoint"] == "generate"]
            listed = [model.id for model in self.client.models.list()]
        except (OSError, openai.APIError):
            return False
        return len(known) == len(self.workers) and listed == [MODEL] and all(worker.is_ready for worker in self.workers)

    def ask(self, *messages: dict[str, Any], **more: Any) -> Any:
        """A greedy answer."""
        return self.client.chat.completions.create(
            model=MODEL, messages=list(messages), **({"temperature": 0, "max_tokens": 200} | more)
        )
