"""Engines in processes of their own that share the requests of a load: `oscine bench engine --data-parallel-size N`.

The processes are forks, so they have their options and the descriptors of their group. A line of JSON asks for a pass,
and another one tells its times. When one process fails, all end; they also end with the process that started them.
"""

import atexit
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

from oscine.engine.build import build_engine
from oscine.extensions.bench.passes import Limits, MeasureError, OwnEngine, Timing
from oscine.extensions.bench.result import Point
from oscine.extensions.parallel.rendezvous import Rendezvous
from oscine.settings.config import EngineOptions
from oscine.system.python_child import die_with_parent
from oscine.types import RankHandle


class _Process(NamedTuple):
    pid: int
    socket: socket.socket
    lines: Any  # what it says


class EngineProcesses:
    """Make it before this process uses a GPU or starts threads."""

    def __init__(self, options: Sequence[EngineOptions], *, share_experts: bool) -> None:
        """Returns when all engines are ready. Raises ValueError for what a user can mend, else MeasureError."""
        self._processes: list[_Process] = []
        atexit.register(self.close)  # waits until their memory is free
        rendezvous = Rendezvous(len(options)) if share_experts else None
        try:
            for rank, own in enumerate(options):
                self._processes.append(
                    _fork(own, rank, len(options), None if rendezvous is None else rendezvous.handle(rank))
                )
            ready = self._answers()
        except BaseException:
            self.close()
            raise
        self.model = str(ready[0]["model"])
        self.gpus: Sequence[str] = [gpu for one in ready for gpu in one["gpus"]]
        self.limits = Limits(*map(min, zip(*(one["limits"] for one in ready), strict=True)))

    def prepare(self, point: Point) -> None:
        self._ask(replace(point, osl=0))

    def run(self, point: Point) -> Timing:
        passes = self._ask(point)
        began_s = min(one["began_s"] for one in passes)
        full_s, first_s = (max(one["began_s"] + one[name] for one in passes) for name in ("full_s", "first_s"))
        return Timing(full_s - began_s, first_s - began_s)

    def num_held(self, point: Point) -> int:
        return sum(one["num_held"] for one in self._ask(replace(point, concurrency=0)))

    def close(self) -> None:
        atexit.unregister(self.close)
        processes, self._processes = self._processes, []
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)
            process.lines.close()
            process.socket.close()

    def _ask(self, point: Point) -> list[dict[str, Any]]:
        for process in self._processes:
            process.socket.sendall(_line([point.concurrency, point.isl, point.osl]))
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        """One of each process. Raises what the first one that fails says."""
        answers: dict[int, dict[str, Any]] = {}
        while len(answers) < len(self._processes):
            open_lines = {one.lines: rank for rank, one in enumerate(self._processes) if rank not in answers}
            for lines in select.select(list(open_lines), [], [])[0]:
                rank = open_lines[lines]
                answers[rank] = self._checked(rank, lines.readline())
        return [answers[rank] for rank in range(len(self._processes))]

    def _checked(self, rank: int, line: bytes) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(line) if line else {"error": "its process ended", "is_users": False}
        if "error" in answer:
            self.close()
            message = answer["error"]
            raise ValueError(message) if answer["is_users"] else MeasureError(f"engine {rank}: {message}")
        return answer


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _fork(options: EngineOptions, rank: int, num_engines: int, handle: RankHandle | None) -> _Process:
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _be_engine(theirs, options, rank, num_engines, handle)
    theirs.close()
    return _Process(pid, ours, ours.makefile("rb"))


def _be_engine(
    asked: socket.socket, options: EngineOptions, rank: int, num_engines: int, handle: RankHandle | None
) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    try:
        _serve(asked, options, rank, num_engines, handle)
    except BaseException as error:
        is_users = isinstance(error, ValueError | OSError)
        if not is_users:
            traceback.print_exc()
        with suppress(OSError):
            asked.sendall(_line({"error": str(error) or type(error).__name__, "is_users": is_users}))
    finally:
        sys.stderr.flush()
        os._exit(0)


def _serve(
    asked: socket.socket, options: EngineOptions, rank: int, num_engines: int, handle: RankHandle | None
) -> None:
    """Takes part in the steps of the others between its own passes."""
    if options.num_threads is not None:
        import torch

        torch.set_num_threads(options.num_threads)
    built = build_engine(options, handle)
    engine = OwnEngine(built, share=rank, num_shares=num_engines)
    gc.collect()
    gc.freeze()  # as the engine process does
    asked.sendall(_line({"model": engine.model, "gpus": engine.gpus, "limits": engine.limits}))
    loop, lines = built.loop, asked.makefile("rb")
    waiting: list[Any] = [asked, *(one for extension in loop.extensions if (one := extension.fileno()) is not None)]
    while True:
        if select.select([asked], [], [], 0)[0]:
            if not (line := lines.readline()):
                return
            asked.sendall(_line(_pass(engine, Point(*json.loads(line)))))
        elif loop.has_work:
            loop.step()
        else:
            select.select(waiting, [], [])


def _pass(engine: OwnEngine, point: Point) -> dict[str, float]:
    """Without requests, how many run at once. Without tokens to generate, only the prompts are made."""
    if not point.concurrency:
        return {"num_held": engine.num_held(point)}
    engine.prepare(point)
    if not point.osl:
        return {}
    began_s = time.perf_counter()
    timing = engine.run(point)
    return {"began_s": began_s, "full_s": timing.full_s, "first_s": timing.first_s}
