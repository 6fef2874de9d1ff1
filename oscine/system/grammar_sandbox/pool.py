"""Tries grammars in processes that are killed when they take too long. Compiling a hostile grammar can take hours.

Checks have threads and processes of their own. So a slow grammar delays other grammars only, not the exit of the
server. Any thread may call.
"""

import contextlib
import json
import os
import select
import subprocess
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cache

from oscine.system.grammar_sandbox.check import GrammarCheck, Problem
from oscine.system.python_child import child_environment, module_command

# An ordinary grammar takes milliseconds. The server tries each before the engine tries and compiles it: 10 s in all.
DEADLINE_S = 5.0
_MAX_WORKERS = 4
_MAX_WAITING = 256  # per owner


class TooManyGrammarsError(Exception):
    """An owner has the most grammars waiting that it may have."""


class UndecidedError(Exception):
    """A grammar took more time or memory than a check may; the message says which."""


class _Case(Future[Problem | None]):
    """Checks with their result. Cancelling it kills the process that runs the checks."""

    def __init__(self, checks: Sequence[GrammarCheck], owner: str | None) -> None:
        super().__init__()
        self.checks, self.owner = checks, owner
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._is_given_up = False

    def cancel(self) -> bool:
        if super().cancel():
            return True
        with self._lock:
            self._is_given_up = True
            if self._worker is not None:
                self._worker.kill()
        return False

    def tried_by(self, worker: "subprocess.Popen[bytes]", deadline_s: float) -> Problem | None:
        self._give_to(worker)
        try:
            return _answer(worker, self.checks, deadline_s)
        finally:
            self._give_to(None)

    def _give_to(self, worker: "subprocess.Popen[bytes] | None") -> None:
        with self._lock:
            self._worker = worker
            if worker is not None and self._is_given_up:
                worker.kill()


class GrammarSandbox:
    """Checks at most `count` grammars at once, and one less per owner, so that other owners always find room."""

    def __init__(self, count: int | None = None, deadline_s: float = DEADLINE_S) -> None:
        self._count = count or max(2, min(_MAX_WORKERS, len(os.sched_getaffinity(0))))
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._waiting: list[_Case] = []
        self._under_way: Counter[str | None] = Counter()  # by owner
        self._num_threads = self._num_idle = 0

    def start(self) -> None:
        """Starts one process in advance, so that the first grammar does not wait for it."""
        with self._changed:
            if not self._num_threads:
                self._add_thread()

    def check(self, checks: Sequence[GrammarCheck], owner: str | None = None) -> Future[Problem | None]:
        """The first problem of the checks. `owner`: the client to whose limits they count.

        Raises TooManyGrammarsError. The future raises UndecidedError, or OSError if no process can be started.
        """
        case = _Case(checks, owner)
        with self._changed:
            if sum(waiting.owner == owner for waiting in self._waiting) >= _MAX_WAITING:
                raise TooManyGrammarsError
            self._waiting.append(case)
            if not self._num_idle and self._num_threads < self._count:
                self._add_thread()
            self._changed.notify()
        return case

    def _add_thread(self) -> None:
        self._num_threads += 1
        threading.Thread(target=self._work, name="grammar-worker", daemon=True).start()

    def _work(self) -> None:
        """Decides cases with one process, which is started again after it was killed."""
        worker: subprocess.Popen[bytes] | None = None
        with contextlib.suppress(OSError):
            worker = _start()
        while True:
            case = self._next()
            if case.set_running_or_notify_cancel():
                worker = self._decide(case, worker)
            with self._changed:
                self._under_way[case.owner] -= 1
                self._changed.notify_all()

    def _decide(self, case: _Case, worker: "subprocess.Popen[bytes] | None") -> "subprocess.Popen[bytes] | None":
        """Returns the process, unless it is of no more use."""
        try:
            if worker is not None and worker.poll() is not None:
                _end(worker)
                worker = None
            if worker is None:
                worker = _start()
            case.set_result(case.tried_by(worker, self._deadline_s))
        except Exception as error:
            if worker is not None:
                _end(worker)
            case.set_exception(error)
            return None
        return worker

    def _next(self) -> _Case:
        """Waits for a case whose owner may have another one in progress."""
        with self._changed:
            while (case := self._admissible()) is None:
                self._num_idle += 1
                self._changed.wait()
                self._num_idle -= 1
            self._waiting.remove(case)
            self._under_way[case.owner] += 1
            return case

    def _admissible(self) -> _Case | None:
        most = self._count - 1
        return next((case for case in self._waiting if self._under_way[case.owner] < most), None)


def _start() -> subprocess.Popen[bytes]:
    """Starts a process and waits until it is ready, so that its start does not count to a deadline."""
    command, pipe = module_command("oscine.system.grammar_sandbox.process"), subprocess.PIPE
    process = subprocess.Popen(
        command,
        stdin=pipe,
        stdout=pipe,
        stderr=subprocess.DEVNULL,
        env=child_environment(),
        start_new_session=True,  # so that ctrl-C does not reach it
    )
    assert process.stdout is not None
    if not process.stdout.readline():
        _end(process)
        raise OSError("the process that compiles grammars ended at its start")
    return process


def _answer(process: subprocess.Popen[bytes], checks: Sequence[GrammarCheck], deadline_s: float) -> Problem | None:
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(checks).encode() + b"\n")
        process.stdin.flush()
    poller = select.poll()
    poller.register(process.stdout, select.POLLIN)
    if not poller.poll(deadline_s * 1000):
        raise UndecidedError(f"it takes longer than {deadline_s:g} s to compile")
    line = process.stdout.readline()
    if not line:
        raise UndecidedError("it takes too much memory to compile")
    found = json.loads(line)
    return None if found is None else Problem(*found)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with contextlib.suppress(BrokenPipeError):  # from a line that was not read
        process.communicate()


@cache
def sandbox() -> GrammarSandbox:
    """The sandbox of this process, shared by all of its models."""
    return GrammarSandbox()
