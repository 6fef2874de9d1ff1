"""Engines that share experts, in processes of their own, which run the same steps at the same time.

The processes are forks. A line of JSON asks all of them for a shape, and each answers with its times.
"""

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from oscine.executor.start.build import build_executor
from oscine.extensions.parallel.rendezvous import Rendezvous
from oscine.extensions.profile.grid import Limits, Shape
from oscine.extensions.profile.steps import Steps, Times
from oscine.settings.config import EngineOptions
from oscine.system.python_child import die_with_parent
from oscine.timing.kinds import GraphSizes
from oscine.types import RankHandle


class _Process(NamedTuple):
    pid: int
    socket: socket.socket
    lines: Any


class EngineGroup:
    """Implements Engine for several. Make it before this process uses a GPU or starts threads."""

    def __init__(self, options: Sequence[EngineOptions]) -> None:
        """Raises ValueError if one of them does not start."""
        self._processes: list[_Process] = []
        rendezvous = Rendezvous(len(options))
        try:
            for rank, own in enumerate(options):
                self._processes.append(_fork(own, rendezvous.handle(rank)))
            ready = self._answers()
        except BaseException:
            self.close()
            raise
        self.gpus: Sequence[str] = [gpu for one in ready for gpu in one["gpus"]]
        self.model, self.kv_filled = str(ready[0]["model"]), str(ready[0]["filled"])
        limits = [_limits(one["limits"]) for one in ready]
        least = [min(values) for values in zip(*((one.max_num_seqs, *one.pages) for one in limits), strict=True)]
        self.limits = limits[0]._replace(max_num_seqs=least[0], pages=tuple(least[1:]))

    def measure(self, shape: Shape, count: int) -> Times:
        """The times of the first; watts of all."""
        for process in self._processes:
            process.socket.sendall(_line([*shape, count]))
        answers = self._answers()
        watts = [one["watts"] for one in answers]
        total = None if None in watts else float(sum(watts))
        return Times(answers[0]["ms"], answers[0]["host_ms"], total)

    def close(self) -> None:
        """Kills the processes."""
        processes, self._processes = self._processes, []
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)
            process.lines.close()
            process.socket.close()

    def _answers(self) -> list[dict[str, Any]]:
        """One of each process. Raises ValueError with what the first one says that fails."""
        found: dict[int, dict[str, Any]] = {}
        while len(found) < len(self._processes):
            waiting = {one.lines: i for i, one in enumerate(self._processes) if i not in found}
            for lines in select.select([*waiting], [], [])[0]:
                line = lines.readline()
                answer = json.loads(line) if line else {"error": "its process ended"}
                if "error" in answer:
                    self.close()
                    raise ValueError(f"engine {waiting[lines]}: {answer['error']}")
                found[waiting[lines]] = answer
        return [found[i] for i in range(len(self._processes))]


def _limits(values: list[Any]) -> Limits:
    limits = Limits(*values)
    graphs = GraphSizes(*map(tuple, limits.graphs))
    return limits._replace(pages=tuple(limits.pages), windows=tuple(limits.windows), graphs=graphs)


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _fork(options: EngineOptions, handle: RankHandle) -> _Process:
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _run_engine(theirs, options, handle)
    theirs.close()
    return _Process(pid, ours, ours.makefile("rb"))


def _run_engine(requests: socket.socket, options: EngineOptions, handle: RankHandle) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    try:
        steps = Steps.of(build_executor(options, handle))
        filled = steps.fill()
        model = steps.built.info.model
        requests.sendall(_line({"gpus": steps.gpus, "limits": steps.limits, "model": model, "filled": filled}))
        for line in requests.makefile("rb"):
            *shape, count = json.loads(line)
            requests.sendall(_line(steps.measure(Shape(*shape), count)._asdict()))
    except BaseException as error:
        with suppress(OSError):
            requests.sendall(_line({"error": str(error) or type(error).__name__}))
    finally:
        sys.stderr.flush()
        os._exit(0)
