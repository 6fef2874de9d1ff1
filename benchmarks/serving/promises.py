"""Tests promises about a running server: the resources that it holds, whether it answers, and one line per promise."""

import json
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.serving.server import Server

SETTLE_S = 10.0
QUESTION = [{"role": "user", "content": "What is 27 + 58?"}]
ANSWER = "85"
CHECKERS = 2  # of grammars: the API process and the engine start a second one on demand, and keep it
POOL_THREADS = min(32, (os.cpu_count() or 1) + 4)  # of asyncio.to_thread, which starts them on demand and keeps them
STORES = "vector_stores.db"  # the database of file search
STORE_FILES = 3 * 4  # of it: the writer, two readers and who reads files connect on demand, and each opens up to three


class Broken(Exception):  # noqa: N818  (reads as what happened)
    """A promise that was not kept."""


UNMEASURED = 75  # exit status: EX_TEMPFAIL of sysexits.h


class Unmeasured(Exception):  # noqa: N818  (reads as what happened)
    """This machine was too busy to tell whether a promise was kept."""


def require(condition: bool, what: str) -> None:
    if not condition:
        raise Broken(what)


@dataclass(frozen=True)
class Holdings:
    """The system resources of an idle server."""

    files: int  # descriptors of the API process, but those of the database of vector stores
    threads: int
    tasks: int
    connections: int
    processes: int  # but sandbox
    sandbox: int
    shared: frozenset[str]  # mapped segments of shared memory, and files in the server's own temporary folder

    @classmethod
    def of(cls, server: Server) -> "Holdings":
        process = psutil.Process(server.pid)
        children = process.children(recursive=True)
        mapped: set[str] = set()
        sandbox = 0
        for each in children:
            with suppress(psutil.NoSuchProcess):  # it has just ended
                sandbox += "oscine.system.grammar_sandbox.process" in each.cmdline()
        for each in (process, *children):
            with suppress(psutil.NoSuchProcess):
                mapped |= {part.path for part in each.memory_maps() if part.path.startswith("/dev/shm")}
        mapped |= _files_below(server.folder) if server.folder is not None else set()
        files = _open_files(server.pid)
        stores = sum(STORES in file for file in files)
        require(stores <= STORE_FILES, f"{stores} files of {STORES} are open")
        return cls(
            files=len(files) - stores,
            threads=process.num_threads(),
            tasks=int(server.metric("oscine:asyncio_tasks")),
            connections=int(server.metric("oscine:http_connections")),
            processes=len(children) - sandbox,
            sandbox=sandbox,
            shared=frozenset(mapped),
        )

    def beyond(self, before: "Holdings") -> dict[str, Any]:
        slack = {"threads": POOL_THREADS, "files": 0, "tasks": 0, "connections": 0, "processes": 0, "sandbox": CHECKERS}
        more = {
            name: f"{getattr(before, name)} -> {getattr(self, name)}"
            for name, allowed in slack.items()
            if getattr(self, name) > getattr(before, name) + allowed
        }
        return more | (
            {"shared": len(self.shared) - len(before.shared)} if len(self.shared) > len(before.shared) else {}
        )


def _open_files(pid: int) -> list[str]:
    """What the descriptors of a process are: paths, sockets, pipes."""
    found: list[str] = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # it has just been closed
            found.append(os.readlink(descriptor))
    return found


def _files_below(folder: Path) -> set[str]:
    """Files may vanish meanwhile."""
    return {os.path.join(place, name) for place, folders, files in os.walk(folder) for name in (*folders, *files)}


def settle(server: Server, before: Holdings) -> None:
    """Raises Broken if the server still holds more than `before` after a deadline."""
    wait(lambda: not Holdings.of(server).beyond(before), SETTLE_S)
    more = Holdings.of(server).beyond(before)
    require(not more, f"the server leaks: {more}")


def wait(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def is_ready(server: Server) -> bool:
    try:
        return bool(server.get("/v1/health/ready"))
    except urllib.error.HTTPError:
        return False


def answers_right(server: Server) -> bool:
    body = json.dumps({"messages": QUESTION, "temperature": 0}).encode()
    request = urllib.request.Request(f"{server.url}/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return ANSWER in str(json.load(response)["choices"][0]["message"]["content"])


def with_server(check: Callable[[Server], str], *options: str) -> str:
    """Starts a server with its own folder for sockets, in which leftovers can be seen."""
    with tempfile.TemporaryDirectory() as folder:
        with Server("--log-level", "error", *options, environment={"TMPDIR": folder}) as server:
            found = check(server)
        left = [*Path(folder).iterdir()]
        require(not left, f"left behind at the end: {left}")
        return found


def keep(promises: dict[str, Callable[[], str]]) -> int:
    """Prints one line per promise. Returns 1 if one was broken, else UNMEASURED if one could not be measured."""
    broken = unmeasured = 0
    for name, check in promises.items():
        started_s = time.monotonic()
        try:
            found = check()
        except Broken as error:
            broken += 1
            found = f"BROKEN: {error}"
        except Unmeasured as error:
            unmeasured += 1
            found = f"NOT MEASURED: {error}"
        print(f"{name}: {found} ({time.monotonic() - started_s:.0f} s)", flush=True)
    if unmeasured:
        print(f"{unmeasured} of {len(promises)} could not be measured", flush=True)
    return 1 if broken else UNMEASURED if unmeasured else 0
