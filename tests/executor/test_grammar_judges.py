"""Grammars that take hours to compile, each in a process that is killed."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import Future

import psutil
import pytest

from oscine.system.grammar_sandbox import pool
from oscine.system.grammar_sandbox.check import GrammarCheck, Problem
from oscine.system.grammar_sandbox.pool import GrammarSandbox, TooManyGrammarsError, UndecidedError
from tests.hostile_schemas import quartic_schema
from tests.waiting import DEADLINE_S as PATIENCE_S
from tests.waiting import wait_until

GOOD = [GrammarCheck("start: /a+/"), GrammarCheck("start: /b+/", walk=True)]
ENDLESS = [GrammarCheck(json.dumps({"grammars": [{"json_schema": quartic_schema(600)}]}))]


def judge_of(case: "Future[Problem | None]") -> "subprocess.Popen[bytes]":
    """The process that tries this case; waits until it has one."""
    wait_until(lambda: case._worker is not None, "a process for the grammar")  # type: ignore[attr-defined]
    return case._worker  # type: ignore[attr-defined, no-any-return]


def is_gone(process: "subprocess.Popen[bytes]") -> bool:
    return not psutil.pid_exists(process.pid)


def test_the_first_problem_is_found() -> None:
    sandbox = GrammarSandbox()
    assert sandbox.check(GOOD).result(PATIENCE_S) is None
    problem = sandbox.check([*GOOD, GrammarCheck("start: nobody"), GrammarCheck("start: (")]).result(PATIENCE_S)
    assert problem is not None
    assert problem.check == 2
    assert "nobody" in problem.message


@pytest.mark.long
def test_what_takes_too_long_is_stopped_and_the_next_one_is_judged() -> None:
    sandbox = GrammarSandbox(deadline_s=2)
    case = sandbox.check(ENDLESS)
    process = judge_of(case)
    with pytest.raises(UndecidedError, match="longer than 2 s"):
        case.result(PATIENCE_S)
    wait_until(lambda: is_gone(process), "the end of the process")
    assert sandbox.check(GOOD).result(PATIENCE_S) is None


def test_to_cancel_kills_the_process() -> None:
    sandbox = GrammarSandbox(deadline_s=PATIENCE_S)
    case = sandbox.check(ENDLESS)
    process = judge_of(case)
    case.cancel()
    wait_until(lambda: is_gone(process), "the end of the process")
    assert sandbox.check(GOOD).result(PATIENCE_S) is None


def test_a_process_that_dies_is_no_verdict() -> None:
    sandbox = GrammarSandbox(deadline_s=PATIENCE_S)
    case = sandbox.check(ENDLESS)
    os.kill(judge_of(case).pid, signal.SIGKILL)
    with pytest.raises(UndecidedError, match="memory"):
        case.result(PATIENCE_S)
    assert sandbox.check(GOOD).result(PATIENCE_S) is None


def test_one_owner_leaves_room_for_others() -> None:
    sandbox = GrammarSandbox(2, deadline_s=PATIENCE_S)
    endless = [sandbox.check(ENDLESS, "a") for _ in range(8)]
    waiting = sandbox.check(GOOD, "a")
    assert sandbox.check(GOOD, "b").result(PATIENCE_S) is None
    assert not waiting.done()
    for case in endless:
        case.cancel()
    assert waiting.result(PATIENCE_S) is None


def test_an_owner_has_so_many_waiting_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscine.system.grammar_sandbox.pool._MAX_WAITING", 3)
    sandbox = GrammarSandbox(2, deadline_s=PATIENCE_S)
    first = sandbox.check(ENDLESS, "a")
    wait_until(first.running, "the first one's turn")
    cases = [sandbox.check(ENDLESS, "a") for _ in range(3)]
    with pytest.raises(TooManyGrammarsError):
        sandbox.check(GOOD, "a")
    assert sandbox.check(GOOD, "b").result(PATIENCE_S) is None
    for case in [*cases, first]:
        case.cancel()


def test_an_idle_process_that_died_is_replaced_and_leaves_no_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = list[subprocess.Popen[bytes]](), pool._start

    def noted() -> subprocess.Popen[bytes]:
        started.append(start())
        return started[-1]

    monkeypatch.setattr(pool, "_start", noted)
    sandbox = GrammarSandbox()
    assert sandbox.check(GOOD).result(PATIENCE_S) is None
    wait_until(lambda: sandbox._num_idle == 1, "an idle process")
    started[0].kill()
    started[0].wait(PATIENCE_S)
    assert sandbox.check(GOOD).result(PATIENCE_S) is None
    assert len(started) == 2
    assert all(pipe is not None and pipe.closed for pipe in (started[0].stdin, started[0].stdout))


def test_a_process_that_ends_at_its_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "module_command", lambda module: [sys.executable, "-c", ""])
    with pytest.raises(OSError, match="ended at its start"):
        GrammarSandbox().check(GOOD).result(PATIENCE_S)
