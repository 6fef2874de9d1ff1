"""Processes that are forks of this one, each with a socket: a line of JSON asks, another one answers.

A fork has what this process has, such as options and the descriptors of a group. When one fails, all end; they also end
with this process.
"""

import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from oscine.system.python_child import die_with_parent

Body = Callable[[socket.socket], None]  # what a fork does; it answers on the socket
Answer = dict[str, Any]


class ForkError(Exception):
    """A fork failed, or its process ended. `place`: which of them; `answer`: what it said last, with an error."""

    def __init__(self, place: int, answer: Answer) -> None:
        super().__init__(answer["error"])
        self.place, self.answer = place, answer


class _Process(NamedTuple):
    pid: int
    socket: socket.socket
    lines: Any  # what it says


class Forks:
    """Make it before this process uses a GPU or starts threads."""

    def __init__(self, bodies: Iterable[Body], failure: Callable[[BaseException], Answer]) -> None:
        """`failure`: called in a fork that raises; returns its last answer, which has an error."""
        self._processes: list[_Process] = []
        try:
            for body in bodies:
                self._processes.append(_fork(body, failure))
        except BaseException:
            self.close()
            raise

    def ask(self, question: object) -> list[Answer]:
        """The answer of each. Raises ForkError."""
        for process in self._processes:
            process.socket.sendall(line(question))
        return self.answers()

    def answers(self) -> list[Answer]:
        """One of each process. Raises ForkError for the first one that fails, when all have ended."""
        found: dict[int, Answer] = {}
        while len(found) < len(self._processes):
            waiting = {one.lines: place for place, one in enumerate(self._processes) if place not in found}
            for lines in select.select([*waiting], [], [])[0]:
                text = lines.readline()
                answer: Answer = json.loads(text) if text else {"error": "its process ended"}
                if "error" in answer:
                    self.close()
                    raise ForkError(waiting[lines], answer)
                found[waiting[lines]] = answer
        return [found[place] for place in range(len(self._processes))]

    def close(self) -> None:
        """Kills the processes, and waits for their end."""
        processes, self._processes = self._processes, []
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)
            process.lines.close()
            process.socket.close()


def line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _fork(body: Body, failure: Callable[[BaseException], Answer]) -> _Process:
    ours, theirs = socket.socketpair()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _run(body, theirs, failure)
    theirs.close()
    return _Process(pid, ours, ours.makefile("rb"))


def _run(body: Body, questions: socket.socket, failure: Callable[[BaseException], Answer]) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    try:
        body(questions)
    except BaseException as error:
        answer = failure(error)
        with suppress(OSError):
            questions.sendall(line(answer))
    finally:
        sys.stderr.flush()
        os._exit(0)
