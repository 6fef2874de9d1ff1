"""Processes that end, stop, sleep or work, and what a wait for them says."""

import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from oscine.executor.parallel import liveness
from oscine.executor.parallel.liveness import Vigil, cpu_ticks, is_stopped
from oscine.executor.parallel.meeting import Meeting
from oscine.executor.parallel.processes import RankProcesses
from oscine.executor.parallel.store_order import require_store_order
from oscine.types import RankLostError
from tests.waiting import wait_until

SLEEPS, WORKS = "import time; time.sleep(600)", "while True: pass"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "LOOK_S", 0.05)


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", request.param]) as process:
        yield process
        process.kill()


def test_processors_that_reorder_stores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_store_order()
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(ValueError, match="need an x86-64 processor, not aarch64"):
        RankProcesses(2)
    with pytest.raises(ValueError, match="need an x86-64 processor, not aarch64"):
        Meeting(2)


def nothing() -> None:
    pass


def looks(vigil: Vigil, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        vigil.look()
        time.sleep(0.005)


@pytest.mark.parametrize("process", [SLEEPS], indirect=True)
def test_a_process_at_work_that_takes_no_time_of_a_cpu_hangs(process: subprocess.Popen[bytes]) -> None:
    with pytest.raises(RankLostError, match="rank 1 did nothing for 5 s"):
        looks(Vigil(nothing, {"rank 1": process.pid}), 60)


@pytest.mark.parametrize("process", [WORKS], indirect=True)
def test_a_process_that_works_does_not_hang_until_it_is_stopped(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "LOOK_S", 0.5)  # in which even a busy machine gives it a tick
    ticks = cpu_ticks(process.pid)
    looks(Vigil(nothing, {"rank 1": process.pid}), 4)
    assert cpu_ticks(process.pid) > ticks
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(RankLostError, match="rank 1 did nothing"):
        looks(Vigil(nothing, {"rank 1": process.pid}), 60)


@pytest.mark.parametrize("process", [SLEEPS], indirect=True)
def test_a_process_that_may_be_idle_is_lost_only_when_it_is_stopped(process: subprocess.Popen[bytes]) -> None:
    looks(Vigil(nothing, {"rank 0": process.pid}, at_work=False), 1)
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(process.pid), "a process that is stopped")
    with pytest.raises(RankLostError, match="rank 0 did nothing"):
        looks(Vigil(nothing, {"rank 0": process.pid}, at_work=False), 60)


@pytest.mark.parametrize("process", [SLEEPS], indirect=True)
def test_a_process_that_goes_on_is_forgiven(process: subprocess.Popen[bytes]) -> None:
    """A wait of its own begins anew, so what was seen before does not count."""
    os.kill(process.pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(process.pid), "a process that is stopped")
    vigil = Vigil(nothing, {"rank 0": process.pid}, at_work=False)
    for _ in range(4):
        time.sleep(0.06)
        vigil.look()
    os.kill(process.pid, signal.SIGCONT)
    wait_until(lambda: not is_stopped(process.pid), "a process that goes on")
    looks(vigil, 1)


def test_one_long_pause_of_the_one_that_waits_proves_nothing() -> None:
    vigil = Vigil(nothing, {"rank 1": os.getppid()}, at_work=False)
    time.sleep(0.5)
    vigil.look()


def test_what_has_ended_is_said_at_once() -> None:
    def fail() -> None:
        raise RankLostError("rank 1 was killed by signal 9")

    with pytest.raises(RankLostError, match="rank 1 was killed by signal 9"):
        Vigil(fail, {}).look()


def test_a_process_that_is_gone_has_no_state() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert (cpu_ticks(process.pid), is_stopped(process.pid)) == (-1, False)
